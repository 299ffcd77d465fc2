"""Audio that its reader has yet to take: it waits here, so that no engine waits for a slow reader.

    chain ──> UnreadAudio.ahead, up to READER_AHEAD_S ──> send, at the reader's pace

What a replica holds of it is bounded: beyond MAX_BYTES the streams that run wait for their readers, and new
requests are refused.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress

from qwen3tts_core.errors import Overloaded

MAX_BYTES = 512 << 20
READER_AHEAD_S = 120.0
"""Of one stream, in seconds of PCM16 at 24 kHz. Then it waits, and with it the pieces of its text that follow."""
_BYTES_PER_S = 48_000


class UnreadAudio:
    """One per replica; on one event loop."""

    def __init__(self, ahead_s: float = READER_AHEAD_S, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._max_ahead_bytes = max_bytes, ahead_s * _BYTES_PER_S
        self._was_taken = asyncio.Condition()
        self.num_bytes = 0

    def check(self) -> None:
        """Raises Overloaded when slow readers hold all that may be held."""
        if self.num_bytes >= self._max_bytes:
            raise Overloaded("too much audio waits for readers that are slow")

    async def ahead(self, parts: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """The parts, taken as they come and given as they are asked for; an error where it stands.

        Closing it ends the taking before it returns; `parts` is then the caller's to close.
        """
        stream = _Stream(self, parts)
        taking = asyncio.create_task(stream.take())
        try:
            while (part := await stream.next()) is not None:
                yield part
                await self._release(stream, len(part))  # it is asked for the next: this one has been sent
            await taking  # raises what `parts` raised
        finally:
            taking.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await taking
            await self._release(stream, stream.num_bytes)

    @asynccontextmanager
    async def holding(self, size: int) -> AsyncIterator[None]:
        """Around the sending of a whole body, which is there already and needs no room."""
        self.num_bytes += size
        try:
            yield
        finally:
            self.num_bytes -= size
            async with self._was_taken:
                self._was_taken.notify_all()

    async def _hold(self, stream: _Stream, size: int) -> None:
        """Once there is room; a stream that holds nothing always may."""

        def has_room() -> bool:
            return not stream.num_bytes or (
                stream.num_bytes + size <= self._max_ahead_bytes and self.num_bytes + size <= self._max_bytes
            )

        async with self._was_taken:
            await self._was_taken.wait_for(has_room)
            stream.num_bytes += size
            self.num_bytes += size

    async def _release(self, stream: _Stream, size: int) -> None:
        stream.num_bytes -= size
        self.num_bytes -= size
        async with self._was_taken:
            self._was_taken.notify_all()


class _Stream:
    """Between the one who takes from the chain and the one who sends."""

    def __init__(self, unread: UnreadAudio, parts: AsyncIterator[bytes]) -> None:
        self._unread, self._parts = unread, parts
        self._waiting: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._is_over = False
        self.num_bytes = 0

    async def take(self) -> None:
        try:
            async for part in self._parts:
                await self._unread._hold(self, len(part))
                self._waiting.append(part)
                self._arrived.set()
        finally:
            self._is_over = True
            self._arrived.set()

    async def next(self) -> bytes | None:
        """None at the end, whatever end it was."""
        while not self._waiting and not self._is_over:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft() if self._waiting else None
