"""The Talker's device side: weights, cache, slot state, and the steps over them.

Turns the scheduler's decisions into launches. Knows no queues, threads or streams.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3tts_core.config import TalkerEngineConfig
from qwen3tts_core.engine.frame_step import decode_frame
from qwen3tts_core.engine.scheduler import Placed, PrefillPiece
from qwen3tts_core.engine.slots import SlotState
from qwen3tts_core.errors import EngineFault, InvalidCodes
from qwen3tts_core.model.talker import Talker
from qwen3tts_core.ops.attention_plan import AttentionPlanner, PlannedSequence
from qwen3tts_core.ops.interface import Launch, LayerKV, PendingTransfer, PrefillLayout, PrefillSequence
from qwen3tts_core.ops.select import Backend

logger = logging.getLogger(__name__)

MEMORY_KNOBS = "raise the talker's memory_gib, or lower its num_pages, num_slots, max_positions or buckets"


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
    """steps_by_bucket: decode steps for each number of rows, padding included. graph_replays, eager_steps:
    decode steps and prefills, as their launch replays a captured graph or not."""

    steps: int = 0
    rows: int = 0
    padded_rows: int = 0
    prefills: int = 0
    prefill_rows: int = 0
    graph_replays: int = 0
    eager_steps: int = 0
    steps_by_bucket: dict[int, int] = field(default_factory=dict)


class _DecodeBucket:
    """One batch size: its static row and result buffers, and the step over them."""

    def __init__(self, runner: TalkerRunner, size: int) -> None:
        self.size = size
        device = runner.talker.device
        groups = runner.talker.config.talker.num_code_groups
        self.rows = torch.full((size,), runner.state.padding_slot, dtype=torch.int64, device=device)
        self.out = torch.zeros(size, groups + 1, dtype=torch.int64, device=device)
        self._members: tuple[Placed, ...] = ()

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
        self.is_graph = self.launch is not step

    def set_members(self, members: tuple[Placed, ...], padding_slot: int) -> None:
        """Touches the device only when the membership changed."""
        if members is not self._members:
            slots = [placed.slot for placed in members]
            padded = slots + [padding_slot] * (self.size - len(slots))
            self.rows.copy_(torch.tensor(padded), non_blocking=True)
            self._members = members


class _PrefillBucket:
    """One number of packed prompt rows: its static inputs, and the pass over them."""

    def __init__(self, runner: TalkerRunner, size: int) -> None:
        self.size = size
        device, config = runner.talker.device, runner.config
        self._planner = runner.talker.ops.planner
        self._page_size = config.page_size
        self._trash_index = runner.trash_page * config.page_size
        self._rows = torch.zeros(size, runner.talker.width, dtype=runner.talker.dtype, device=device)
        self._places = torch.zeros(3, size, dtype=torch.int64, device=device)
        self._places[1], self._places[2] = self._trash_index, -1
        self._page_table = runner.state.page_table.new_full(
            (config.num_slots, runner.state.page_table.shape[1]), runner.trash_page
        )
        self._sequences: tuple[PrefillSequence, ...] = ()

        def step() -> None:
            positions, write_index, row_sequence = self._places
            layout = PrefillLayout(positions, write_index, self._page_table, row_sequence, self._sequences)
            runner.talker(self._rows, layout, runner.cache)

        self.launch: Launch = runner.backend.capture(step, f"prefill of {size} rows")
        self.is_graph = self.launch is not step

    def run(self, pieces: Sequence[PrefillPiece], prompts: Sequence[Tensor], page_table: Tensor) -> None:
        """prompts: each piece's rows, [n, D]; page_table: [pieces, P]."""
        places = np.empty((3, self.size), np.int64)
        places[0], places[1], places[2] = 0, self._trash_index, -1
        page_size, first_row = self._page_size, 0
        sequences: list[PrefillSequence] = []
        for piece in pieces:
            here = slice(first_row, first_row + piece.num_rows)
            span = np.arange(piece.first, piece.first + piece.num_rows)
            places[0, here] = span
            places[1, here] = np.array(piece.placed.pages)[span // page_size] * page_size + span % page_size
            places[2, here] = len(sequences)
            sequences.append(PrefillSequence(first_row, piece.num_rows, piece.first))
            first_row += piece.num_rows
        self._sequences = tuple(sequences)
        if self._planner is not None and self._planner.plans_prefill:
            planned = [PlannedSequence(p.num_rows, p.first + p.num_rows, p.placed.pages) for p in pieces]
            self._planner.plan_prefill(self.size, planned)
        self._places.copy_(torch.from_numpy(places), non_blocking=True)
        torch.cat(list(prompts), out=self._rows[:first_row])
        self._rows[first_row:].zero_()  # a stale row would be finite, but nobody should have to know
        self._page_table[: len(pieces)] = page_table
        self.launch()


def _empty_cache(talker: Talker, config: TalkerEngineConfig, free_bytes: float) -> list[LayerKV]:
    """One per layer. Raises EngineFault, before it allocates, when they don't fit."""
    transformer = talker.config.talker.transformer
    shape = (config.num_pages + 1, config.page_size, transformer.num_kv_heads, transformer.head_dim)
    num_bytes = 2 * transformer.num_layers * math.prod(shape) * talker.dtype.itemsize
    if num_bytes > free_bytes:
        raise EngineFault(
            f"{config.num_pages} KV pages take {num_bytes / 2**30:.2f} GiB, {max(0.0, free_bytes) / 2**30:.2f} GiB "
            f"are free; {MEMORY_KNOBS}"
        )

    def zeros() -> Tensor:
        return torch.zeros(shape, device=talker.device, dtype=talker.dtype)

    return [LayerKV(zeros(), zeros()) for _ in range(transformer.num_layers)]


class TalkerRunner:
    """Owns everything on the device. Every method is called from one thread."""

    def __init__(self, talker: Talker, config: TalkerEngineConfig, backend: Backend) -> None:
        self.talker, self.config, self.backend = talker, config, backend
        self.trash_page = config.num_pages
        self.cache = _empty_cache(talker, config, backend.free_bytes())
        self.state = SlotState.empty(
            config,
            width=talker.width,
            vocab_size=talker.config.talker.vocab_size,
            num_groups=talker.config.talker.num_code_groups,
            trash_page=self.trash_page,
            device=talker.device,
            dtype=talker.dtype,
        )
        self.counters = RunnerCounters()
        self._prompts: dict[int, Tensor] = {}
        planner = talker.ops.planner
        self._decode_planner = planner if planner is not None and planner.plans_decode else None
        self._num_context: dict[int, int] = {}  # of each slot, for the planner: cached positions and the next
        with torch.inference_mode():
            self._buckets = [_DecodeBucket(self, size) for size in config.decode_buckets]
            self._prefill_buckets = [_PrefillBucket(self, size) for size in config.prefill_buckets]
        self.counters.steps_by_bucket = dict.fromkeys(config.decode_buckets, 0)
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

    def enter_thread(self) -> None:
        """Call first on the thread that will call everything else."""
        self.backend.enter_thread()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every step once on padding rows, before the first request does."""
        for bucket in self._buckets:
            bucket.launch()
        for prefill in self._prefill_buckets:
            prefill.launch()

    @torch.inference_mode()
    def admit(self, placed: Placed) -> None:
        """Build the rows to prefill and the slot's state.

        Raises InvalidRequest for an unfitting voice, InvalidCodes for frames that can't be resumed after.
        """
        request, old_codes = placed.request, None
        rows = self.talker.prompt_rows(request.plan, request.reference)
        if request.resume is not None:
            old_codes = self.talker.frame_codes(request.resume.codes)
            if len(old_codes) != request.resume.num_frames:
                raise InvalidCodes(f"{request.resume.num_frames} frames announced, {len(old_codes)} sent")
            if placed.num_rows > len(rows):
                rows = torch.cat([rows, self.talker.frame_rows(request.plan, old_codes)])
        self.state.admit(placed.slot, request, placed.pages, rows[-1], old_codes)
        self._prompts[placed.slot] = rows
        self._num_context[placed.slot] = placed.num_rows

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[PrefillPiece]) -> None:
        """Cache the pieces' prompt rows, packed into one pass."""
        num_rows = sum(piece.num_rows for piece in pieces)
        bucket = next(bucket for bucket in self._prefill_buckets if bucket.size >= num_rows)
        prompts = [self._prompts[p.placed.slot][p.first : p.first + p.num_rows] for p in pieces]
        slots = torch.tensor([piece.placed.slot for piece in pieces], device=self.talker.device)
        bucket.run(pieces, prompts, self.state.page_table[slots])
        self.counters.prefills += 1
        self.counters.prefill_rows += num_rows
        self._count_launch(bucket.is_graph)
        for piece in pieces:
            if piece.first + piece.num_rows == piece.placed.num_prefill:
                del self._prompts[piece.placed.slot]

    @torch.inference_mode()
    def launch(self, placed: tuple[Placed, ...]) -> PendingStep:
        """One decode step for these requests, whose prompts are cached.

        Pass the same object while the membership stays: nothing is looked at again then.
        """
        bucket = next(bucket for bucket in self._buckets if bucket.size >= len(placed))
        bucket.set_members(placed, self.state.padding_slot)
        if self._decode_planner is not None:
            self._plan_decode(self._decode_planner, bucket.size, placed)
        bucket.launch()
        self.counters.steps += 1
        self.counters.rows += len(placed)
        self.counters.padded_rows += bucket.size - len(placed)
        self.counters.steps_by_bucket[bucket.size] += 1
        self._count_launch(bucket.is_graph)
        return PendingStep(placed, self.backend.transfer.start(bucket.out))

    def _plan_decode(self, planner: AttentionPlanner, num_rows: int, placed: tuple[Placed, ...]) -> None:
        """Contexts as they are if no row has stopped since: one that has may attend to anything of its own."""
        planned = []
        for one in placed:
            num_context = self._num_context[one.slot]
            planned.append(PlannedSequence(1, num_context, one.pages))
            self._num_context[one.slot] = min(num_context + 1, len(one.pages) * self.config.page_size)
        planner.plan_decode(num_rows, planned)

    def _count_launch(self, is_graph: bool) -> None:
        if is_graph:
            self.counters.graph_replays += 1
        else:
            self.counters.eager_steps += 1

    def forget(self, slot: int) -> None:
        """Drop what a request that ended early left behind."""
        self._prompts.pop(slot, None)
