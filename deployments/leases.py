"""Which of a replica's streams somebody still waits for: the reaper of the others.

Ray's cancellation is best effort, and a consumer that is killed says nothing at all. So ingresses name the streams
that they wait for, again and again, and those that they have given up, once (`roll_call.py`). A stream that was given
up ends at once; one that nobody has named for `lease_s`, soon after. Whoever should read it after all gets a
StreamCancelled and goes on elsewhere: a replica that is being replaced is called no more, while its streams run on.
Source: ray#52533 and ray#39703, calls that run on after they were cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from qwen3tts_core.errors import StreamCancelled

logger = logging.getLogger(__name__)

LEASE_S = 60.0
SHORTEST_LEASE_S = 2.0
"""A fifth of it is how often each ingress names its streams: a busy event loop is late by tenths of a second."""
_REMEMBERED = 4096
"""Streams given up that may still be on their way here: a call may wait in a queue while its end overtakes it."""


class Leases:
    """Of one replica; on one event loop.

    lease_s: 0 ends no stream for not being named. end: frees what a stream holds, and tells its reader.
    """

    def __init__(
        self, lease_s: float, end: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lease_s, self._end, self._clock = lease_s, end, clock
        self._named_at: dict[str, float] = {}
        self._given_up: OrderedDict[str, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self.num_reaped = 0

    @contextmanager
    def stream(self, request_id: str) -> Iterator[None]:
        """One stream, for as long as this replica makes it. Raises StreamCancelled for one given up before."""
        if request_id in self._given_up:
            raise StreamCancelled
        self._named_at[request_id] = self._clock()
        self._look_again()
        try:
            yield
        finally:
            del self._named_at[request_id]

    def renew(self, request_ids: Iterable[str]) -> None:
        """Somebody waits for these; some may be other replicas'."""
        now = self._clock()
        self._named_at.update({name: now for name in request_ids if name in self._named_at})

    def give_up(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these any more; some may be other replicas', or may have ended."""
        for request_id in request_ids:
            self._given_up[request_id] = None
            if request_id in self._named_at:
                self._end(request_id)
        while len(self._given_up) > _REMEMBERED:
            self._given_up.popitem(last=False)

    def reap(self) -> None:
        """End the streams that nobody has named for too long."""
        oldest = self._clock() - self._lease_s
        for request_id in [name for name, named_at in self._named_at.items() if named_at < oldest]:
            logger.warning("request %s: nobody has asked for it for %g s; freed", request_id, self._lease_s)
            self.num_reaped += 1
            self._end(request_id)

    def _look_again(self) -> None:
        """In a while; a timer, and only while there are streams, so that nothing keeps a replica from going."""
        if self._timer is None and self._lease_s:
            self._timer = asyncio.get_running_loop().call_later(self._lease_s / 4, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.reap()
        if self._named_at:
            self._look_again()
