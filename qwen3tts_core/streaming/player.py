"""What a listener's player goes through: it starts with the first audio, and waits when it has none left."""

from __future__ import annotations

UNDERRUN_S = 0.1
"""A player may wait this long in all before a stream counts as underrun."""


class Player:
    """Told of every write of a stream. gaps_s: seconds between two writes. waited_s: of silence, in all.

    The wait in all is the worst (time since the first write) - (audio that was there before the write).
    Source: vllm-omni 0.30.0, benchmarks/audio_continuity.py.
    """

    def __init__(self) -> None:
        self.gaps_s: list[float] = []
        self.waited_s = 0.0
        self._first_at: float | None = None
        self._last_at = 0.0
        self._audio_s = 0.0

    def got(self, at_s: float, audio_s: float) -> None:
        """audio_s: all audio written by now, this write's included."""
        if self._first_at is None:
            self._first_at = at_s
        else:
            self.gaps_s.append(at_s - self._last_at)
            self.waited_s = max(self.waited_s, at_s - self._first_at - self._audio_s)
        self._last_at, self._audio_s = at_s, audio_s

    @property
    def has_underrun(self) -> bool:
        return self.waited_s > UNDERRUN_S
