"""Which request is number n: text, seed, frame limit and voice, the same in every run and at every concurrency."""

from __future__ import annotations

import base64
import io
import random
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from load_tests.adapters import SAMPLE_RATE_HZ, Clip, SpeechJob

SENTENCES = Path(__file__).with_name("sentences_200.txt")
_CLIP_S = 3.0


@dataclass(frozen=True, slots=True)
class JobMaker:
    """Numbers to requests. frames: lowest and highest limit, drawn per request. clips: taken in turn."""

    texts: Sequence[str]
    seed: int | None = 0
    frames: tuple[int, int] | None = None
    voice: str | None = None
    clips: Sequence[Clip] = ()
    voices: Sequence[str] = ()

    def job(self, number: int) -> SpeechJob:
        limit = None
        if self.frames is not None:
            limit = random.Random(f"{self.seed} {number}").randint(*self.frames)
        return SpeechJob(
            number=number,
            text=self.texts[number % len(self.texts)],
            seed=None if self.seed is None else self.seed + number,
            max_frames=limit,
            voice=self.voices[number % len(self.voices)] if self.voices else self.voice,
            clip=self.clips[number % len(self.clips)] if self.clips else None,
        )


def read_texts(path: Path) -> list[str]:
    """One text a line; empty lines and those that begin with # are left out. Raises OSError, ValueError."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [line for line in lines if line and not line.startswith("#")]
    if not texts:
        raise ValueError(f"{path} holds no text")
    return texts


def long_texts(sentences: Sequence[str], num_chars: int) -> list[str]:
    """Texts of at least `num_chars` characters, each of sentences in a row, one text for each sentence."""
    texts = []
    for first in range(len(sentences)):
        parts: list[str] = []
        length = 0
        while length < num_chars:
            parts.append(sentences[(first + len(parts)) % len(sentences)])
            length += len(parts[-1]) + 1
        texts.append(" ".join(parts))
    return texts


def made_up_clips(count: int) -> list[Clip]:
    """Voices for servers with random weights: a buzz at another pitch each, with pauses as between words."""
    return [
        Clip(
            f"load-test-{number}", base64.b64encode(_buzz(90.0 + 35.0 * number)).decode(), "One, two, three."
        )
        for number in range(count)
    ]


def read_clips(folder: Path, count: int) -> list[Clip]:
    """The first `count` `NAME.wav` of a folder, each with `NAME.txt`, what is said in it. Raises OSError, ValueError."""
    files = sorted(folder.glob("*.wav"))[:count]
    if not files:
        raise ValueError(f"{folder} holds no .wav")
    return [
        Clip(
            file.stem,
            base64.b64encode(file.read_bytes()).decode(),
            file.with_suffix(".txt").read_text(encoding="utf-8").strip(),
        )
        for file in files
    ]


def _buzz(pitch_hz: float) -> bytes:
    """A WAV file."""
    at = np.arange(int(_CLIP_S * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    wave_form = sum(np.sin(2 * np.pi * pitch_hz * k * at) / k for k in range(1, 12))
    syllables = np.clip(np.sin(2 * np.pi * 2.5 * at), 0.0, 1.0)
    pcm = (6_000 * wave_form * syllables).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, SAMPLE_RATE_HZ, len(pcm), "NONE", ""))
        writer.writeframes(pcm.tobytes())
    return file.getvalue()
