"""Audio on its way into a response: encoded off the event loop, and put into server-sent events."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from qwen3tts_core.audio.encoding import AudioFormat, Encoder, is_plain, missing_formats, open_encoder

logger = logging.getLogger(__name__)

SSE_MEDIA_TYPE = "text/event-stream"


def warn_of_missing_formats() -> None:
    """Say once what will be refused. Loads the libraries as well, so that no request waits for that."""
    if missing := missing_formats():
        logger.warning("requests for %s will be refused: no encoder on this machine", ", ".join(missing))


class ResponseEncoder:
    """One response's encoder; what is work for it happens on a worker thread, one call after the other."""

    def __init__(self, encoder: Encoder) -> None:
        self.media_type = encoder.media_type
        self.sample_rate_hz = encoder.sample_rate_hz
        self._encoder = encoder

    async def feed(self, pcm: bytes) -> bytes:
        """The bytes that are ready with these samples, which may be none."""
        if self._encoder.is_plain:
            return self._encoder.feed(pcm)
        return await asyncio.to_thread(self._encoder.feed, pcm)

    async def finish(self) -> bytes:
        """The rest; of a body that isn't streamed, all of it."""
        if self._encoder.is_plain:
            return self._encoder.finish()
        return await asyncio.to_thread(self._encoder.finish)


@asynccontextmanager
async def response_encoder(
    audio_format: AudioFormat,
    source_rate_hz: int,
    sample_rate_hz: int | None,
    speed: float,
    *,
    is_streaming: bool,
) -> AsyncIterator[ResponseEncoder]:
    """Held for as long as the response lasts; given back however that ends. Raises as `open_encoder` does."""

    def open_it() -> Encoder:
        return open_encoder(audio_format, source_rate_hz, sample_rate_hz, speed, is_streaming=is_streaming)

    is_at_hand = is_plain(audio_format, source_rate_hz, sample_rate_hz or source_rate_hz, speed)
    encoder = open_it() if is_at_hand else await asyncio.to_thread(open_it)
    try:
        yield ResponseEncoder(encoder)
    finally:
        if encoder.is_plain:
            encoder.close()
        else:  # a call that was cancelled may still be running, and is waited for
            await asyncio.to_thread(encoder.close)


def sse_event(kind: str, fields: dict[str, Any]) -> bytes:
    """One server-sent event; its type is said twice, for readers of either line."""
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


def sse_delta(audio: bytes) -> bytes:
    return sse_event("speech.audio.delta", {"audio": base64.b64encode(audio).decode("ascii")})
