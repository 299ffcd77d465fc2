"""Samples as bytes: PCM16 and the WAV container. Mono, little endian.

A float sample x becomes round(clamp(x, -1, 1) · 32767), ties to even, as libsndfile does, so full
scale is symmetric and -32768 is never a sample. That free value stands for "not a number": a fault
on the device travels inside the samples and is raised on the host, never played as silence.
Imports no torch; `quantize` uses tensor methods alone, so that a device step can hold it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from qwen3tts_core.errors import EngineFault

if TYPE_CHECKING:
    from torch import Tensor

BYTES_PER_SAMPLE = 2
FULL_SCALE = 32767
NOT_A_NUMBER = -32768
UNKNOWN_SIZE = 0xFFFFFFFF

_WAV_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")
_BYTES_AFTER_RIFF_SIZE = _WAV_HEADER.size - 8


def quantize(pcm: Tensor) -> Tensor:
    """Float samples to int16 by the rule above, on their device; NaN becomes NOT_A_NUMBER."""
    return (pcm.clamp(-1.0, 1.0) * FULL_SCALE).round().nan_to_num(nan=NOT_A_NUMBER).short()


def samples_to_bytes(samples: NDArray[np.int16]) -> bytes:
    """Quantised samples to PCM16. Raises EngineFault if one of them is NOT_A_NUMBER."""
    if (samples == NOT_A_NUMBER).any():
        raise EngineFault(f"the codec made NaN at sample {int((samples == NOT_A_NUMBER).argmax())}")
    return samples.astype("<i2", copy=False).tobytes()


def pcm16_from_float(pcm: NDArray[np.floating[Any]]) -> bytes:
    """Float samples to PCM16, all on the host. Raises EngineFault for NaN."""
    if np.isnan(pcm).any():
        raise EngineFault(f"NaN at sample {int(np.isnan(pcm).argmax())}")
    return samples_to_bytes((pcm.clip(-1.0, 1.0) * FULL_SCALE).round().astype(np.int16))


def num_pcm_bytes(num_frames: int, samples_per_frame: int) -> int:
    return num_frames * samples_per_frame * BYTES_PER_SAMPLE


def duration_s(num_bytes: int, sample_rate_hz: int) -> float:
    """Playing time of that much PCM16."""
    return num_bytes / (BYTES_PER_SAMPLE * sample_rate_hz)


def wav_header(sample_rate_hz: int, num_bytes: int | None = None) -> bytes:
    """The 44 bytes in front of PCM16. num_bytes: size of the PCM; None while it isn't known yet.

    An unknown size is written as 0xFFFFFFFF, which players take for "until the stream ends".
    Raises ValueError for more than a WAV file can hold.
    """
    if num_bytes is None:
        data_size = riff_size = UNKNOWN_SIZE
    else:
        data_size, riff_size = num_bytes, _BYTES_AFTER_RIFF_SIZE + num_bytes
        if riff_size >= UNKNOWN_SIZE:
            raise ValueError(f"a WAV file holds less than 4 GiB, got {num_bytes:,} bytes of PCM")
    byte_rate = sample_rate_hz * BYTES_PER_SAMPLE
    return _WAV_HEADER.pack(
        b"RIFF", riff_size, b"WAVE",
        b"fmt ", 16, 1, 1, sample_rate_hz, byte_rate, BYTES_PER_SAMPLE, 8 * BYTES_PER_SAMPLE,
        b"data", data_size,
    )  # fmt: skip


def wav_file(pcm: bytes, sample_rate_hz: int) -> bytes:
    """A complete WAV file with true sizes."""
    return wav_header(sample_rate_hz, len(pcm)) + pcm
