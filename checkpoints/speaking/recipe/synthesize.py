"""The corpus: what flite says to the lines, in shards of some minutes, by all cores.

    python -m checkpoints.speaking.recipe.run data --hours 40 --processes 16 --budget-s 400

A shard is one safetensors file, written whole or not at all; a second call makes only those that
are missing, so a training that reads along, or a call that was cut, loses nothing.

Every utterance is cut to whole frames: two frames of silence in front (speech then starts some five
tokens behind the text), its lines with short pauses between, and at least three frames of silence
after it (where the end of speech is learned). Phone labels lie on a grid of 20 ms, four a frame.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from checkpoints.speaking.recipe import teacher
from checkpoints.speaking.recipe.layout import VOICES
from checkpoints.speaking.recipe.lines import Lines, Utterance, read_lines
from checkpoints.speaking.recipe.sitting import Journal
from qwen3tts_core.text.prompt import text_tokens
from qwen3tts_core.text.tokenizer import TextTokenizer

SAMPLES_PER_FRAME = 1_280  # at the teacher's 16 kHz
LABELS_PER_FRAME = 4
_SAMPLES_PER_LABEL = SAMPLES_PER_FRAME // LABELS_PER_FRAME
_LEADING_FRAMES, _TRAILING_FRAMES = 2, 3
_PAUSES_S = (0.2, 0.3)
UTTERANCES_PER_SHARD = 100  # about 6 minutes of speech, 8 s of one core, 12 MB


@dataclass(frozen=True, slots=True)
class Spoken:
    """samples: [F * 1280] int16. phones: [F * 4] uint8."""

    samples: NDArray[np.int16]
    phones: NDArray[np.uint8]

    @property
    def num_frames(self) -> int:
        return len(self.samples) // SAMPLES_PER_FRAME


def speak(flite: teacher.Flite, utterance: Utterance, rng: Random) -> Spoken:
    """One utterance on the frame grid."""
    samples = [np.zeros(_LEADING_FRAMES * SAMPLES_PER_FRAME, np.int16)]
    labels = [np.zeros(_LEADING_FRAMES * SAMPLES_PER_FRAME, np.uint8)]
    for i, line in enumerate(utterance.lines):
        said = flite.say(line, utterance.voice)
        pause = round(rng.uniform(*_PAUSES_S) * teacher.SAMPLE_RATE_HZ) if i + 1 < len(utterance.lines) else 0
        samples += [said.samples, np.zeros(pause, np.int16)]
        labels += [sample_labels(said), np.zeros(pause, np.uint8)]
    total = sum(map(len, samples)) + _TRAILING_FRAMES * SAMPLES_PER_FRAME
    whole = -(-total // SAMPLES_PER_FRAME) * SAMPLES_PER_FRAME
    wave, phones = np.zeros(whole, np.int16), np.zeros(whole, np.uint8)
    wave[: sum(map(len, samples))] = np.concatenate(samples)
    phones[: sum(map(len, labels))] = np.concatenate(labels)
    return Spoken(wave, phones[_SAMPLES_PER_LABEL // 2 :: _SAMPLES_PER_LABEL])


def sample_labels(said: teacher.Utterance) -> NDArray[np.uint8]:
    """The phone of every sample; silence beyond the last end."""
    ends = np.minimum((said.ends_s * teacher.SAMPLE_RATE_HZ).astype(int), len(said.samples))
    lengths = np.diff(ends, prepend=0)
    labels = np.zeros(len(said.samples), np.uint8)
    labels[: ends[-1] if len(ends) else 0] = np.repeat(said.phones, lengths)
    return labels


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class ShardMaker:
    """What one process makes shards with. flite_folder: where the libraries lie."""

    lines_file: Path
    tokenizer_folder: Path
    flite_folder: Path
    out: Path
    seed: int
    utterances: int = UTTERANCES_PER_SHARD

    def __call__(self, number: int) -> float:
        """Make shard `number`; its seconds of audio."""
        lines, flite, tokenizer = _opened(self)
        first = number * self.utterances
        utterances = [lines.utterance(self.seed, first + i) for i in range(self.utterances)]
        spoken = [
            speak(flite, utterance, Random(f"{self.seed}/pause/{first + i}"))
            for i, utterance in enumerate(utterances)
        ]
        texts = [text_tokens(tokenizer, utterance.text) for utterance in utterances]
        tensors = {
            "samples": np.concatenate([one.samples for one in spoken]),
            "phones": np.concatenate([one.phones for one in spoken]),
            "num_frames": np.array([one.num_frames for one in spoken], np.int32),
            "voices": np.array([VOICES.index(utterance.voice) for utterance in utterances], np.uint8),
            "text_ids": np.concatenate([np.array(ids, np.int16) for ids in texts]),
            "num_text": np.array([len(ids) for ids in texts], np.int32),
        }
        write_whole(self.out / shard_name(number), tensors)
        return len(tensors["samples"]) / teacher.SAMPLE_RATE_HZ


def write_whole(path: Path, tensors: dict[str, NDArray[np.generic]]) -> None:
    """A file is there entirely or not at all: trainings read along."""
    partial = path.with_suffix(".partial")
    save_file({name: torch.from_numpy(array) for name, array in tensors.items()}, str(partial))
    partial.rename(path)


_cache: dict[ShardMaker, tuple[Lines, teacher.Flite, TextTokenizer]] = {}


def _opened(maker: ShardMaker) -> tuple[Lines, teacher.Flite, TextTokenizer]:
    """Once per process: dictionary, libraries and tokenizer take seconds to open."""
    if maker not in _cache:
        _cache[maker] = (
            read_lines(maker.lines_file),
            teacher.Flite(maker.flite_folder),
            TextTokenizer.from_checkpoint(maker.tokenizer_folder),
        )
    return _cache[maker]


def synthesize(
    maker: ShardMaker, *, hours: float, processes: int, budget_s: float, journal: Journal
) -> float:
    """Make shards until there are `hours` of speech or the time is over; the hours that are there.

    Shards that exist count as they are. Numbers rise without gaps, so `hours` more continue the corpus.
    """
    maker.out.mkdir(parents=True, exist_ok=True)
    started, made_s = time.monotonic(), sum(map(seconds_of, sorted(maker.out.glob("shard-*.safetensors"))))
    number = 0
    # Forked, though threads may be frowned upon: sixteen imports of torch would take longer than the first shard.
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        running: set[Future[float]] = set()

        def fill() -> None:
            nonlocal number
            while len(running) < processes and time.monotonic() - started < budget_s:
                if not (maker.out / shard_name(number)).exists():
                    running.add(pool.submit(maker, number))
                number += 1

        if made_s < hours * 3600:
            fill()
        while running:
            done = next(as_completed(running))
            running.remove(done)
            made_s += done.result()
            elapsed = time.monotonic() - started
            journal.write(stage="data", elapsed_s=round(elapsed, 1), hours=round(made_s / 3600, 3))
            if made_s + len(running) * made_s / max(1, number) < hours * 3600:
                fill()
    return made_s / 3600


def seconds_of(shard: Path) -> float:
    from safetensors import safe_open

    with safe_open(shard, framework="np") as file:
        return float(file.get_slice("samples").get_shape()[0]) / teacher.SAMPLE_RATE_HZ


def say_all(flite_folder: Path, texts: Sequence[str], voice: str) -> list[Spoken]:
    """The teacher's own reading of some sentences, each alone."""
    flite = teacher.Flite(flite_folder)
    return [speak(flite, Utterance((text,), voice), Random(0)) for text in texts]
