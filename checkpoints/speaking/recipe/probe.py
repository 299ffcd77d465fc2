"""How well a talker speaks, without a speech recogniser: for the minutes of a training.

The first book is phonetic, so what was said can be read from group 0: each code stands for the phone it
mostly meets in the corpus. The phones of free runs of held-out sentences are compared with the teacher's.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from checkpoints.speaking.recipe.export import export_talker
from checkpoints.speaking.recipe.layout import VOICES
from checkpoints.speaking.recipe.lines import held_out_sentences
from checkpoints.speaking.recipe.speaking import Wanted, utter
from checkpoints.speaking.recipe.synthesize import LABELS_PER_FRAME, say_all
from checkpoints.speaking.recipe.teacher import PHONES

_NUM_SENTENCES = 12
_SKELETON = ("*.json", "*.txt")


def write_probe(file: Path, flite_folder: Path) -> None:
    """Some held-out sentences with the teacher's frames and phones, for machines that needn't ask it."""
    texts, probe = held_out_sentences()[:_NUM_SENTENCES], []
    for i, text in enumerate(texts):
        voice = VOICES[i % len(VOICES)]
        said = say_all(flite_folder, [text], voice)[0]
        middle = said.phones.reshape(-1, LABELS_PER_FRAME)[:, 2]
        probe.append({"text": text, "voice": voice, "frames": said.num_frames, "phones": middle.tolist()})
    file.write_text(json.dumps(probe), encoding="utf-8")


def code_phones(codes: Tensor, phones: Tensor, codebook_size: int) -> NDArray[np.uint8]:
    """[codebook_size]: the phone that each group-0 code mostly meets. codes: [F, G]; phones: [F]."""
    counts = torch.zeros(codebook_size, len(PHONES), dtype=torch.int64)
    flat = codes[:, 0].long() * len(PHONES) + phones.long()
    counts.view(-1).scatter_add_(0, flat, torch.ones_like(flat))
    return counts.argmax(dim=1).numpy().astype(np.uint8)


def spoken_phones(phones: Sequence[int]) -> list[int]:
    """Runs of one phone once, silence left out."""
    return [phone for phone, _ in groupby(phones) if phone]


def num_edits(true: Sequence[int], said: Sequence[int]) -> int:
    """Levenshtein's distance. Own, for the machines that train have no library for it."""
    row = list(range(len(said) + 1))
    for i, a in enumerate(true, start=1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(said, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def probe_talker(
    skeleton: Path, probe: Path, tensors: Mapping[str, Tensor], table: NDArray[np.uint8], device: torch.device
) -> dict[str, float]:
    """Free runs of the probe's sentences.

    skeleton: a folder with the checkpoint's JSON and tokenizer. Returns the phone error rate, the
    ratio of frames to the teacher's, and the share that ended by itself.
    """
    sentences = json.loads(probe.read_text(encoding="utf-8"))
    wanted = [Wanted(one["text"], one["voice"], seed=i) for i, one in enumerate(sentences)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for pattern in _SKELETON:
            for file in skeleton.glob(pattern):
                shutil.copy(file, folder)
        shutil.copytree(skeleton / "speech_tokenizer", folder / "speech_tokenizer")
        export_talker(folder, tensors)
        uttered = utter(folder, wanted, device=device, num_slots=len(wanted), most_frames=150)
    said = [spoken_phones(table[one.codes[:, 0]].tolist()) for one in uttered]
    true = [spoken_phones(one["phones"]) for one in sentences]
    edits = sum(num_edits(a, b) for a, b in zip(true, said, strict=True))
    return {
        "phone_errors": round(edits / sum(map(len, true)), 3),
        "length_ratio": round(
            sum(len(one.codes) for one in uttered) / sum(one["frames"] for one in sentences), 3
        ),
        "ended": round(sum(one.has_ended for one in uttered) / len(uttered), 3),
    }
