"""Carries what an engine thread made to the coroutines that wait for it.

The engine puts any number of items for any number of streams, then flushes: the event loop is
woken once per step, not once per stream. Knows nothing of what the items are, except that an
exception put as an item is raised at the reader.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")
_In = TypeVar("_In", contravariant=True)


class Outbox(Protocol[_In]):
    """Where an engine leaves its results. Called from the engine's thread only."""

    def put(self, request_id: str, item: _In | Exception) -> None: ...

    def flush(self) -> None: ...


class HasBytes(Protocol):
    """What may cross a process border."""

    def to_bytes(self) -> bytes: ...


class BytesOutbox:
    """Items by their bytes, into an outbox of bytes."""

    def __init__(self, outbox: Outbox[bytes]) -> None:
        self._outbox = outbox

    def put(self, request_id: str, item: HasBytes | Exception) -> None:
        self._outbox.put(request_id, item if isinstance(item, Exception) else item.to_bytes())

    def flush(self) -> None:
        self._outbox.flush()


class AsyncStream(Generic[Item]):
    """The reading end: items in order; an exception is raised where it stands. Event loop only."""

    def __init__(self) -> None:
        self._items: deque[Item | Exception] = deque()
        self._arrived = asyncio.Event()

    def _push(self, items: list[Item | Exception]) -> None:
        self._items.extend(items)
        self._arrived.set()

    @property
    def num_waiting(self) -> int:
        return len(self._items)

    async def get(self) -> Item:
        while not self._items:
            self._arrived.clear()
            await self._arrived.wait()
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        return await self.get()


class AsyncOutbox(Generic[Item]):
    """An Outbox whose readers live on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[str, AsyncStream[Item]] = {}
        self._pending: dict[AsyncStream[Item], list[Item | Exception]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def stream(self, request_id: str) -> Iterator[AsyncStream[Item]]:
        """Open the reading end of one request.

        It gets what is put from now on; items for ids that nobody reads at that moment are dropped.
        """
        if request_id in self._streams:
            raise ValueError(f"request id {request_id!r} is already being read")
        stream = self._streams[request_id] = AsyncStream[Item]()
        try:
            yield stream
        finally:
            del self._streams[request_id]

    def put(self, request_id: str, item: Item | Exception) -> None:
        # The reader is looked up now, not at delivery: by then another may have taken the id.
        stream = self._streams.get(request_id)
        if stream is not None:
            with self._lock:
                self._pending.setdefault(stream, []).append(item)

    def flush(self) -> None:
        with self._lock:
            if not self._pending:
                return
            batch, self._pending = self._pending, {}
        try:
            self._loop.call_soon_threadsafe(self._deliver, batch)
        except RuntimeError:  # the loop is closed: the readers are gone with it
            if not self._loop.is_closed():
                raise

    def _deliver(self, batch: dict[AsyncStream[Item], list[Item | Exception]]) -> None:
        for stream, items in batch.items():
            stream._push(items)
