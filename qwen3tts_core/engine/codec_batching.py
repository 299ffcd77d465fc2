"""Which waiting pieces of different lengths should share a codec batch. Arithmetic over counts, no streams and no clock.

A batch is as wide as its longest piece, padded to a bucket, and has a bucket's number of rows. One batch for all pads
the short ones, one for each length pays for many launches: between them lies the cheapest division.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

LAUNCH_FRAMES = 30
"""What a batch costs besides its frames, in frames: 37 of float16 or 23 of float32 on an H200 (load_tests/LOG.md)."""

FULL_FRAMES = 200
"""From here on a launch is at most a seventh of a batch, and waiting for more pieces gains little."""


class BatchShapes:
    """What a batch of some rows and some width costs.

    max_rows: for each frame bucket, rising, the rows that a batch padded to it may have. batch_buckets: rising.
    """

    def __init__(self, max_rows: Mapping[int, int], batch_buckets: Sequence[int]) -> None:
        self.max_rows = dict(max_rows)
        self.widths = tuple(max_rows)
        self._batch_buckets = tuple(batch_buckets)
        self._fewest_rows = min(self.max_rows.values())

    def width(self, num_frames: int) -> int:
        """The bucket of a piece that long; of a longer one's first part."""
        return self.widths[min(bisect_left(self.widths, num_frames), len(self.widths) - 1)]

    def padded(self, num_rows: int, width: int) -> int:
        """Frames that a batch of so many rows decodes, padding included."""
        return width * next((rows for rows in self._batch_buckets if rows >= num_rows), num_rows)

    def cost(self, num_rows: int, width: int) -> int:
        """Of decoding so many rows, in as many batches as they need."""
        full, rest = divmod(num_rows, self.max_rows[width])
        cost = full * (LAUNCH_FRAMES + self.padded(self.max_rows[width], width))
        return cost + (LAUNCH_FRAMES + self.padded(rest, width) if rest else 0)

    def divide(self, counts: Mapping[int, int]) -> list[int]:
        """The widths of the batches that cost least together, rising; a piece is in the first that holds it.

        counts: how many pieces there are of each width.
        """
        widths = sorted(counts)
        cheapest: list[tuple[int, list[int]]] = [(0, [])]  # for the first so many widths
        for end, width in enumerate(widths, start=1):
            ways = []
            for start, (cost_before, widths_before) in enumerate(cheapest):
                num_rows = sum(counts[between] for between in widths[start:end])
                ways.append((cost_before + self.cost(num_rows, width), [*widths_before, width]))
            cheapest.append(min(ways))
        return cheapest[-1][1]

    def is_full(self, num_rows: int, width: int) -> bool:
        """Whether more rows can't join, or would gain little."""
        return num_rows >= self.max_rows[width] or num_rows * width >= FULL_FRAMES

    def may_be_full(self, num_rows: int, width: int) -> bool:
        """Whether any batch of some of so many could be full; `width` is the widest's."""
        return num_rows >= self._fewest_rows or num_rows * width >= FULL_FRAMES

    def without_padding(self, num_rows: int, width: int) -> int:
        """Rows to take of so many: those beyond a bucket stay for the next batch, unless to pad costs less than a launch."""
        if self.padded(num_rows, width) - num_rows * width <= LAUNCH_FRAMES:
            return num_rows
        return max((rows for rows in self._batch_buckets if rows <= num_rows), default=num_rows)

    def may_join(self, num_rows: int, width: int) -> bool:
        """Whether one more piece costs a batch of so many less than the launch it saves."""
        growth = self.padded(num_rows + 1, width) - self.padded(num_rows, width)
        return num_rows < self.max_rows[width] and growth <= LAUNCH_FRAMES
