"""What the checkpoint is worth: word error rates of the teacher, of the codec and of free runs.

    python -m checkpoints.speaking.recipe.run evaluate --checkpoint FOLDER [--sentences 40]

40 plain sentences that no training has seen, per speaker: as flite says them; flite's recording through the codec
(needs the trained encoder, which lies in the codec's training checkpoint); and spoken freely from the text, by the
project's own engine. Transcribed by Whisper tiny.en, offline, and counted as `load_tests.wer` counts. Needs the extra `wer`.
"""

from __future__ import annotations

import json
import wave
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from checkpoints.speaking.recipe.codec_model import Codec
from checkpoints.speaking.recipe.corpus import resample_16k_to_24k
from checkpoints.speaking.recipe.layout import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME, VOICES
from checkpoints.speaking.recipe.sitting import Journal
from checkpoints.speaking.recipe.speaking import Uttered, Wanted, to_samples, utter
from checkpoints.speaking.recipe.synthesize import Spoken, say_all
from load_tests.wer import Heard, corpus_wer, open_whisper

_LONGEST_HYPOTHESIS = (
    2  # times the reference's words: a decoding loop over noise is one error a word, not a hundred
)


@dataclass(frozen=True, slots=True)
class Score:
    """One row of the model card. kind: teacher, codec or talker; percent: its WER.

    length_ratio: frames to the teacher's, all sentences together. num_ended: by the end of speech.
    """

    kind: str
    voice: str
    percent: float
    num_edits: int
    num_words: int
    length_ratio: float
    num_ended: int


class Listener:
    """Writes WAVs and has them transcribed."""

    def __init__(self, out: Path) -> None:
        self._out, self._transcribe = out, open_whisper(None)

    def score(
        self,
        kind: str,
        voice: str,
        texts: Sequence[str],
        samples: Sequence[NDArray[np.int16]],
        teacher: Sequence[Spoken],
        num_ended: int,
    ) -> Score:
        heard = []
        for i, (text, wave_samples) in enumerate(zip(texts, samples, strict=True)):
            file = self._out / f"{kind}-{voice}-{i:02d}.wav"
            write_wav(file, wave_samples)
            words = self._transcribe(file).split() if len(wave_samples) else []
            heard.append(Heard(i, text, " ".join(words[: _LONGEST_HYPOTHESIS * len(text.split())])))
        (self._out / f"{kind}-{voice}.json").write_text(
            json.dumps([asdict(one) for one in heard], indent=1), encoding="utf-8"
        )
        wer = corpus_wer(heard)
        frames = sum(len(one) for one in samples) / SAMPLES_PER_FRAME
        ratio = frames / sum(one.num_frames for one in teacher)
        return Score(
            kind, voice, round(wer.percent, 2), wer.num_edits, wer.num_words, round(ratio, 3), num_ended
        )


def evaluate(
    checkpoint: Path,
    flite_folder: Path,
    texts: Sequence[str],
    out: Path,
    *,
    codec: Codec | None,
    speaks: bool = True,
    seed: int,
    journal: Journal,
    listener: Callable[[Path], Listener] = Listener,
) -> list[Score]:
    """Scores of every voice: the codec's only with its encoder, the talker's only if `speaks`."""
    out.mkdir(parents=True, exist_ok=True)
    ear, scores = listener(out), []
    for voice in VOICES:
        teacher = say_all(flite_folder, texts, voice)
        waves = [resample_16k_to_24k(torch.from_numpy(one.samples).float()) for one in teacher]
        originals = [one.round().clamp(-32768, 32767).to(torch.int16).numpy() for one in waves]
        rows = [("teacher", originals, len(texts))]
        if codec is not None:
            codec.eval()
            codes = [codec.encode(one[None] / 32768)[0].numpy() for one in waves]
            rows.append(("codec", to_samples(checkpoint, codes), len(texts)))
        if speaks:
            uttered = utter(checkpoint, [Wanted(text, voice, seed + i) for i, text in enumerate(texts)])
            rows.append(
                ("talker", to_samples(checkpoint, [one.codes for one in uttered]), _num_ended(uttered))
            )
        for kind, samples, num_ended in rows:
            scores.append(ear.score(kind, voice, texts, samples, teacher, num_ended))
            journal.write(stage="evaluate", **asdict(scores[-1]))
    (out / "scores.json").write_text(json.dumps([asdict(one) for one in scores], indent=1), encoding="utf-8")
    return scores


def _num_ended(uttered: Sequence[Uttered]) -> int:
    return sum(one.has_ended for one in uttered)


def write_wav(file: Path, samples: NDArray[np.int16]) -> None:
    with wave.open(str(file), "wb") as sink:
        sink.setnchannels(1)
        sink.setsampwidth(2)
        sink.setframerate(SAMPLE_RATE_HZ)
        sink.writeframes(samples.astype("<i2").tobytes())
