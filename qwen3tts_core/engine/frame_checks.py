"""Whether frames can be decoded at all. The one place where codes from outside are looked at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from qwen3tts_core.engine.codec_scheduler import Codes
from qwen3tts_core.errors import InvalidCodes
from qwen3tts_core.types import FrameBatch


@dataclass(frozen=True, slots=True)
class FrameChecks:
    """What a codec takes: frames of `num_groups` codes, each in [0, codebook_size)."""

    num_groups: int
    codebook_size: int

    def codes(self, data: bytes) -> Codes:
        """[F, G] from bytes. Raises InvalidCodes unless they are whole frames of codes in range."""
        if len(data) % (2 * self.num_groups):
            raise InvalidCodes(f"{len(data)} bytes aren't whole frames of {self.num_groups} int16 codes")
        codes = np.frombuffer(data, "<i2").reshape(-1, self.num_groups)
        if codes.size and not 0 <= codes.min() <= codes.max() < self.codebook_size:
            raise InvalidCodes(
                f"codes must be in [0, {self.codebook_size}), got {codes.min()} to {codes.max()}"
            )
        return codes

    def batch(self, frames: FrameBatch, expected_frame: int) -> Codes:
        """The batch's codes, if it goes on where the stream is. Raises InvalidCodes."""
        if frames.first_frame != expected_frame:
            raise InvalidCodes(f"expected frame {expected_frame}, got {frames.first_frame}")
        if frames.num_frames and frames.num_groups != self.num_groups:
            raise InvalidCodes(f"expected {self.num_groups} code groups, got {frames.num_groups}")
        codes = self.codes(frames.codes)
        if len(codes) != frames.num_frames:
            raise InvalidCodes(f"{frames.num_frames} frames announced, {len(codes)} sent")
        return codes
