"""The codec's device side: a decoder, one row per stream, and fixed-shape steps over them.

`IncrementalRows` carries each stream's exact state in an arena; `WindowRows` keeps only the last
codes of a stream and decodes them again as context. Knows no queues, threads or requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qwen3tts_core.config import CodecEngineConfig
from qwen3tts_core.engine.codec_scheduler import Codes
from qwen3tts_core.model.codec_decoder import CodecDecoder
from qwen3tts_core.model.codec_state import SavedRow
from qwen3tts_core.ops.interface import Capture, Transfer
from qwen3tts_core.streaming.codec_window import Window, window_buckets
from qwen3tts_core.streaming.pcm import quantize

Samples = NDArray[np.int16]  # quantised as in streaming/pcm.py

DecodeFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""codes [B, F, G], rows [B], num_valid [B], all int64 -> [B, F * samples_per_frame] float."""


@dataclass(slots=True)
class StepCounters:
    """padded_*: what was decoded only to fill a bucket."""

    batches: int = 0
    padded_rows: int = 0
    padded_frames: int = 0


class RowDecoder(Protocol):
    """Decodes pieces of streams that have a row each. Every method is called from one thread."""

    counters: StepCounters

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
    of valid frames, then its codes.
    """

    def __init__(
        self,
        decode: DecodeFn,
        decoder: CodecDecoder,
        *,
        frame_buckets: Sequence[int],
        batch_buckets: Sequence[int],
        padding_row: int,
        capture: Capture,
        transfer: Transfer,
    ) -> None:
        config = decoder.config
        self._decode, self._transfer, self._padding_row = decode, transfer, padding_row
        self._groups, self._samples_per_frame = config.num_quantizers, config.samples_per_frame
        self._frame_buckets, self._batch_buckets = tuple(frame_buckets), tuple(batch_buckets)
        self.buckets = [(f, b) for f in self._frame_buckets for b in self._batch_buckets]
        self.counters = StepCounters()
        frames, batch = self._frame_buckets[-1], self._batch_buckets[-1]
        self._inputs = torch.zeros(
            batch * (2 + frames * self._groups), dtype=torch.int32, device=decoder.device
        )
        self._samples = torch.zeros(
            batch * frames * self._samples_per_frame, dtype=torch.int16, device=decoder.device
        )
        with torch.inference_mode():
            self._launch = {
                (f, b): capture(partial(self._step, f, b), f"codec step of {b} rows x {f} frames")
                for f, b in reversed(self.buckets)  # the largest first: its memory serves all others
            }

    def _buffers(self, frames: int, batch: int) -> tuple[Tensor, Tensor]:
        """The step's part of the shared buffers: inputs [b, 2 + f * G], samples [b, f * samples]."""
        width, num_samples = 2 + frames * self._groups, frames * self._samples_per_frame
        inputs = self._inputs[: batch * width].view(batch, width)
        return inputs, self._samples[: batch * num_samples].view(batch, num_samples)

    def _step(self, frames: int, batch: int) -> None:
        inputs, samples = self._buffers(frames, batch)
        rows, num_valid, codes = inputs[:, 0].long(), inputs[:, 1].long(), inputs[:, 2:].long()
        samples.copy_(quantize(self._decode(codes.view(batch, frames, self._groups), rows, num_valid)))

    def warm_up(self) -> None:
        for batch in self._batch_buckets:
            self._run(self._frame_buckets[0], batch, [], [])

    def __call__(self, rows: Sequence[int], codes: Sequence[Codes]) -> Samples:
        """Decode codes[i] in arena row rows[i]. [n, bucket's samples]; beyond a row's frames: anything."""
        frames = next(size for size in self._frame_buckets if size >= max(map(len, codes)))
        batch = next(size for size in self._batch_buckets if size >= len(rows))
        self.counters.batches += 1
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
        return self._transfer.start(samples[: len(rows)]).wait().numpy()


class IncrementalRows:
    """Exact state per stream in an arena; each frame is decoded once. Source: spec 4.4."""

    def __init__(
        self, decoder: CodecDecoder, config: CodecEngineConfig, capture: Capture, transfer: Transfer
    ) -> None:
        self._samples_per_frame = decoder.config.samples_per_frame
        self._max_primed = config.max_primed_voices
        self._primed: OrderedDict[str, SavedRow] = OrderedDict()
        padding_row = config.num_rows
        self.state = state = decoder.new_state(config.num_rows + 1)
        self.steps = StepTable(
            lambda codes, rows, num_valid: decoder.decode_step(codes, state, rows, num_valid),
            decoder,
            frame_buckets=config.frame_buckets,
            batch_buckets=config.batch_buckets,
            padding_row=padding_row,
            capture=capture,
            transfer=transfer,
        )
        self.counters = self.steps.counters

    def warm_up(self) -> None:
        self.steps.warm_up()

    def start(self, row: int, key: str, reference: Codes) -> Codes:
        saved = self._primed.get(key) if len(reference) else None
        if saved is None:
            self.state.reset(row)
            return reference
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

    def __init__(
        self, decoder: CodecDecoder, config: CodecEngineConfig, capture: Capture, transfer: Transfer
    ) -> None:
        self._samples_per_frame = decoder.config.samples_per_frame
        self._left_context = config.left_context_frames
        self._context: dict[int, Codes] = {}
        widths = window_buckets(config.frame_buckets, config.left_context_frames)
        self.steps = StepTable(
            lambda codes, _rows, _num_valid: decoder.decode(codes),
            decoder,
            frame_buckets=widths[-1:] if config.deterministic else widths,
            batch_buckets=config.batch_buckets,
            padding_row=0,
            capture=capture,
            transfer=transfer,
        )
        self.counters = self.steps.counters

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
