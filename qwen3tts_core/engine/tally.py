"""How often a value fell into each of a few buckets: a histogram that a loop can afford every step.

Adding is one search among a dozen bounds and one increment, whatever the step held; whoever wants to
know reads the counts from another thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

STEP_SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.012, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)  # fmt: skip
"""Upper bounds for one step of an engine: a GPU's take 1 to 10 ms, a laptop's CPU up to seconds."""
BATCH_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Upper bounds for the streams in one batch."""


class Tally:
    """bounds: rising; a value counts for the first bound that isn't below it, or for the bucket beyond all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1

    def counts(self) -> tuple[int, ...]:
        """[len(bounds) + 1] values so far, bucket by bucket."""
        return tuple(self._counts)
