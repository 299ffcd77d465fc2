"""Turns the results of decode steps into ramp-sized batches of frames.

A step costs the host nothing per row: its results are kept as one array, and each row has a step at which
its chunk is full. Until the first of those steps a row is only looked at when it ends or joins.
Knows nothing of threads or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qwen3tts_core.engine.frame_step import FRAME, STOP
from qwen3tts_core.engine.scheduler import Placed
from qwen3tts_core.types import FinishReason, FrameBatch

_NEVER = np.iinfo(np.int64).max // 2
_NOBODY = np.empty(0, np.int64)
_STEPS_AT_FIRST = 64  # room for, before a look at which of them somebody still needs


@dataclass(slots=True)
class FrameStream:
    """One request's frames that haven't left yet, and how many leave together next.

    num_replayed: how many of the next frames have been sent by another engine, and are dropped here.
    """

    sizes: Iterator[int]
    chunk_frames: int
    placed: Placed | None = None
    first_frame: int = 0
    num_replayed: int = 0
    num_waiting: int = 0
    waiting: list[NDArray[np.int16]] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        return self.num_replayed + self.chunk_frames - self.num_waiting

    def add(self, frames: NDArray[np.int16]) -> None:
        """frames: [F, G]."""
        if self.num_replayed:
            num_old = min(self.num_replayed, len(frames))
            frames, self.num_replayed = frames[num_old:], self.num_replayed - num_old
        if len(frames):
            self.waiting.append(frames)
            self.num_waiting += len(frames)

    def take(self, finish: FinishReason | None) -> FrameBatch | None:
        """The next item, if its frames are there or the stream has ended."""
        if finish is None and self.num_missing > 0:
            return None
        codes = np.concatenate(self.waiting) if self.waiting else np.empty((0, 0), np.int16)
        num_groups = codes.shape[1] if len(codes) else 0
        batch = FrameBatch(
            self.first_frame, len(codes), num_groups, codes.astype("<i2", copy=False).tobytes(), finish
        )
        self.first_frame += len(codes)
        self.waiting.clear()
        self.num_waiting = 0
        self.chunk_frames = next(self.sizes)
        return batch


class Cohort:
    """What consecutive steps made, by slot. Row i of a step's result belongs to `members[i]`."""

    def __init__(self, num_slots: int) -> None:
        self.members: tuple[Placed, ...] = ()
        self._slots = np.empty(0, np.int64)  # of the members
        self._owners: list[Placed | None] = [None] * num_slots
        self._frames = np.empty((0, num_slots, 0), np.int16)  # [steps, slots, G]; num_steps of them count
        self._num_steps = 0
        self._taken = np.full(num_slots, _NEVER)
        self._due = np.full(num_slots, _NEVER)  # the step with which a slot's chunk is full
        self._first_due: int | None = None  # of the members; None when that may have changed

    def change(self, members: tuple[Placed, ...], num_missing: Callable[[Placed], int]) -> None:
        """Of the steps from now on: who stays keeps its frames and its count, who left is forgotten.

        num_missing: frames until the chunk is full, asked for those that are new.
        """
        self.members = members
        self._slots = np.array([placed.slot for placed in members], np.int64)
        has_left = np.ones(len(self._owners), bool)
        has_left[self._slots] = False
        self._taken[has_left] = self._due[has_left] = _NEVER
        for placed in members:
            if self._owners[placed.slot] is not placed:
                self._owners[placed.slot] = placed
                self._taken[placed.slot] = self._num_steps
                self._due[placed.slot] = self._num_steps + num_missing(placed)
        self._first_due = None

    def add(self, results: NDArray[np.int64]) -> NDArray[np.int64]:
        """Keep a step's results, [rows, G + 1] (copied), and say which rows need a look now."""
        if self._num_steps == len(self._frames):
            self._make_room(results.shape[1] - 1)
        self._frames[self._num_steps, self._slots] = results[:, :-1]
        self._num_steps += 1
        if self._first_due is None:
            self._first_due = int(self._due[self._slots].min(initial=_NEVER))
        has_no_more = results[:, -1] != FRAME
        if self._num_steps < self._first_due and not has_no_more.any():
            return _NOBODY
        touched: NDArray[np.int64] = np.flatnonzero(has_no_more | (self._due[self._slots] <= self._num_steps))
        return touched

    def take(self, row: int, outcome: int) -> NDArray[np.int16]:
        """A row's frames since its last `take`, [F, G]; a STOP step made none."""
        slot = self._slots[row]
        end = self._num_steps - (outcome == STOP)
        start = min(int(self._taken[slot]), end)
        self._taken[slot] = self._num_steps
        return self._frames[start:end, slot].copy()

    def expect(self, row: int, num_missing: int) -> None:
        """The row's chunk is full that many frames from now."""
        self._due[self._slots[row]] = self._num_steps + num_missing
        self._first_due = None

    def forget(self, row: int) -> None:
        """Nobody waits for the row any more."""
        self._due[self._slots[row]] = self._taken[self._slots[row]] = _NEVER
        self._first_due = None

    def _make_room(self, num_groups: int) -> None:
        """Drop the steps that every slot has taken; more room where that isn't enough."""
        done = min(int(self._taken.min(initial=_NEVER)), self._num_steps)
        kept = self._frames[done : self._num_steps]
        room = max(_STEPS_AT_FIRST, 2 * len(kept))
        self._frames = np.empty((room, len(self._owners), num_groups), np.int16)
        if len(kept):
            self._frames[: len(kept)] = kept
        self._num_steps = len(kept)
        self._taken -= done
        self._due -= done
        self._first_due = None
