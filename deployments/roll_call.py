"""What an ingress tells engines of its streams: which it waits for, and which it has given up.

A stream's consumer may die, and a cancellation may get lost; engines free what was given up, and what nobody has named
for long (`leases.py`). Calls go to every replica of a deployment, since nobody knows which has a stream, and they are
few: one per period, and some more when clients leave. They are best effort, too: a stream that can't be named goes on
elsewhere at worst, one that can't be given up is freed when its lease is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from deployments.handles import Tell

logger = logging.getLogger(__name__)

_TOGETHER_S = 0.1
"""What is given up within it is told in one call."""
_PATIENCE_S = 5.0


class RollCall:
    """The streams of one model in one ingress replica; on one event loop.

    tells: callers of `roll_call` on the deployments that make them. period_s: between two calls.
    """

    def __init__(self, tells: Sequence[Tell] = (), period_s: float = 12.0) -> None:
        self._tells, self._period_s = tells, period_s
        self._wanted: set[str] = set()
        self._given_up: list[str] = []
        self._has_news = asyncio.Event()

    def want(self, request_id: str) -> None:
        self._wanted.add(request_id)

    def ended(self, request_id: str) -> None:
        """It is whole: nobody holds anything for it."""
        self._wanted.discard(request_id)

    def give_up(self, request_id: str) -> None:
        """Whatever still runs for it runs in vain."""
        self._wanted.discard(request_id)
        self._given_up.append(request_id)
        self._has_news.set()

    async def run(self) -> None:
        """Call for ever. Run as a task; cancel to stop."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period_s):
                    await self._has_news.wait()
                    await asyncio.sleep(_TOGETHER_S)
            await self._call()

    async def _call(self) -> None:
        self._has_news.clear()
        wanted, given_up, self._given_up = list(self._wanted), self._given_up, []
        if wanted or given_up:
            await asyncio.gather(*(self._call_one(tell, wanted, given_up) for tell in self._tells))

    async def _call_one(self, tell: Tell, wanted: list[str], given_up: list[str]) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await tell(wanted, given_up)
        except Exception as error:  # noqa: BLE001 - replicas come and go; what it costs is told above
            logger.info(
                "roll call of %d streams: %s: %s", len(wanted) + len(given_up), type(error).__name__, error
            )
