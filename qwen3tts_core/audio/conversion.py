"""Speed with the pitch kept, and other sample rates, as the audio comes.

FFmpeg's `atempo` (WSOLA: overlapping pieces, shifted to where they fit) stretches, soxr resamples.
Both give the same samples however the input is cut; between them and around them they are float32.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Protocol

import av
import av.filter
import numpy as np
import soxr
from numpy.typing import NDArray

from qwen3tts_core.streaming.pcm import FULL_SCALE, pcm16_from_float

Samples = NDArray[np.float32]

_NOTHING: Samples = np.zeros(0, np.float32)


class _Stage(Protocol):
    def feed(self, samples: Samples) -> Samples: ...

    def finish(self) -> Samples: ...


class Conversion:
    """PCM16 at source_rate_hz to PCM16 at rate_hz, `speed` times as fast; mono.

    n samples become round(n / speed), then as many at the other rate, one at most more or less.
    """

    def __init__(self, source_rate_hz: int, rate_hz: int, speed: float) -> None:
        self._stages: list[_Stage] = []
        if speed != 1:
            self._stages.append(_Tempo(source_rate_hz, speed))
        if rate_hz != source_rate_hz:
            self._stages.append(_Resampler(source_rate_hz, rate_hz))

    def feed(self, pcm: bytes) -> bytes:
        samples: Samples = np.frombuffer(pcm, "<i2").astype(np.float32) / np.float32(FULL_SCALE)
        for stage in self._stages:
            samples = stage.feed(samples)
        return pcm16_from_float(samples)

    def finish(self) -> bytes:
        """Each stage's rest goes through the ones after it before those are flushed."""
        rest = _NOTHING
        for stage in self._stages:
            rest = np.concatenate([stage.feed(rest), stage.finish()])
        return pcm16_from_float(rest)


class _Resampler:
    """soxr HQ, streaming: it holds back some 20 ms."""

    def __init__(self, source_rate_hz: int, rate_hz: int) -> None:
        self._stream: Any = soxr.ResampleStream(source_rate_hz, rate_hz, 1, dtype="float32", quality="HQ")

    def feed(self, samples: Samples) -> Samples:
        return self._resample(samples) if len(samples) else _NOTHING

    def finish(self) -> Samples:
        return self._resample(_NOTHING, last=True)

    def _resample(self, samples: Samples, last: bool = False) -> Samples:
        resampled: Samples = self._stream.resample_chunk(samples, last=last)
        return resampled


class _Tempo:
    """A chain of `atempo` filters, each within 0.5 to 2: beyond 2 one alone would skip samples.

    It holds back 40 to 160 ms of input. Left alone, its end comes up to 60 ms early or late, so the
    input is followed by silence and the output cut at its exact length. Its first samples depend on
    the sizes of the frames it is given, so they are all of one size: half one of the codec's.
    """

    def __init__(self, rate_hz: int, speed: float) -> None:
        self._rate_hz, self._speed = rate_hz, speed
        self._num_in = self._num_pushed = self._num_out = 0
        self._block = rate_hz // 25
        self._waiting = _NOTHING
        num_filters = max(1, math.ceil(abs(math.log2(speed))))
        self._graph = graph = av.filter.Graph()
        source = graph.add_abuffer(
            sample_rate=rate_hz, format="flt", layout="mono", time_base=Fraction(1, rate_hz)
        )
        each = repr(speed ** (1 / num_filters))
        chain = [graph.add("atempo", each) for _ in range(num_filters)]
        graph.link_nodes(source, *chain, graph.add("abuffersink")).configure()

    def feed(self, samples: Samples) -> Samples:
        self._num_in += len(samples)
        self._waiting = np.concatenate([self._waiting, samples])
        whole = len(self._waiting) // self._block * self._block
        for start in range(0, whole, self._block):
            self._push(self._waiting[start : start + self._block])
        self._waiting = self._waiting[whole:]
        return self._pull() if whole else _NOTHING

    def finish(self) -> Samples:
        target = round(self._num_in / self._speed)
        done = self._num_out
        stretched = [self.feed(np.zeros(self._rate_hz // 2, np.float32))]
        self._graph.push(None)
        stretched.append(self._pull())
        return np.concatenate(stretched)[: max(0, target - done)]

    def _push(self, samples: Samples) -> None:
        frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.sample_rate, frame.time_base = self._rate_hz, Fraction(1, self._rate_hz)
        frame.pts = self._num_pushed
        self._num_pushed += len(samples)
        self._graph.push(frame)

    def _pull(self) -> Samples:
        parts: list[Samples] = []
        while True:
            try:
                frame = self._graph.pull()
            except (av.BlockingIOError, av.EOFError):  # more input is needed, or there will be none
                break
            assert isinstance(frame, av.AudioFrame)
            parts.append(frame.to_ndarray()[0])
        samples = np.concatenate(parts) if parts else _NOTHING
        self._num_out += len(samples)
        return samples
