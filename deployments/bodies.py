"""Reads request bodies: each up to its limit, all together up to one.

A clone's clip comes inside the JSON, so a body may be many megabytes; what a replica holds of such
bodies at once is bounded here.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request

from qwen3tts_core.errors import Overloaded

MAX_HELD_BYTES = 512 << 20
SMALL_BODY_BYTES = 1 << 18
"""More than twice what the longest text a model takes can need; such bodies are not counted."""


class BodyReader:
    """One per replica. max_held_bytes: of large bodies, while their requests need them."""

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self.num_held_bytes = 0

    @asynccontextmanager
    async def hold(self, request: Request, max_bytes: int) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """The body's parts; what was read of it counts as held until the end of the `async with`.

        Reading raises HTTPException 413 for a body too large, Overloaded when others hold too much.
        """
        held = 0

        async def parts() -> AsyncGenerator[bytes, None]:
            nonlocal held
            size = 0
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise HTTPException(413, f"the body is larger than the limit, {max_bytes:,} bytes")
                if size > SMALL_BODY_BYTES:
                    growth = size - held
                    if self.num_held_bytes + growth > self._max_held_bytes:
                        raise Overloaded("too many large bodies are being worked on")
                    self.num_held_bytes += growth
                    held = size
                yield part

        try:
            async with aclosing(parts()) as stream:
                yield stream
        finally:
            self.num_held_bytes -= held


def content_type_of(request: Request, default: str = "") -> str:
    """In lower case, without parameters."""
    return request.headers.get("content-type", default).partition(";")[0].strip().lower()
