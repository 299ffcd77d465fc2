"""Containers: what goes around the PCM on the wire.

A whole body and a stream differ in a WAV's two size fields and in nothing else.
"""

from __future__ import annotations

import base64
import json
import struct
from typing import Any, Literal

AudioFormat = Literal["wav", "pcm"]

MEDIA_TYPES: dict[AudioFormat, str] = {"wav": "audio/wav", "pcm": "audio/pcm"}
SSE_MEDIA_TYPE = "text/event-stream"

_BYTES_PER_SAMPLE = 2
_UNKNOWN_SIZE = 0xFFFFFFFF
_WAV_HEADER = struct.Struct("<4sI4s4sIHHIIHH4sI")


def wav_header(sample_rate_hz: int, num_samples: int | None) -> bytes:
    """44 bytes for mono PCM16. num_samples None: a stream, whose sizes are 0xFFFFFFFF."""
    if num_samples is None:
        riff_size = data_size = _UNKNOWN_SIZE
    else:
        data_size = num_samples * _BYTES_PER_SAMPLE
        riff_size = _WAV_HEADER.size - 8 + data_size
    byte_rate = sample_rate_hz * _BYTES_PER_SAMPLE
    fmt = (b"fmt ", 16, 1, 1, sample_rate_hz, byte_rate, _BYTES_PER_SAMPLE, 8 * _BYTES_PER_SAMPLE)
    return _WAV_HEADER.pack(b"RIFF", riff_size, b"WAVE", *fmt, b"data", data_size)


def header_for(audio_format: AudioFormat, sample_rate_hz: int, num_samples: int | None) -> bytes:
    """What comes before the first sample; nothing for bare PCM."""
    return wav_header(sample_rate_hz, num_samples) if audio_format == "wav" else b""


def sse_event(kind: str, fields: dict[str, Any]) -> bytes:
    """One server-sent event; its type is said twice, for readers of either line."""
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


def sse_delta(audio: bytes) -> bytes:
    return sse_event("speech.audio.delta", {"audio": base64.b64encode(audio).decode("ascii")})
