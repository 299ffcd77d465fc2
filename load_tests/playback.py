"""What a listener hears: waits in the middle, and silence before the first word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from load_tests.adapters import BYTES_PER_SAMPLE, SAMPLE_RATE_HZ

AUDIBLE_DBFS = -50.0
UNDERRUN_S = 0.1
"""A player may wait this long in all before a request counts as underrun."""

_BYTES_PER_S = BYTES_PER_SAMPLE * SAMPLE_RATE_HZ
_AUDIBLE_LEVEL = 32_768 * 10 ** (AUDIBLE_DBFS / 20)

Arrival = tuple[float, int]
"""Seconds since the request was sent, and bytes of PCM that had come by then."""


def seconds_of(num_bytes: int) -> float:
    return num_bytes / _BYTES_PER_S


def underrun_s(arrivals: Sequence[Arrival]) -> float:
    """How long a player that starts at the first arrival waits in all, seconds.

    The worst (arrival - first arrival) - (audio that had come before it), which is also the sum of the waits
    of a player that stops when it has nothing left. Source: vllm-omni 0.30.0, benchmarks/audio_continuity.py.
    """
    worst, heard = 0.0, 0
    for at, num_bytes in arrivals:
        worst = max(worst, at - arrivals[0][0] - seconds_of(heard))
        heard = num_bytes
    return worst


class AudibleStart:
    """Finds when a listener hears the first sample above -50 dBFS.

    That is when it has arrived, or when the player that starts at the first byte comes to it, whichever is later.
    """

    def __init__(self) -> None:
        self.at_s: float | None = None
        self._first_s: float | None = None
        self._num_bytes = 0
        self._odd = b""

    def feed(self, at_s: float, pcm: bytes) -> None:
        """at_s: seconds since the request was sent."""
        if self.at_s is not None or not pcm:
            return
        if self._first_s is None:
            self._first_s = at_s
        data = self._odd + pcm
        whole = len(data) // BYTES_PER_SAMPLE * BYTES_PER_SAMPLE
        self._odd = data[whole:]
        loud = np.abs(np.frombuffer(data[:whole], "<i2").astype(np.int32)) >= _AUDIBLE_LEVEL
        if loud.any():
            position = self._num_bytes + int(loud.argmax()) * BYTES_PER_SAMPLE
            self.at_s = max(at_s, self._first_s + seconds_of(position))
        self._num_bytes += whole
