"""The Talker's device side: weights, cache, slot state, and the steps over them.

Turns the scheduler's decisions into launches. Knows no queues, threads or streams.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3tts_core.config import TalkerEngineConfig
from qwen3tts_core.engine.frame_step import decode_frame
from qwen3tts_core.engine.scheduler import Placed, PrefillPiece
from qwen3tts_core.engine.slots import SlotState
from qwen3tts_core.model.talker import Talker
from qwen3tts_core.ops.interface import Launch, LayerKV, PendingTransfer, PrefillLayout, PrefillSequence
from qwen3tts_core.ops.select import Backend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched decode step; row i of its result belongs to `placed[i]`."""

    placed: tuple[Placed, ...]
    _transfer: PendingTransfer

    def is_ready(self) -> bool:
        return self._transfer.is_ready()

    def wait(self) -> NDArray[np.int64]:
        """[rows, G + 1]: codes and outcome, see `frame_step`."""
        return self._transfer.wait().numpy()[: len(self.placed)]


@dataclass(slots=True)
class RunnerCounters:
    steps: int = 0
    padded_rows: int = 0
    prefills: int = 0
    prefill_rows: int = 0


class _DecodeBucket:
    """One batch size: its static row and result buffers, and the step over them."""

    def __init__(self, runner: TalkerRunner, size: int) -> None:
        self.size = size
        device = runner.talker.device
        groups = runner.talker.config.talker.num_code_groups
        self.rows = torch.full((size,), runner.state.padding_slot, dtype=torch.int64, device=device)
        self.out = torch.zeros(size, groups + 1, dtype=torch.int64, device=device)
        self._slots: tuple[int, ...] = ()

        def step() -> None:
            decode_frame(
                runner.talker,
                runner.state,
                runner.cache,
                self.rows,
                self.out,
                min_frames=runner.config.min_frames,
                trash_page=runner.trash_page,
            )

        self.launch: Launch = runner.backend.capture(step, f"decode step of {size} rows")

    def set_rows(self, slots: tuple[int, ...], padding_slot: int) -> None:
        """Touches the device only when the membership changed."""
        if slots != self._slots:
            padded = [*slots, *([padding_slot] * (self.size - len(slots)))]
            self.rows.copy_(torch.tensor(padded), non_blocking=True)
            self._slots = slots


class TalkerRunner:
    """Owns everything on the device. Every method is called from one thread."""

    def __init__(self, talker: Talker, config: TalkerEngineConfig, backend: Backend) -> None:
        self.talker, self.config, self.backend = talker, config, backend
        transformer = talker.config.talker.transformer
        self.trash_page = config.num_pages
        shape = (config.num_pages + 1, config.page_size, transformer.num_kv_heads, transformer.head_dim)
        self.cache = [
            LayerKV(
                torch.zeros(shape, device=talker.device, dtype=talker.dtype),
                torch.zeros(shape, device=talker.device, dtype=talker.dtype),
            )
            for _ in range(transformer.num_layers)
        ]
        self.state = SlotState.empty(
            config,
            width=talker.width,
            vocab_size=talker.config.talker.vocab_size,
            trash_page=self.trash_page,
            device=talker.device,
            dtype=talker.dtype,
        )
        self.counters = RunnerCounters()
        self._prompts: dict[int, Tensor] = {}
        with torch.inference_mode():
            self._buckets = [_DecodeBucket(self, size) for size in config.decode_buckets]
        cache_bytes = sum(kv.key.nbytes + kv.value.nbytes for kv in self.cache)
        logger.info(
            "talker: %d slots, %d KV pages of %d positions (%.2f GB), decode buckets %s, ops %s",
            config.num_slots,
            config.num_pages,
            config.page_size,
            cache_bytes / 1e9,
            list(config.decode_buckets),
            backend.ops.name,
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every decode bucket once on padding rows, before the first request does."""
        for bucket in self._buckets:
            bucket.launch()

    @torch.inference_mode()
    def admit(self, placed: Placed) -> None:
        """Build the prompt's rows and the slot's state. Raises InvalidRequest for an unfitting voice."""
        rows = self.talker.prompt_rows(placed.request.plan, placed.request.reference)
        self.state.admit(placed.slot, placed.request, placed.pages, rows[-1])
        self._prompts[placed.slot] = rows

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[PrefillPiece]) -> None:
        """Cache the pieces' prompt rows, packed into one pass."""
        num_rows = sum(piece.num_rows for piece in pieces)
        bucket = next(size for size in self.config.prefill_buckets if size >= num_rows)
        rows, layout = self._pack(pieces, bucket)
        self.talker(rows, layout, self.cache)
        self.counters.prefills += 1
        self.counters.prefill_rows += num_rows
        for piece in pieces:
            if piece.first + piece.num_rows == piece.placed.num_prefill:
                del self._prompts[piece.placed.slot]

    def _pack(self, pieces: Sequence[PrefillPiece], bucket: int) -> tuple[Tensor, PrefillLayout]:
        page_size, device = self.config.page_size, self.talker.device
        rows = torch.zeros(bucket, self.talker.width, dtype=self.talker.dtype, device=device)
        positions = np.zeros(bucket, np.int64)
        write_index = np.full(bucket, self.trash_page * page_size, np.int64)
        row_sequence = np.full(bucket, -1, np.int64)
        sequences: list[PrefillSequence] = []
        first_row = 0
        for piece in pieces:
            here = slice(first_row, first_row + piece.num_rows)
            span = np.arange(piece.first, piece.first + piece.num_rows)
            rows[here] = self._prompts[piece.placed.slot][piece.first : piece.first + piece.num_rows]
            positions[here] = span
            write_index[here] = np.array(piece.placed.pages)[span // page_size] * page_size + span % page_size
            row_sequence[here] = len(sequences)
            sequences.append(PrefillSequence(first_row, piece.num_rows, piece.first))
            first_row += piece.num_rows
        slots = torch.tensor([piece.placed.slot for piece in pieces], device=device)
        layout = PrefillLayout(
            torch.from_numpy(positions).to(device),
            torch.from_numpy(write_index).to(device),
            self.state.page_table[slots],
            torch.from_numpy(row_sequence).to(device),
            tuple(sequences),
        )
        return rows, layout

    @torch.inference_mode()
    def launch(self, placed: Sequence[Placed]) -> PendingStep:
        """One decode step for these requests, whose prompts are cached."""
        bucket = next(bucket for bucket in self._buckets if bucket.size >= len(placed))
        bucket.set_rows(tuple(p.slot for p in placed), self.state.padding_slot)
        bucket.launch()
        self.counters.steps += 1
        self.counters.padded_rows += bucket.size - len(placed)
        return PendingStep(tuple(placed), self.backend.transfer.start(bucket.out))

    def forget(self, slot: int) -> None:
        """Drop what a request that ended early left behind."""
        self._prompts.pop(slot, None)
