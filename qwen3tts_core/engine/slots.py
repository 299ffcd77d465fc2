"""The device-side state of every stream: one row per slot, one spare row for padding.

A decode step reads and writes only this. The host writes a row once, when a request is admitted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen3tts_core.config import TalkerEngineConfig
from qwen3tts_core.ops.interface import DrawRows, NoiseKey
from qwen3tts_core.types import DrawParams, SpeechRequest

# Columns of `SlotState.ints` and `.floats`: packed, so that admission is one copy each.
_INTS = (
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
_FLOATS = ("penalty", "temperature", "tail_mass", "sub_temperature", "sub_tail_mass")
INT = {name: column for column, name in enumerate(_INTS)}
FLOAT = {name: column for column, name in enumerate(_FLOATS)}


@dataclass(frozen=True, slots=True)
class SlotState:
    """S = num_slots + 1 rows; the last is the padding row, never active.

    ints: [S, len(_INTS)] int64; floats: [S, len(_FLOATS)] float32. input_rows: [S, D], what the
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
        floats = torch.ones(rows, len(_FLOATS), device=device)
        return cls(
            ints=torch.zeros(rows, len(_INTS), dtype=torch.int64, device=device),
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

    def admit(
        self,
        slot: int,
        request: SpeechRequest,
        pages: list[int],
        last_row: Tensor,
        old_codes: Tensor | None = None,
    ) -> None:
        """Write one request's row. last_row: the first step's input, of the prompt or after a prefilled frame.

        old_codes: [F, G] int64, the frames to go on after; the state is that of a stream that drew them.
        """
        plan, sampling = request.plan, request.sampling
        num_old = 0 if old_codes is None else len(old_codes)
        num_replayed = num_old if self.steps_through_old_frames else 0
        num_prefilled = num_old - num_replayed
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
        self.ints[slot] = torch.tensor([int(ints[name]) for name in _INTS])
        self.floats[slot] = torch.tensor([floats[name] for name in _FLOATS])
        self.input_rows[slot] = last_row
        self.seen[slot] = False
        if old_codes is not None:
            self.replayed[slot, :num_replayed] = old_codes[:num_replayed].short()
            self.seen[slot, old_codes[:num_prefilled, 0]] = True
        if plan.trailing_ids:
            trailing = torch.tensor(plan.trailing_ids, dtype=torch.int32)
            self.trailing_ids[slot, : len(trailing)] = trailing
        self.page_table[slot, : len(pages)] = torch.tensor(pages)

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


def _temperature(draw: DrawParams) -> float:
    """A greedy row is the arg max of its untouched scores."""
    return draw.temperature if draw.do_sample else 1.0


def _signed64(seed: int) -> int:
    """The lower 64 bits of any int, as int64 holds them."""
    low = seed & 0xFFFFFFFFFFFFFFFF
    return low - (1 << 64) if low >> 63 else low
