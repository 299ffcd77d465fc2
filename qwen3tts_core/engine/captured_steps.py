"""The Talker's steps over static buffers, each captured once: admission, prefill, decode.

The host fills a step's inputs with one copy and launches it; only prompts that are more than ids cost further calls.
Each call is a moment at which the engine's thread may lose the interpreter, and a copy that waits would leave the
device without a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3tts_core.config import TalkerEngineConfig
from qwen3tts_core.engine.frame_step import decode_frame
from qwen3tts_core.engine.scheduler import Placed, PrefillPiece
from qwen3tts_core.engine.slot_row import RowPacker
from qwen3tts_core.engine.slots import SlotState
from qwen3tts_core.model.talker import Talker
from qwen3tts_core.ops.attention_plan import PlannedSequence
from qwen3tts_core.ops.interface import Capture, Launch, LayerKV, PrefillLayout, PrefillSequence
from qwen3tts_core.types import NO_ID

_GIVEN = NO_ID - 1
"""In place of a text id: this row is no sum of two ids, it was made before."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """What every step works on, and what turns it into a launch."""

    talker: Talker
    state: SlotState
    cache: Sequence[LayerKV]
    config: TalkerEngineConfig
    capture: Capture


class AdmissionStep:
    """Writes one request's row of the slot state, with its prompt's last row as the input of its first decode step."""

    def __init__(self, parts: StepParts, packer: RowPacker) -> None:
        talker, state = parts.talker, parts.state
        self._nobody = packer.nobody(state.padding_slot)
        self._row = torch.from_numpy(self._nobody).to(talker.device, copy=True)

        def step() -> None:
            state.put(self._row, talker.rows_of)

        self.launch: Launch = parts.capture(step, "admission of a request")

    def run(self, row: NDArray[np.int64]) -> None:
        """row: as RowPacker makes it."""
        self._row.copy_(torch.from_numpy(row), non_blocking=True)
        self.launch()

    def warm_up(self) -> None:
        """Once more for the padding slot, which stays as it was."""
        self.run(self._nobody)


class PrefillStep:
    """One number of packed prompt rows, and the pass that caches them."""

    _COLUMNS = 5  # position, write index, sequence, text id, codec id of each row; the slot of each sequence comes after

    def __init__(self, parts: StepParts, size: int) -> None:
        talker, state, cache, config = parts.talker, parts.state, parts.cache, parts.config
        self.size = size
        self._planner = talker.ops.planner
        self._page_size = config.page_size
        columns = np.full((self._COLUMNS, size), NO_ID, np.int64)
        columns[:3] = [[0], [config.num_pages * config.page_size], [-1]]
        slots = np.full(config.num_slots, state.padding_slot, np.int64)
        self._padding = np.concatenate([columns.ravel(), slots])
        self._inputs = torch.from_numpy(self._padding).to(talker.device, copy=True)
        self._given = torch.zeros(size, talker.width, dtype=talker.dtype, device=talker.device)
        self._sequences: tuple[PrefillSequence, ...] = ()

        def step() -> None:
            num_columns = self._COLUMNS * size
            columns, slots = self._inputs[:num_columns].view(-1, size), self._inputs[num_columns:]
            positions, write_index, row_sequence, text_ids, codec_ids = columns
            is_given = (text_ids == _GIVEN)[:, None]
            rows = torch.where(is_given, self._given, talker.rows_of(text_ids, codec_ids))
            layout = PrefillLayout(
                positions, write_index, state.page_table[slots], row_sequence, self._sequences
            )
            talker(rows, layout, cache)

        self.launch: Launch = parts.capture(step, f"prefill of {size} rows")
        self.is_graph = self.launch is not step

    def run(self, pieces: Sequence[PrefillPiece], given: Mapping[int, Tensor]) -> None:
        """given: by slot, the prompts that are more than a sum of two ids a row, each [rows, D]."""
        inputs = self._padding.copy()
        columns, slots = np.split(inputs, [self._COLUMNS * self.size])
        columns = columns.reshape(-1, self.size)
        sequences: list[PrefillSequence] = []
        first_row = 0
        for number, piece in enumerate(pieces):
            placed, end = piece.placed, piece.first + piece.num_rows
            here = slice(first_row, first_row + piece.num_rows)
            span = np.arange(piece.first, end)
            pages = np.array(placed.pages)[span // self._page_size]
            columns[0, here] = span
            columns[1, here] = pages * self._page_size + span % self._page_size
            columns[2, here] = number
            if placed.slot in given:
                columns[3, here] = _GIVEN
                self._given[here].copy_(given[placed.slot][piece.first : end])
            else:
                columns[3, here] = placed.request.plan.text_ids[piece.first : end]
                columns[4, here] = placed.request.plan.codec_ids[piece.first : end]
            slots[number] = placed.slot
            sequences.append(PrefillSequence(first_row, piece.num_rows, piece.first))
            first_row += piece.num_rows
        self._sequences = tuple(sequences)
        if self._planner is not None and self._planner.plans_prefill:
            planned = [PlannedSequence(p.num_rows, p.first + p.num_rows, p.placed.pages) for p in pieces]
            self._planner.plan_prefill(self.size, planned)
        self._inputs.copy_(torch.from_numpy(inputs), non_blocking=True)
        self.launch()


class DecodeStep:
    """One batch size: its static row and result buffers, and the step over them."""

    def __init__(self, parts: StepParts, size: int) -> None:
        talker, state, cache, config = parts.talker, parts.state, parts.cache, parts.config
        self.size = size
        self._padding_slot = state.padding_slot
        groups = talker.config.talker.num_code_groups
        self.rows = torch.full((size,), state.padding_slot, dtype=torch.int64, device=talker.device)
        self.out = torch.zeros(size, groups + 1, dtype=torch.int64, device=talker.device)
        self._members: tuple[Placed, ...] = ()

        def step() -> None:
            decode_frame(
                talker,
                state,
                cache,
                self.rows,
                self.out,
                min_frames=config.min_frames,
                trash_page=config.num_pages,
            )

        self.launch: Launch = parts.capture(step, f"decode step of {size} rows")
        self.is_graph = self.launch is not step

    def set_members(self, members: tuple[Placed, ...]) -> None:
        """Touches the device only when the membership changed."""
        if members is not self._members:
            slots = np.full(self.size, self._padding_slot, np.int64)
            slots[: len(members)] = [placed.slot for placed in members]
            self.rows.copy_(torch.from_numpy(slots), non_blocking=True)
            self._members = members
