"""A deployment that lives in the caller's own process, behind the face of a Serve handle: no hop, no copies.

What `handles.py` binds to another deployment it binds to an `InProcessHandle` as well, so that its users need not
know which it is. Differences to the real one are none that they see: a stream runs ahead of its reader, in a task
of its own; errors arrive as themselves; and `cancel` ends what runs. Unlike there, the end is certain.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from qwen3tts_core.errors import StreamCancelled


class InProcessHandle:
    """target: whose methods are called; on its event loop."""

    def __init__(self, target: object, *, is_streaming: bool = False) -> None:
        self._target, self._is_streaming = target, is_streaming

    def options(self, *, stream: bool = False, _by_reference: bool = False) -> InProcessHandle:
        return InProcessHandle(self._target, is_streaming=stream)

    def __getattr__(self, method: str) -> _Method:
        return _Method(self._target, method, is_streaming=self._is_streaming)

    def broadcast(self, method: str, *arguments: Any) -> _Broadcast:
        return _Broadcast(getattr(self._target, method)(*arguments))


class _Method:
    def __init__(self, target: object, name: str, *, is_streaming: bool) -> None:
        self._target, self._name, self._is_streaming = target, name, is_streaming

    def remote(self, *arguments: Any) -> InProcessStream | asyncio.Task[Any]:
        called = getattr(self._target, self._name)(*arguments)
        return InProcessStream(called) if self._is_streaming else asyncio.create_task(called)


class _Broadcast:
    """To every replica that can be reached from here: one."""

    def __init__(self, call: Coroutine[Any, Any, Any]) -> None:
        self._call = call

    async def results_async(self, *, return_exceptions: bool = False) -> list[Any]:
        return list(await asyncio.gather(self._call, return_exceptions=return_exceptions))


class InProcessStream:
    """One call of a generator, in flight; an `ItemStream`.

    The generator belongs to one task, whoever reads and in which task: so it may be ended at any time, and it ends
    when it is over, not when somebody reads on. Its reader hears what ended it after the items before, and hears it
    again however often it asks.
    """

    def __init__(self, items: AsyncGenerator[bytes, None]) -> None:
        self._waiting: asyncio.Queue[bytes | BaseException] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(items))
        self._task.add_done_callback(self._ended)

    async def _run(self, items: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(items):
            async for item in items:
                self._waiting.put_nowait(item)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """By a callback: a task that is cancelled before its first step runs no line of its own."""
        end = StreamCancelled() if task.cancelled() else task.exception()
        self._waiting.put_nowait(StopAsyncIteration() if end is None else end)

    def __aiter__(self) -> InProcessStream:
        return self

    async def __anext__(self) -> bytes:
        item = await self._waiting.get()
        if isinstance(item, bytes):
            return item
        self._waiting.put_nowait(item)  # for whoever asks again
        raise item

    def cancel(self) -> None:
        """The generator's `finally` runs at the loop's next turn."""
        self._task.cancel()
