"""What a replica tells the autoscaler: its streams, its slots, and how much time its audio has in hand.

A stream's slack is how long before its playback deadline its latest chunk left here. A player starts with
the first chunk and then needs 80 ms of audio every 80 ms: the deadline of a chunk is when it is its turn.
Chunks that came in too late already are not held against whoever only passes them on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_PER_FRAME = 0.08
"""Of the 12 Hz checkpoints: 1,920 samples at 24 kHz."""
MOST_SLACK_S = 10.0
"""Reported where nobody listens; more says no more, and would drown a late stream in a mean."""


class Playback:
    """One stream, from its first chunk on."""

    def __init__(self, clock: Callable[[], float], seconds_per_frame: float) -> None:
        self._clock, self._seconds_per_frame = clock, seconds_per_frame
        self._plays_from: float | None = None  # when frame 0 is heard
        self._next_frame = 0
        self._arrivals: deque[float] | None = None
        self._latest: float | None = None

    def arrived(self) -> None:
        """A chunk came in from whoever makes it; it leaves with a `sent` of its own."""
        if self._arrivals is None:
            self._arrivals = deque()
        self._arrivals.append(self._clock())

    def sent(self, first_frame: int, num_frames: int) -> None:
        """A chunk leaves."""
        now = self._clock()
        came_at = self._arrivals.popleft() if self._arrivals else None
        if self._plays_from is None:
            self._plays_from = now - first_frame * self._seconds_per_frame
        else:
            due = self._due(first_frame)
            if came_at is None or came_at < due:
                self._latest = due - now
        self._next_frame = first_frame + num_frames

    def slack_s(self) -> float | None:
        """None before there was anything to be late with."""
        if self._plays_from is None:
            return None
        due = self._due(self._next_frame)
        if self._arrivals is not None and not (self._arrivals and self._arrivals[0] < due):
            return self._latest  # nothing is here that could be sent
        in_hand = due - self._clock()
        return in_hand if self._latest is None else min(self._latest, in_hand)

    def _due(self, frame: int) -> float:
        assert self._plays_from is not None, "nothing is due before the first chunk"
        return self._plays_from + frame * self._seconds_per_frame


class StreamLoad:
    """Of one replica. num_slots: streams that run at once; what is open beyond that waits."""

    def __init__(
        self,
        num_slots: int,
        seconds_per_frame: float = SECONDS_PER_FRAME,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_slots, self._seconds_per_frame, self._clock = num_slots, seconds_per_frame, clock
        self._open: set[Playback] = set()

    @contextmanager
    def stream(self) -> Iterator[Playback]:
        """One request, for as long as this replica has it."""
        playback = Playback(self._clock, self._seconds_per_frame)
        self._open.add(playback)
        try:
            yield playback
        finally:
            self._open.remove(playback)

    def stats(self) -> dict[str, float]:
        """The fields of `autoscaling.ReplicaLoad`."""
        num_streams = min(len(self._open), self._num_slots)
        return {
            "streams": float(num_streams),
            "queued": float(len(self._open) - num_streams),
            "slots": float(self._num_slots),
            "slack_s": self._slack_s(),
        }

    def _slack_s(self) -> float:
        """The lower quartile: one stream's hiccup is no reason to grow, and a quarter of them late is."""
        known = sorted(slack for playback in self._open if (slack := playback.slack_s()) is not None)
        slack = known[(len(known) - 1) // 4] if known else MOST_SLACK_S
        return max(-MOST_SLACK_S, min(slack, MOST_SLACK_S))
