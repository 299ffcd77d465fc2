"""The device-side state of every stream: one row per slot, one spare row for padding.

A decode step reads and writes only this. The host writes a row once, when a request is admitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen3tts_core.config import TalkerEngineConfig
from qwen3tts_core.engine.slot_row import FLOATS, INTS, row_widths
from qwen3tts_core.ops.interface import DrawRows, NoiseKey

# Columns of `SlotState.ints` and `.floats`.
INT = {name: column for column, name in enumerate(INTS)}
FLOAT = {name: column for column, name in enumerate(FLOATS)}


RowsOf = Callable[[Tensor, Tensor], Tensor]
"""Text ids [n], codec ids [n] -> the talker's rows [n, D]: `Talker.rows_of`."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """S = num_slots + 1 rows; the last is the padding row, never active.

    ints: [S, len(INTS)] int64; floats: [S, len(FLOATS)] float32. input_rows: [S, D], what the
    next decode step feeds. seen: [S, V] bool, group-0 codes drawn so far. trailing_ids: [S,
    max_positions] int32. page_table: [S, P] int64. replayed: [S, max_positions, G] int16, frames that a
    stream steps through before it draws its own; deterministic mode alone has any, else [S, 0, G].
    """

    ints: Tensor
    floats: Tensor
    input_rows: Tensor
    seen: Tensor
    trailing_ids: Tensor
    page_table: Tensor
    replayed: Tensor

    @classmethod
    def empty(
        cls,
        config: TalkerEngineConfig,
        *,
        width: int,
        vocab_size: int,
        num_groups: int,
        trash_page: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> SlotState:
        rows = config.num_slots + 1
        floats = torch.ones(rows, len(FLOATS), device=device)
        return cls(
            ints=torch.zeros(rows, len(INTS), dtype=torch.int64, device=device),
            floats=floats,
            input_rows=torch.zeros(rows, width, device=device, dtype=dtype),
            seen=torch.zeros(rows, vocab_size, dtype=torch.bool, device=device),
            trailing_ids=torch.zeros(rows, config.max_positions, dtype=torch.int32, device=device),
            page_table=torch.full(
                (rows, config.pages_for(config.max_positions)), trash_page, dtype=torch.int64, device=device
            ),
            replayed=torch.zeros(
                rows,
                config.max_positions if config.deterministic else 0,
                num_groups,
                dtype=torch.int16,
                device=device,
            ),
        )

    @property
    def padding_slot(self) -> int:
        return len(self.ints) - 1

    @property
    def steps_through_old_frames(self) -> bool:
        """Whether a resumed stream's frames are fed to the decode step, or prefilled."""
        return self.replayed.shape[1] > 0

    # ------------------------------------------------------------ what an admission writes
    def put(self, row: Tensor, rows_of: RowsOf) -> None:
        """Write the slot's row that `row` names, whole. Tensors alone, so that a graph can hold it.

        row: as `slot_row.RowPacker` makes it. rows_of: makes the slot's first input of its prompt's last ids.
        """
        widths = row_widths(self.page_table.shape[1], self.trailing_ids.shape[1])
        slot, ints, floats, pages, trailing, last_ids = torch.split_with_sizes(row, widths)
        self.ints[slot] = ints
        self.floats[slot] = floats.view(torch.float64).float()
        self.seen.index_fill_(0, slot, False)
        self.page_table[slot] = pages
        self.trailing_ids[slot] = trailing.int()
        self.input_rows[slot] = rows_of(last_ids[:1], last_ids[1:])

    def recall(self, slot: int, old_codes: Tensor) -> None:
        """Give a slot the frames to go on after, as if it had drawn them: for a row put just before. [F, G] int64."""
        if self.steps_through_old_frames:
            self.replayed[slot, : len(old_codes)] = old_codes.short()
        else:
            self.seen[slot].index_fill_(0, old_codes[:, 0], True)

    # ------------------------------------------------------------ what a step reads and writes
    def read(self, rows: Tensor) -> SlotRows:
        """The numbers of the slots named by `rows` [B], gathered once."""
        return SlotRows(self.ints[rows].T.contiguous(), self.floats[rows].T.contiguous())

    def write(self, rows: Tensor, slot_rows: SlotRows) -> None:
        """Put the whole numbers back."""
        self.ints[rows] = slot_rows.ints.T


@dataclass(frozen=True, slots=True)
class SlotRows:
    """A batch's rows of `SlotState`, column by column. ints: [columns, B]; floats: [columns, B]."""

    ints: Tensor
    floats: Tensor

    def column(self, name: str) -> Tensor:
        """[B] int64; a view, so writing to it is written back by `SlotState.write`."""
        return self.ints[INT[name]]

    @property
    def penalty(self) -> Tensor:
        return self.floats[FLOAT["penalty"]]

    @property
    def noise_key(self) -> NoiseKey:
        return NoiseKey(self.column("seed"), self.column("piece"), self.column("frame"))

    def draw_rows(self, prefix: str = "") -> DrawRows:
        """prefix: "" for group 0, "sub_" for the others."""
        return DrawRows(
            do_sample=self.column(f"{prefix}sample") > 0,
            temperature=self.floats[FLOAT[f"{prefix}temperature"]],
            top_k=self.column(f"{prefix}top_k"),
            tail_mass=self.floats[FLOAT[f"{prefix}tail_mass"]],
        )
