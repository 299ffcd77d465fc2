"""Remembers what was dear to fetch, up to a number of bytes, and asks for nothing twice at once.

The event loop's sibling of `qwen3tts_core.engine.memo`. A caller that leaves doesn't stop the work
that it shares with others; an error goes to everyone who waits and isn't remembered.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from qwen3tts_core.engine.memo import MemoStats

V = TypeVar("V")


class AsyncMemo(Generic[V]):
    """Values by key; the least recently used are forgotten beyond `max_bytes`. For one event loop.

    size_of: bytes that a value counts for. A value larger than `max_bytes` is handed out, not kept.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[V], int]) -> None:
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._kept: OrderedDict[str, V] = OrderedDict()
        self._running: dict[str, asyncio.Task[V]] = {}
        self.num_bytes = 0
        self._num_hits = self._num_joined = self._num_runs = 0

    def stats(self) -> MemoStats:
        return MemoStats(
            num_hits=self._num_hits,
            num_joined=self._num_joined,
            num_runs=self._num_runs,
            num_entries=len(self._kept),
            num_bytes=self.num_bytes,
        )

    async def get(self, key: str, compute: Callable[[], Coroutine[Any, Any, V]]) -> V:
        """The value of `key`: remembered, awaited with others, or computed. Raises what `compute` raises."""
        if key in self._kept:
            self._kept.move_to_end(key)
            self._num_hits += 1
            return self._kept[key]
        task = self._running.get(key)
        if task is not None:
            self._num_joined += 1
        else:
            self._num_runs += 1
            task = self._running[key] = asyncio.create_task(self._run(key, compute))
            task.add_done_callback(_see_its_error)
        return await asyncio.shield(task)

    async def _run(self, key: str, compute: Callable[[], Coroutine[Any, Any, V]]) -> V:
        try:
            value = await compute()
        finally:
            del self._running[key]
        size = self._size_of(value)
        if size <= self._max_bytes:
            self._kept[key] = value
            self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= self._size_of(oldest)
        return value


def _see_its_error(task: asyncio.Task[Any]) -> None:
    """Everyone who waited may have left; then asyncio would complain that nobody looked."""
    if not task.cancelled():
        task.exception()
