"""Clients that ask for the same few speeches over and over, and compare every sample with what it should be.

For servers in deterministic mode: there the whole body is promised, byte for byte, whatever happens to the engines.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from load_tests.drills.listening import Heard, body, compare, listen, references
from load_tests.drills.report import DrillResult
from load_tests.drills.server import App

_LONG_TEXT = (
    "It was a bright cold day in April, and the clocks were striking thirteen. " * 9
)  # 657 characters: pieces


def speeches(num_frames: int) -> list[dict[str, Any]]:
    """One of each way to be answered."""
    return [
        body(1, num_frames),
        body(2, num_frames, stream_format="sse"),
        body(3, num_frames, stream=False),
        body(4, num_frames, input=_LONG_TEXT),
    ]


class Listeners:
    """So many clients, each with one request at a time; who is refused tries again, and that is no failure."""

    def __init__(self, app: App, result: DrillResult, requests: list[dict[str, Any]]) -> None:
        self._app, self._result, self._requests = app, result, requests
        self._whole: list[Heard] = []
        self._num_parts: Counter[int] = Counter()  # by listener
        self.num_refused = 0
        self.longest_s = 0.0
        self._streaming: set[int] = set()

    @asynccontextmanager
    async def listening(self, count: int) -> AsyncIterator[None]:
        """They begin once the undisturbed references are there, and hear their last request to its end."""
        is_over = asyncio.Event()
        async with self._app.client(timeout_s=600) as client:
            self._whole = await references(client, self._requests)
            tasks = [asyncio.create_task(self._listen(client, one, is_over)) for one in range(count)]
            try:
                yield
            finally:
                is_over.set()
                await asyncio.gather(*tasks)

    async def all_went_on(self, patience_s: float) -> bool:
        """Once each that hears a stream has heard something new; False when one doesn't in time."""
        before = self._num_parts.copy()
        deadline = time.monotonic() + patience_s
        streaming = self._streaming.copy()
        while any(self._num_parts[listener] == before[listener] for listener in streaming):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _listen(self, client: httpx.AsyncClient, listener: int, is_over: asyncio.Event) -> None:
        number = listener
        while not is_over.is_set():
            which = number % len(self._requests)
            (self._streaming.add if self._requests[which]["stream"] else self._streaming.discard)(listener)
            heard = await listen(client, self._requests[which], lambda: self._num_parts.update((listener,)))
            if heard.is_refused:
                self.num_refused += 1
                await asyncio.sleep(0.5)
                continue
            number += 1
            self._result.requests += 1
            self.longest_s = max(self.longest_s, heard.total_s)
            self._result.add(compare(heard.pcm, self._whole[which].pcm), heard)
