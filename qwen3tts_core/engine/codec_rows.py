"""The codec's device side: a decoder, one row per stream, and fixed-shape steps over them.

`IncrementalRows` carries each stream's exact state in an arena; `WindowRows` keeps only the last
codes of a stream and decodes them again as context. Knows no queues, threads or requests.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3tts_core.config import CodecDecoderConfig, CodecEngineConfig
from qwen3tts_core.engine.codec_scheduler import Codes
from qwen3tts_core.errors import EngineFault
from qwen3tts_core.model.codec_state import CodecState, SavedRow
from qwen3tts_core.ops.interface import Capture, Launch, Transfer
from qwen3tts_core.streaming.codec_window import Window, window_buckets

logger = logging.getLogger(__name__)

_MEMORY_KNOBS = "raise the codec's memory_gib, or lower its num_rows or max_batch_frames"

Samples = NDArray[np.int16]  # quantised as in streaming/pcm.py

DecodeFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""codes [B, F, G], rows [B], num_valid [B], all int64 -> [B, F * samples_per_frame] int16."""


class CodecModel(Protocol):
    """A decoder of any make: `CodecDecoder` or `FusedCodecDecoder`."""

    @property
    def config(self) -> CodecDecoderConfig: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def bytes_per_frame(self) -> int: ...

    def new_state(self, num_rows: int) -> CodecState: ...

    def prepare(self, steps: Sequence[Callable[[], object]]) -> None: ...

    def decode_samples(self, codes: Tensor) -> Tensor: ...

    def decode_step_samples(
        self, codes: Tensor, state: CodecState, rows: Tensor, num_valid: Tensor
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Seams:
    """What the device side runs on. free_bytes: what may still be allocated, asked when steps are built."""

    capture: Capture
    transfer: Transfer
    free_bytes: Callable[[], float] = lambda: math.inf


@dataclass(slots=True)
class StepCounters:
    """padded_*: what was decoded only to fill a bucket. graph_replays, eager_steps: batches, as their launch
    replays a captured graph or not. primed_*: voices whose state was there already, or had to be decoded."""

    batches: int = 0
    rows: int = 0
    padded_rows: int = 0
    padded_frames: int = 0
    graph_replays: int = 0
    eager_steps: int = 0
    primed_hits: int = 0
    primed_misses: int = 0


class RowDecoder(Protocol):
    """Decodes pieces of streams that have a row each. Every method is called from one thread."""

    counters: StepCounters
    max_rows: Mapping[int, int]  # for each frame bucket that can be decoded: rows of a batch of it
    look_back: int | None  # frames before the next ones that those depend on; None: all of them

    def warm_up(self) -> None:
        """Decode padding with the steps that a first chunk takes, before the first request does."""
        ...

    def start(self, row: int, key: str, reference: Codes) -> Codes:
        """Make a row ready for a stream that follows these reference frames (possibly none).

        Returns the frames that must still be decoded, and their audio dropped, before the first.
        """
        ...

    def keep(self, row: int, key: str) -> None:
        """The row has just decoded what `start` asked for: remember its state under the key."""
        ...

    def decode(self, pieces: Sequence[tuple[int, Codes]]) -> list[Samples]:
        """Continue each row by its frames. The samples are valid until the next call."""
        ...


class StepTable:
    """One captured step per (frames, batch) bucket, over one set of input and output buffers.

    Inputs are packed, so that a batch is one copy to the device: per row its arena row, its number
    of valid frames, then its codes. Buckets beyond the limits, or beyond the memory, are left out.
    """

    def __init__(
        self,
        decode: DecodeFn,
        model: CodecModel,
        config: CodecEngineConfig,
        seams: Seams,
        *,
        frame_buckets: Sequence[int],
        padding_row: int,
    ) -> None:
        self._decode, self._transfer, self._padding_row = decode, seams.transfer, padding_row
        self._groups, self._samples_per_frame = model.config.num_quantizers, model.config.samples_per_frame
        self.counters = StepCounters()
        buckets = self._affordable(model, config, seams.free_bytes(), frame_buckets)
        frames, batch = (max(sizes, default=0) for sizes in zip(*buckets, strict=True))
        self._inputs = torch.zeros(
            batch * (2 + frames * self._groups), dtype=torch.int32, device=model.device
        )
        self._samples = torch.zeros(
            max(f * b for f, b in buckets) * self._samples_per_frame, dtype=torch.int16, device=model.device
        )
        self._launch: dict[tuple[int, int], Launch] = {}
        self._graphs: set[tuple[int, int]] = set()
        with torch.inference_mode():
            model.prepare([partial(self._step, f, b) for f, b in buckets])
            for f, b in sorted(
                buckets, key=math.prod, reverse=True
            ):  # the largest's memory serves all others
                name, step = f"codec step of {b} rows x {f} frames", partial(self._step, f, b)
                try:
                    self._launch[f, b] = seams.capture(step, name)
                except torch.OutOfMemoryError:
                    logger.warning("no %s: out of memory; %s", name, _MEMORY_KNOBS)
                    continue
                if self._launch[f, b] is not step:
                    self._graphs.add((f, b))
        self.buckets = sorted(self._launch)
        if not self.buckets:
            raise EngineFault(f"not one codec step fits the memory; {_MEMORY_KNOBS}")
        self.max_rows = {frames: batch for frames, batch in self.buckets}  # noqa: C416 - the last one wins

    @staticmethod
    def _affordable(
        model: CodecModel, config: CodecEngineConfig, free_bytes: float, frame_buckets: Sequence[int]
    ) -> list[tuple[int, int]]:
        """The buckets within `max_batch_frames` and, by estimate, the memory."""
        limit = config.max_batch_frames or math.inf
        smallest = config.batch_buckets[0]
        buckets = [
            (f, b) for f in frame_buckets for b in config.batch_buckets if f * b <= limit or b == smallest
        ]
        fitting = [(f, b) for f, b in buckets if f * b * model.bytes_per_frame <= free_bytes]
        if fitting != buckets:
            lost = ", ".join(f"{b} x {f}" for f, b in buckets if (f, b) not in fitting)
            logger.warning(
                "no codec steps of %s (rows x frames): %.1f GiB are free; %s",
                lost,
                free_bytes / 2**30,
                _MEMORY_KNOBS,
            )
        if not fitting:
            raise EngineFault(f"not one codec step fits the memory; {_MEMORY_KNOBS}")
        return fitting

    def _buffers(self, frames: int, batch: int) -> tuple[Tensor, Tensor]:
        """The step's part of the shared buffers: inputs [b, 2 + f * G], samples [b, f * samples]."""
        width, num_samples = 2 + frames * self._groups, frames * self._samples_per_frame
        inputs = self._inputs[: batch * width].view(batch, width)
        return inputs, self._samples[: batch * num_samples].view(batch, num_samples)

    def _step(self, frames: int, batch: int) -> None:
        inputs, samples = self._buffers(frames, batch)
        rows, num_valid, codes = inputs[:, 0].long(), inputs[:, 1].long(), inputs[:, 2:].long()
        samples.copy_(self._decode(codes.view(batch, frames, self._groups), rows, num_valid))

    def warm_up(self) -> None:
        first = self.buckets[0][0]
        for frames, batch in self.buckets:
            if frames == first:
                self._run(frames, batch, [], [])
            else:  # makes the host buffer for its results
                self._transfer.start(self._buffers(frames, batch)[1]).wait()

    def __call__(self, rows: Sequence[int], codes: Sequence[Codes]) -> Samples:
        """Decode codes[i] in arena row rows[i]. [n, bucket's samples]; beyond a row's frames: anything."""
        longest = max(map(len, codes))
        frames, batch = next((f, b) for f, b in self.buckets if f >= longest and b >= len(rows))
        self.counters.batches += 1
        self.counters.rows += len(rows)
        if (frames, batch) in self._graphs:
            self.counters.graph_replays += 1
        else:
            self.counters.eager_steps += 1
        self.counters.padded_rows += batch - len(rows)
        self.counters.padded_frames += batch * frames - sum(map(len, codes))
        return self._run(frames, batch, rows, codes)

    @torch.inference_mode()
    def _run(self, frames: int, batch: int, rows: Sequence[int], codes: Sequence[Codes]) -> Samples:
        inputs, samples = self._buffers(frames, batch)
        packed = np.zeros(inputs.shape, np.int32)  # padding frames are code 0, padding rows 0 valid frames
        packed[:, 0] = self._padding_row
        for i, (row, row_codes) in enumerate(zip(rows, codes, strict=True)):
            packed[i, :2] = row, len(row_codes)
            packed[i, 2 : 2 + row_codes.size] = row_codes.ravel()
        inputs.copy_(torch.from_numpy(packed), non_blocking=True)
        self._launch[frames, batch]()
        return self._transfer.start(samples).wait()  # whole, so that host buffers are few


class IncrementalRows:
    """Exact state per stream in an arena; each frame is decoded once. Source: spec 4.4."""

    look_back: int | None = None

    def __init__(self, model: CodecModel, config: CodecEngineConfig, seams: Seams) -> None:
        self._samples_per_frame = model.config.samples_per_frame
        self._max_primed = config.max_primed_voices
        self._primed: OrderedDict[str, SavedRow] = OrderedDict()
        self.state = state = model.new_state(config.num_rows + 1)
        self.steps = StepTable(
            lambda codes, rows, num_valid: model.decode_step_samples(codes, state, rows, num_valid),
            model,
            config,
            seams,
            frame_buckets=config.frame_buckets,
            padding_row=config.num_rows,
        )
        self.counters = self.steps.counters
        self.max_rows: Mapping[int, int] = self.steps.max_rows

    def warm_up(self) -> None:
        self.steps.warm_up()

    def start(self, row: int, key: str, reference: Codes) -> Codes:
        saved = self._primed.get(key) if len(reference) else None
        if saved is None:
            self.state.reset(row)
            self.counters.primed_misses += bool(len(reference))
            return reference
        self.counters.primed_hits += 1
        self._primed.move_to_end(key)
        self.state.restore(row, saved)
        return reference[:0]

    def keep(self, row: int, key: str) -> None:
        if self._max_primed:
            self._primed[key] = self.state.save(row)
            self._primed.move_to_end(key)
        if len(self._primed) > self._max_primed:
            self._primed.popitem(last=False)

    def decode(self, pieces: Sequence[tuple[int, Codes]]) -> list[Samples]:
        samples = self.steps([row for row, _ in pieces], [codes for _, codes in pieces])
        return [samples[i, : len(codes) * self._samples_per_frame] for i, (_, codes) in enumerate(pieces)]


class WindowRows:
    """The last `left_context_frames` codes of each stream, decoded again before each piece."""

    def __init__(self, model: CodecModel, config: CodecEngineConfig, seams: Seams) -> None:
        self._samples_per_frame = model.config.samples_per_frame
        self._left_context = config.left_context_frames
        self.look_back: int | None = config.left_context_frames
        self._context: dict[int, Codes] = {}
        widths = window_buckets(config.frame_buckets, config.left_context_frames)
        self.steps = StepTable(
            lambda codes, _rows, _num_valid: model.decode_samples(codes),
            model,
            config,
            seams,
            frame_buckets=widths[-1:] if config.deterministic else widths,
            padding_row=0,
        )
        self.counters = self.steps.counters
        rows_for = {
            num_new: max((b for f, b in self.steps.buckets if f >= num_new + self._left_context), default=0)
            for num_new in config.frame_buckets
        }
        self.max_rows: Mapping[int, int] = {num_new: rows for num_new, rows in rows_for.items() if rows}
        if not self.max_rows:
            raise EngineFault(f"not one codec window fits the memory; {_MEMORY_KNOBS}")

    def warm_up(self) -> None:
        self.steps.warm_up()

    def start(self, row: int, key: str, reference: Codes) -> Codes:
        self._context[row] = self._last(reference)
        return reference[:0]

    def keep(self, row: int, key: str) -> None:
        raise AssertionError("a window row never asks for frames to be decoded first")

    def decode(self, pieces: Sequence[tuple[int, Codes]]) -> list[Samples]:
        joined = [np.concatenate([self._context[row], codes]) for row, codes in pieces]
        samples = self.steps([0] * len(pieces), joined)
        kept = []
        for i, (row, codes) in enumerate(pieces):
            window = Window(len(self._context[row]), len(codes))
            kept.append(samples[i, window.kept_samples(self._samples_per_frame)])
            self._context[row] = self._last(joined[i])
        return kept

    def _last(self, codes: Codes) -> Codes:
        return codes[max(0, len(codes) - self._left_context) :]
