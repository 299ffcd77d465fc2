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
from qwen3tts_core.engine.captured_steps import AdmissionStep, DecodeStep, PrefillStep, StepParts
from qwen3tts_core.engine.scheduler import Placed, PrefillPiece
from qwen3tts_core.engine.slot_row import RowPacker
from qwen3tts_core.engine.slots import SlotState
from qwen3tts_core.errors import EngineFault, InvalidCodes
from qwen3tts_core.model.talker import Talker
from qwen3tts_core.ops.attention_plan import AttentionPlanner, PlannedSequence
from qwen3tts_core.ops.interface import LayerKV, PendingTransfer
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
        return self._transfer.wait()[: len(self.placed)]


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
        self._given: dict[int, Tensor] = {}  # by slot, prompts that are more than ids, until they are cached
        planner = talker.ops.planner
        self._decode_planner = planner if planner is not None and planner.plans_decode else None
        self._num_context: dict[int, int] = {}  # of each slot, for the planner: cached positions and the next
        self._packer = RowPacker(
            self.state.page_table.shape[1], self.state.trailing_ids.shape[1], self.trash_page
        )
        parts = StepParts(talker, self.state, self.cache, config, backend.capture)
        with torch.inference_mode():
            self._decode_steps = [DecodeStep(parts, size) for size in config.decode_buckets]
            self._decode_step_for = [  # so many rows
                next(step for step in self._decode_steps if step.size >= num_rows)
                for num_rows in range(self._decode_steps[-1].size + 1)
            ]
            self._prefill_steps = [PrefillStep(parts, size) for size in config.prefill_buckets]
            self._admission = AdmissionStep(parts, self._packer)
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
        for decode in self._decode_steps:
            decode.launch()
        for prefill in self._prefill_steps:
            prefill.launch()
        self._admission.warm_up()

    @torch.inference_mode()
    def admit(self, placed: Placed) -> None:
        """Write the slot's state.

        Raises InvalidRequest for an unfitting voice, InvalidCodes for frames that can't be resumed after, EngineFault
        for ids that no table holds.
        """
        request, plan, slot = placed.request, placed.request.plan, placed.slot
        self.forget(slot)
        num_frames = placed.num_rows - plan.num_rows  # to prefill after the prompt
        given, old_codes = None, None
        if num_frames or plan.speaker_row is not None or plan.reference_row is not None:
            given = self.talker.prompt_rows(plan, request.reference)
        else:
            self.talker.check_ids(plan)
        if request.resume is not None:
            old_codes = self.talker.frame_codes(request.resume.codes)
            if len(old_codes) != request.resume.num_frames:
                raise InvalidCodes(f"{request.resume.num_frames} frames announced, {len(old_codes)} sent")
            if given is not None and num_frames:
                given = torch.cat([given, self.talker.frame_rows(plan, old_codes)])
        num_old = 0 if old_codes is None else len(old_codes)
        counts = {"num_prefilled": num_frames, "num_replayed": num_old - num_frames}
        row = self._packer.request(slot, request, placed.pages, **counts)
        self._admission.run(row)
        if old_codes is not None:
            self.state.recall(slot, old_codes)
        if given is not None:
            self.state.input_rows[slot] = given[-1]
            self._given[slot] = given
        self._num_context[slot] = placed.num_rows

    @torch.inference_mode()
    def prefill(self, pieces: Sequence[PrefillPiece]) -> None:
        """Cache the pieces' prompt rows, packed into one pass."""
        num_rows = sum(piece.num_rows for piece in pieces)
        step = next(step for step in self._prefill_steps if step.size >= num_rows)
        step.run(pieces, self._given)
        self.counters.prefills += 1
        self.counters.prefill_rows += num_rows
        self._count_launch(step.is_graph)
        for piece in pieces:
            if piece.first + piece.num_rows == piece.placed.num_prefill:
                self.forget(piece.placed.slot)

    @torch.inference_mode()
    def launch(self, placed: tuple[Placed, ...]) -> PendingStep:
        """One decode step for these requests, whose prompts are cached.

        Pass the same object while the membership stays: nothing is looked at again then.
        """
        step = self._decode_step_for[len(placed)]
        step.set_members(placed)
        if self._decode_planner is not None:
            self._plan_decode(self._decode_planner, step.size, placed)
        step.launch()
        self.counters.steps += 1
        self.counters.rows += len(placed)
        self.counters.padded_rows += step.size - len(placed)
        self.counters.steps_by_bucket[step.size] += 1
        self._count_launch(step.is_graph)
        return PendingStep(placed, self.backend.transfer.start(step.out))

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
        self._given.pop(slot, None)
