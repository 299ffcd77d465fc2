"""The deadline for a request's first audio: one clock over every wait before it.

It runs from the moment the body is read: fetching and encoding a clip, places in queues, prefill and
the first frames all count. Reading the body doesn't, since that is the client's pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from qwen3tts_core.errors import FirstAudioTimeout

FIRST_AUDIO_TIMEOUT_S = 30.0
"""More than a full queue ever takes; a client that waits longer has given up."""


class FirstAudioDeadline:
    """timeout_s: 0 is never. extra_s: asked once, at the deadline: how long it is put off, 0 is not at all.
    For one request, on one event loop, one wait at a time."""

    def __init__(self, timeout_s: float, extra_s: Callable[[], float] = lambda: 0.0) -> None:
        self._timeout_s = timeout_s
        self._extra_s = extra_s
        self._ends_at: float | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Around one of the waits; the first of them starts the clock.

        What is still awaited at the deadline is cancelled, and FirstAudioTimeout raised.
        """
        if self._ends_at is None and self._timeout_s > 0:
            self._ends_at = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout(None) as limit:
                self._set_alarm(limit)
                yield
        except TimeoutError:
            if limit.expired():
                raise FirstAudioTimeout(self._timeout_s) from None
            raise
        finally:
            if self._alarm is not None:
                self._alarm.cancel()

    def _set_alarm(self, limit: asyncio.Timeout) -> None:
        if self._ends_at is not None:
            self._alarm = asyncio.get_running_loop().call_at(self._ends_at, self._end_or_put_off, limit)

    def _end_or_put_off(self, limit: asyncio.Timeout) -> None:
        assert self._ends_at is not None, "there is an alarm, so there is a deadline"
        extra_s, self._extra_s = self._extra_s(), lambda: 0.0
        if extra_s > 0:
            self._timeout_s += extra_s
            self._ends_at += extra_s
            self._set_alarm(limit)
        else:
            limit.reschedule(self._ends_at)  # is past: it ends now
