"""Containers: what goes around the PCM on the wire.

A whole body and a stream differ in a WAV's two size fields and in nothing else.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Literal

from qwen3tts_core.streaming.pcm import wav_header

AudioFormat = Literal["wav", "pcm"]

MEDIA_TYPES: dict[AudioFormat, str] = {"wav": "audio/wav", "pcm": "audio/pcm"}
SSE_MEDIA_TYPE = "text/event-stream"


def header_for(audio_format: AudioFormat, sample_rate_hz: int, num_bytes: int | None) -> bytes:
    """What comes before that much PCM (None: a stream, nobody knows yet); nothing for bare PCM."""
    return wav_header(sample_rate_hz, num_bytes) if audio_format == "wav" else b""


def sse_event(kind: str, fields: dict[str, Any]) -> bytes:
    """One server-sent event; its type is said twice, for readers of either line."""
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


def sse_delta(audio: bytes) -> bytes:
    return sse_event("speech.audio.delta", {"audio": base64.b64encode(audio).decode("ascii")})
