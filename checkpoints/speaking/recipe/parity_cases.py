"""What the official package says on this checkpoint, in the form that `tests.parity.check` compares.

    venv-ref/bin/python checkpoints/speaking/recipe/parity_cases.py KIT CHECKPOINT OUT.npz
    .venv/bin/python -m tests.parity.check --checkpoint CHECKPOINT --golden OUT.npz

Runs in the reference's own environment (qwen-tts 0.1.1, transformers 4.57.3), and imports nothing of ours. KIT is the
folder of the parity kit, whose `make_golden.py` runs the package; its cases name the tiny checkpoints' speakers, so ours go
in their place. Greedy codes of both layouts, with and without a language, for all three speakers.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

LONGEST_FRAMES = 120
TEXTS = ("The train to London leaves at half past seven.", "Good morning, Anna.")


def main(kit: str, checkpoint: str, out: str) -> None:
    sys.path.insert(0, kit)
    import make_golden  # type: ignore[import-not-found]

    cases = [
        make_golden.case(
            f"{voice}_{language.lower()}_{layout}", text, layout == "stream", language, speaker=voice
        )
        for voice, text in zip(("slt", "rms", "awb"), (*TEXTS, TEXTS[0]), strict=True)
        for language in ("Auto", "English")
        for layout in ("stream", "full")
    ]
    make_golden.CASES["custom_voice"] = cases
    make_golden.BATCHES["custom_voice"] = [("mixed_full", ["slt_english_full", "rms_english_full"])]
    # To the end of speech: the kit's own runs stop after its 14 frames, which it has as a default argument, too.
    make_golden.N_GREEDY = LONGEST_FRAMES
    make_golden.generate = partial(make_golden.generate, max_new_tokens=LONGEST_FRAMES)
    sys.argv = ["make_golden.py", "--checkpoint", checkpoint, "--out", out]
    make_golden.main()


if __name__ == "__main__":
    main(*map(str, map(Path, sys.argv[1:4])))
