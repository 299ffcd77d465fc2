"""A request's row of the slot state as the host makes it: one array of integers, so that it travels in one copy.

A thread that shares its interpreter may have to wait for it after every call to the device: so all that the host knows
is one copy. Below 64 KiB, some 8,000 positions, CUDA takes it without waiting for what the device has still to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qwen3tts_core.types import NO_ID, DrawParams, SpeechRequest

INTS = (
    "position",
    "frame",
    "frame_limit",
    "active",
    "seed",
    "piece",
    "num_trailing",
    "num_replayed",
    "sample",
    "top_k",
    "sub_sample",
    "sub_top_k",
)
FLOATS = ("penalty", "temperature", "tail_mass", "sub_temperature", "sub_tail_mass")


def row_widths(num_pages: int, num_positions: int) -> tuple[int, ...]:
    """The parts of a row, in order: the slot's number, INTS, FLOATS (the bits of float64), the numbers of its pages,
    its trailing ids, text and codec id of its prompt's last row."""
    return (1, len(INTS), len(FLOATS), num_pages, num_positions, 2)


class RowPacker:
    """Makes rows. num_pages, num_positions: what a slot has room for."""

    def __init__(self, num_pages: int, num_positions: int, trash_page: int) -> None:
        self._ends = np.cumsum(row_widths(num_pages, num_positions))
        self._trash_page = trash_page

    def nobody(self, slot: int) -> NDArray[np.int64]:
        """Of a slot that is never active; all its pages are the trash page."""
        row = np.zeros(self._ends[-1], np.int64)
        row[0] = slot
        row[self._ends[1] : self._ends[2]].view(np.float64)[:] = 1.0  # a draw divides by its temperature
        row[self._ends[2] : self._ends[3]] = self._trash_page
        row[self._ends[4] :] = NO_ID
        return row

    def request(
        self,
        slot: int,
        request: SpeechRequest,
        pages: Sequence[int],
        *,
        num_prefilled: int = 0,
        num_replayed: int = 0,
    ) -> NDArray[np.int64]:
        """num_prefilled, num_replayed: frames that another engine made, already behind it or to be stepped through."""
        plan, sampling = request.plan, request.sampling
        ints = {
            "position": plan.num_rows - 1 + num_prefilled,
            "frame": num_prefilled,
            "frame_limit": request.max_frames,
            "active": 1,
            "seed": _signed64(request.seed),
            "piece": request.piece,
            "num_trailing": len(plan.trailing_ids),
            "num_replayed": num_replayed,
            "sample": sampling.talker.do_sample,
            "top_k": sampling.talker.top_k,
            "sub_sample": sampling.subtalker.do_sample,
            "sub_top_k": sampling.subtalker.top_k,
        }
        floats = {
            "penalty": sampling.repetition_penalty,
            "temperature": _temperature(sampling.talker),
            "tail_mass": 1.0 - sampling.talker.top_p,
            "sub_temperature": _temperature(sampling.subtalker),
            "sub_tail_mass": 1.0 - sampling.subtalker.top_p,
        }
        row = self.nobody(slot)
        _, its_ints, its_floats, its_pages, its_trailing, its_last_ids = np.split(row, self._ends[:-1])
        its_ints[:] = [int(ints[name]) for name in INTS]
        its_floats.view(np.float64)[:] = [floats[name] for name in FLOATS]
        its_pages[: len(pages)] = pages
        its_trailing[: len(plan.trailing_ids)] = plan.trailing_ids
        its_last_ids[:] = plan.text_ids[-1], plan.codec_ids[-1]
        return row


def _temperature(draw: DrawParams) -> float:
    """A greedy row is the arg max of its untouched scores."""
    return draw.temperature if draw.do_sample else 1.0


def _signed64(seed: int) -> int:
    """The lower 64 bits of any int, as int64 holds them."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - (1 << 64) if low >> 63 else low
