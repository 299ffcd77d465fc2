"""Stateless decoding: which frames a window holds, and which of its samples are kept.

    frames   … 6  7  8 │ 9 10 11     num_context = 3, num_new = 3
               decoded │ decoded
               again,  │ and kept
               dropped │

Each window starts anew, with zeros before its first frame. Windows of several streams are padded on
the right to one width: the decoder looks back only, so a row's own samples don't change.
Pure arithmetic. Source: spec 4.2 (how the reference cuts) and 4.3 (how much context is exact).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qwen3tts_core.config import CodecDecoderConfig

_LOOK_BACK = 6  # of a 7-wide causal conv
_DILATIONS = (1, 3, 9)


@dataclass(frozen=True, slots=True)
class Window:
    """num_context frames decoded again, then num_new frames whose samples are kept."""

    num_context: int
    num_new: int

    @property
    def num_frames(self) -> int:
        return self.num_context + self.num_new

    def kept_samples(self, samples_per_frame: int) -> slice:
        """Where the new samples lie in the decoded row, however far the row is padded."""
        return slice(self.num_context * samples_per_frame, self.num_frames * samples_per_frame)


def window_at(first_frame: int, num_new: int, left_context_frames: int) -> Window:
    """The window that continues a stream at `first_frame`: as much context as there is, up to the limit."""
    return Window(min(first_frame, left_context_frames), num_new)


def window_buckets(frame_buckets: Sequence[int], left_context_frames: int) -> tuple[int, ...]:
    """Window widths to build for: the first chunks of a stream (little context yet), then full context."""
    full = (left_context_frames + num_new for num_new in frame_buckets)
    return tuple(sorted({*frame_buckets, *full}))


def exact_left_context(config: CodecDecoderConfig) -> int:
    """Frames of context from which a window equals the whole decode. 580 for the published sizes."""
    steps = _LOOK_BACK  # at the sample rate: the last conv
    for rate in reversed(config.upsample_rates):
        steps += _LOOK_BACK * sum(_DILATIONS)
        steps = -(-steps // rate) + 1  # the transposed conv's kernel is two strides long
    steps += _LOOK_BACK
    for ratio in reversed(config.upsampling_ratios):
        steps = -(-(steps + _LOOK_BACK) // ratio)
    attention = config.transformer.num_layers * (config.sliding_window - 1)
    return steps + attention + 2  # the conv before the transformer
