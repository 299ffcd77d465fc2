"""What the codec decoder remembers of a stream, and how its layers get at it.

Every layer with a memory owns one `Tail`: the last values of its *input*. Attention's keys and
values are a tail like any other. A layer asks its `Past` for "my tail, then these new values" and
never knows whether the past is empty (`NoPast`) or lies in rows of an arena (`RowsPast`), so a
whole decode and an incremental step are the same code.
Source: spec 4.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """One layer's memory: the last `length` inputs, `channels` values each. Told apart by identity."""

    channels: int
    length: int

    @property
    def size(self) -> int:
        return self.channels * self.length


class Past(Protocol):
    """What came before the frames of this call. position: [B] int64, frames decoded so far."""

    position: Tensor

    def extend(self, tail: Tail, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, length + T]: the tail, then x. Called once per tail and call."""
        ...


class NoPast:
    """The start of a stream: zeros before the first value, nothing kept."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.position = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def extend(self, tail: Tail, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (tail.length, 0))


class SavedRow(NamedTuple):
    """A copy of one stream's state: values [row_size], position [1]."""

    values: Tensor
    position: Tensor


class CodecState:
    """An arena: one row per stream, every tail of a stream side by side in its row.

    values: [num_rows, row_size] in the model's dtype. positions: [num_rows] int64. A row at position
    0 is fresh: its values count as zeros whatever they are, so freeing a row costs nothing.
    """

    def __init__(
        self, tails: Sequence[Tail], num_rows: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._spans: dict[Tail, slice] = {}
        row_size = 0
        for tail in tails:
            self._spans[tail] = slice(row_size, row_size + tail.size)
            row_size += tail.size
        self.values = torch.zeros(num_rows, row_size, device=device, dtype=dtype)
        self.positions = torch.zeros(num_rows, dtype=torch.int64, device=device)

    @property
    def num_rows(self) -> int:
        return len(self.values)

    @property
    def row_bytes(self) -> int:
        return self.values.shape[1] * self.values.element_size()

    def reset(self, row: int) -> None:
        """Make a row fresh."""
        self.positions[row] = 0

    def save(self, row: int) -> SavedRow:
        return SavedRow(self.values[row].clone(), self.positions[row : row + 1].clone())

    def restore(self, row: int, saved: SavedRow) -> None:
        self.values[row].copy_(saved.values)
        self.positions[row : row + 1].copy_(saved.position)

    def view(self, values: Tensor, tail: Tail) -> Tensor:
        """One tail within gathered rows: [B, row_size] -> [B, channels, length], the same memory."""
        return values[:, self._spans[tail]].view(-1, tail.channels, tail.length)


class RowsPast:
    """Rows of an arena as the past of one step: gathered once, put back by `commit`.

    rows: [B] int64, all different but for padding rows. num_valid: [B] int64, how many of the step's
    `num_frames` frames are real in each row; later ones never reach the state. Shapes alone decide
    what runs, so a CUDA graph can hold it.
    """

    def __init__(self, state: CodecState, rows: Tensor, num_valid: Tensor, num_frames: int) -> None:
        self._state, self._rows, self._num_valid, self._num_frames = state, rows, num_valid, num_frames
        self.position = state.positions.index_select(0, rows)
        # Replaced, not multiplied by 0: a row may be left over from a stream that went to NaN.
        fresh = (self.position == 0)[:, None]
        self._old = state.values.index_select(0, rows).masked_fill(fresh, 0)
        self._new = torch.empty_like(self._old)

    def extend(self, tail: Tail, x: Tensor) -> Tensor:
        if not tail.length:
            return x
        joined = torch.cat([self._state.view(self._old, tail), x], dim=-1)
        num_valid = self._num_valid * (x.shape[-1] // self._num_frames)  # at this layer's rate
        keep = num_valid[:, None] + torch.arange(tail.length, device=x.device)
        index = keep[:, None, :].expand(-1, tail.channels, -1)
        self._state.view(self._new, tail).copy_(joined.gather(-1, index))
        return joined

    def commit(self) -> None:
        """Write the rows back, each advanced by its valid frames."""
        self._state.values.index_copy_(0, self._rows, self._new)
        self._state.positions.index_copy_(0, self._rows, self.position + self._num_valid)
