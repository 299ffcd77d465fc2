"""Reads request bodies: each up to its limit, all together up to one, and none for ever.

A clone's clip comes inside the JSON, so a body may be many megabytes; what a replica holds of such
bodies at once is bounded here, and how long it waits for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager

from python_multipart.multipart import parse_options_header
from starlette.exceptions import HTTPException
from starlette.requests import Request

from qwen3tts_core.errors import Overloaded

MAX_HELD_BYTES = 512 << 20
SMALL_BODY_BYTES = 1 << 18
"""More than twice what the longest text a model takes can need; such bodies are not counted."""

SILENCE_S = 20.0
"""Between two parts of a body. Any client that is still there sends something in that time."""
TOTAL_S = 300.0
"""For a whole body, or one byte at a time could hold a request open for ever; 47 MB of clip need 1.3 Mbit/s."""

_UTF8 = ("utf-8", "utf8")


class BodyReader:
    """One per replica. max_held_bytes: of large bodies, while their requests need them."""

    def __init__(
        self, max_held_bytes: int = MAX_HELD_BYTES, silence_s: float = SILENCE_S, total_s: float = TOTAL_S
    ) -> None:
        self._max_held_bytes = max_held_bytes
        self._silence_s, self._total_s = silence_s, total_s
        self.num_held_bytes = 0

    @asynccontextmanager
    async def hold(self, request: Request, max_bytes: int) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """The body's parts; what was read of it counts as held until the end of the `async with`.

        Raises HTTPException 415 for a body that is encoded. Reading raises 413 for one too large, 408 for one
        that doesn't come, Overloaded when others hold too much.
        """
        _check_encoding(request)
        held = 0

        async def parts() -> AsyncGenerator[bytes, None]:
            nonlocal held
            size = 0
            async for part in self._in_time(request.stream()):
                size += len(part)
                if size > max_bytes:
                    raise HTTPException(413, f"the body is larger than the limit, {max_bytes:,} bytes")
                if size > SMALL_BODY_BYTES:
                    self._grow(size - held)
                    held = size
                yield part

        try:
            async with aclosing(parts()) as stream:
                yield stream
        finally:
            self.num_held_bytes -= held

    @contextmanager
    def count(self, num_bytes: int) -> Iterator[None]:
        """For what came by another way, and is here already. Raises Overloaded when others hold too much."""
        held = num_bytes if num_bytes > SMALL_BODY_BYTES else 0
        self._grow(held)
        try:
            yield
        finally:
            self.num_held_bytes -= held

    def _grow(self, num_bytes: int) -> None:
        if self.num_held_bytes + num_bytes > self._max_held_bytes:
            raise Overloaded("too many large bodies are being worked on")
        self.num_held_bytes += num_bytes

    async def _in_time(self, parts: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        ends_at = clock() + self._total_s
        while True:
            limit = asyncio.timeout_at(min(ends_at, clock() + self._silence_s))
            try:
                async with limit:
                    part = await anext(parts, None)
            except TimeoutError:
                if limit.expired():
                    # The rest may still come, and would be taken for another request.
                    raise HTTPException(
                        408, "the body did not arrive in time", {"Connection": "close"}
                    ) from None
                raise
            if part is None:
                return
            yield part


def _check_encoding(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise HTTPException(415, f"content-encoding must be identity, got {encoding[:60]}")


def content_type_of(request: Request, default: str = "") -> str:
    """In lower case, without parameters."""
    return request.headers.get("content-type", default).partition(";")[0].strip().lower()


def check_charset(request: Request) -> None:
    """Raises HTTPException 415 for a content type with another charset than UTF-8."""
    _, options = parse_options_header(request.headers.get("content-type", ""))
    charset = options.get(b"charset", b"utf-8").decode("latin-1").strip().lower()
    if charset not in _UTF8:
        raise HTTPException(415, f"charset must be utf-8, got {charset[:60]}")
