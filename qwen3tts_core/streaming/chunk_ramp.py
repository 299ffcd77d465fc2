"""How many frames leave together: few at first for a low TTFA, then a steady size.

Each chunk is at most as long as what was sent before it covers while it is being made, so a
player that starts with the first chunk doesn't run dry. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkRamp:
    """Frames per chunk: `ramp` first, then `steady`."""

    ramp: tuple[int, ...] = (1, 3, 8, 16)
    steady: int = 25

    def __post_init__(self) -> None:
        if self.steady < 1 or any(n < 1 for n in self.ramp):
            raise ValueError(f"every chunk needs at least 1 frame, got {self.ramp} then {self.steady}")

    def chunk_frames(self, index: int) -> int:
        """Frames of chunk `index`, counted from 0."""
        return self.ramp[index] if index < len(self.ramp) else self.steady

    def sizes(self, first: int = 0) -> Iterator[int]:
        """From chunk `first` on, without end."""
        yield from self.ramp[first:]
        while True:
            yield self.steady

    @property
    def max_frames(self) -> int:
        return max((*self.ramp, self.steady))
