"""How far a long text is, on a terminal: a bar whose end is guessed from the text; then one line of figures."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24
_PERIOD_S = 0.1
_SECONDS_PER_CHAR = 0.065  # of English at an easy pace
_SECONDS_PER_WIDE_CHAR = 0.22


def guess_audio_s(text: str, speed: float = 1.0) -> float:
    """About how long the text takes to say."""
    num_wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return (num_wide * _SECONDS_PER_WIDE_CHAR + (len(text) - num_wide) * _SECONDS_PER_CHAR) / speed


class Progress:
    """bytes_per_s: of the audio that comes; None where that can't be known before its end. expected_audio_s: None
    where nobody knows. to: a bar is drawn only on a terminal."""

    def __init__(
        self,
        expected_audio_s: float | None,
        to: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._expected_s, self._to, self._clock = expected_audio_s, to or sys.stderr, clock
        self._began_at, self._drawn_at = clock(), 0.0
        self._num_bytes = 0
        self.bytes_per_s: int | None = None
        self.ttfa_s: float | None = None

    @property
    def audio_s(self) -> float | None:
        """That has come so far."""
        return None if self.bytes_per_s is None else self._num_bytes / self.bytes_per_s

    def got(self, num_bytes: int) -> None:
        now = self._clock()
        if self.ttfa_s is None:
            self.ttfa_s = now - self._began_at
        self._num_bytes += num_bytes
        if self._to.isatty() and now - self._drawn_at >= _PERIOD_S:
            self._drawn_at = now
            self._to.write(f"\r{self._line(now)}\x1b[K")
            self._to.flush()

    def clear(self) -> None:
        """Take the bar away."""
        if self._to.isatty() and self._drawn_at:
            self._to.write("\r\x1b[K")
            self._to.flush()

    def summary(self, audio_s: float) -> str:
        """At the end: what it was, and how long it took."""
        took_s = self._clock() - self._began_at
        rtf = took_s / audio_s if audio_s else 0.0
        return (
            f"{audio_s:.2f} s of audio in {took_s:.2f} s, first after {self.ttfa_s or 0:.3f} s, RTF {rtf:.3f}"
        )

    def _line(self, now: float) -> str:
        audio_s, took_s = self.audio_s, now - self._began_at
        if audio_s is None:
            return f"{self._num_bytes / 1000:.0f} kB in {took_s:.1f} s"
        told = f"{audio_s:.1f} s of audio"
        if self._expected_s:
            filled = min(_WIDTH - 1, int(_WIDTH * audio_s / self._expected_s))
            told = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {told} of about {max(audio_s, self._expected_s):.0f}"
        return f"{told}, first after {self.ttfa_s:.3f} s, RTF {took_s / max(audio_s, 1e-9):.3f}"
