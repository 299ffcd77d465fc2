"""Whether a quantity has stopped growing: the question a soak asks of every process."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Growth(NamedTuple):
    """Medians of the second and the last third of a series; the first is warm-up."""

    before: float
    after: float

    @property
    def amount(self) -> float:
        return self.after - self.before

    def is_flat(self, share: float, slack: float) -> bool:
        """share: of what it was, that it may have grown; slack: or so much, whichever is more."""
        return self.amount <= max(share * self.before, slack)


def growth(series: Sequence[float]) -> Growth:
    """Raises ValueError for a series too short to tell: each third needs three samples."""
    third = len(series) // 3
    if third < 3:
        raise ValueError(f"{len(series)} samples are too few, 9 are needed")
    return Growth(statistics.median(series[third : 2 * third]), statistics.median(series[-third:]))
