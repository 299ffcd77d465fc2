"""The deadline for a request's first audio: one clock over every wait before it.

It runs from the moment the body is read: fetching and encoding a clip, places in queues, prefill and
the first frames all count. Reading the body doesn't, since that is the client's pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from qwen3tts_core.errors import FirstAudioTimeout

FIRST_AUDIO_TIMEOUT_S = 30.0
"""More than a full queue ever takes; a client that waits longer has given up."""


class FirstAudioDeadline:
    """timeout_s: 0 is never. For one request, on one event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends_at: float | None = None

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Around one of the waits; the first of them starts the clock.

        What is still awaited at the deadline is cancelled, and FirstAudioTimeout raised.
        """
        if self._ends_at is None and self._timeout_s > 0:
            self._ends_at = asyncio.get_running_loop().time() + self._timeout_s
        limit = asyncio.timeout_at(self._ends_at)
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise FirstAudioTimeout(self._timeout_s) from None
            raise
