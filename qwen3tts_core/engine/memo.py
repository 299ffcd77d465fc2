"""Remembers what was dear to compute, up to a number of bytes, and computes nothing twice at once.

Threads meet here: whoever asks first for a key computes it, the others wait for that one result.
An error goes to everyone who waited and isn't remembered. Knows nothing of what the values are.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class MemoStats:
    """num_hits: answered from memory. num_joined: waited for another's computation. num_runs: computations
    begun, failed ones included. num_evicted: forgotten for want of room."""

    num_hits: int = 0
    num_joined: int = 0
    num_runs: int = 0
    num_evicted: int = 0
    num_entries: int = 0
    num_bytes: int = 0


class Memo(Generic[V]):
    """Values by key; the least recently used are forgotten beyond `max_bytes`.

    size_of: bytes that a value counts for. A value larger than `max_bytes` is handed out, not kept.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[V], int]) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be 0 (off) or more, got {max_bytes}")
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, V] = OrderedDict()
        self._running: dict[str, Future[V]] = {}
        self._stats = MemoStats()

    def get(self, key: str, compute: Callable[[], V]) -> V:
        """The value of `key`: remembered, awaited, or computed on this thread. Raises what `compute` raises."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                self._count(num_hits=1)
                return self._kept[key]
            running = self._running.get(key)
            if running is not None:
                self._count(num_joined=1)
            else:
                mine = self._running[key] = Future()
                self._count(num_runs=1)
        if running is not None:
            return running.result()
        return self._run(key, compute, mine)

    def _run(self, key: str, compute: Callable[[], V], mine: Future[V]) -> V:
        try:
            value = compute()
        except BaseException as error:
            with self._lock:
                del self._running[key]
            mine.set_exception(error)
            raise
        with self._lock:  # kept and no longer running in one step, so that nobody computes in between
            del self._running[key]
            self._keep(key, value)
        mine.set_result(value)
        return value

    def _keep(self, key: str, value: V) -> None:
        size = self._size_of(value)
        if size > self._max_bytes:
            return
        self._kept[key] = value
        self._count(num_bytes=size, num_entries=1)
        while self._stats.num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._count(num_bytes=-self._size_of(oldest), num_entries=-1, num_evicted=1)

    def _count(self, **changes: int) -> None:
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + n for name, n in changes.items()}
        )

    def stats(self) -> MemoStats:
        return self._stats
