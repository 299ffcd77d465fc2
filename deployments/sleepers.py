"""Deployments that may have no replica: whether they do, waking them, and how long a request waits for that.

A question to such a deployment would wake it, or keep it awake for ever. So nobody asks it; Serve is asked
about it, once a second. A request wakes everything it will need at once: left to itself the Codec would
start first, and call its Talker only then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from ray import serve
from ray.serve.schema import DeploymentStatus, DeploymentStatusOverview, ReplicaState

from deployments.handles import Ask

logger = logging.getLogger(__name__)

COLD_START_S = 300.0
"""A node from the cloud, its image, the weights, the graphs."""
PERIOD_S = 1.0
PATIENCE_S = 30.0

Statuses = Mapping[str, DeploymentStatusOverview]
AskServe = Callable[[], Awaitable[Statuses]]

_BROKEN = (DeploymentStatus.UNHEALTHY, DeploymentStatus.DEPLOY_FAILED)


async def ask_serve() -> Statuses:
    """The deployments of the app that this replica belongs to, by name."""
    own = serve.get_replica_context().app_name
    status = await asyncio.to_thread(serve.status)
    deployments: Statuses = status.applications[own].deployments
    return deployments


class Sleepers:
    """asks: of each deployment that may sleep, a caller of its `ready`. None may be there: then all is awake."""

    def __init__(
        self,
        asks: Mapping[str, Ask],
        *,
        cold_start_s: float = COLD_START_S,
        ask_serve: AskServe = ask_serve,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asks, self._cold_start_s = asks, cold_start_s
        self._ask_serve, self._period_s, self._clock = ask_serve, period_s, clock
        self._statuses: Statuses = {}
        self._heard_at: float | None = None
        self._asleep_at: dict[str, float] = dict.fromkeys(asks, clock())  # when it was last seen asleep
        self._waking: dict[str, asyncio.Task[None]] = {}

    def problems(self) -> dict[str, str]:
        """As `Readiness.problems`. To be asleep is none."""
        if not self._asks:
            return {}
        if self._heard_at is None:
            return dict.fromkeys(self._asks, "is not known to Serve yet")
        silent_s = self._clock() - self._heard_at
        if silent_s > PATIENCE_S:
            return dict.fromkeys(self._asks, f"Serve has been silent about it for {silent_s:.0f} s")
        found = {}
        for name in self._asks:
            status = self._statuses.get(name)
            if status is None:
                found[name] = "is not known to Serve yet"
            elif status.status in _BROKEN:
                found[name] = f"is {status.status.value} to Serve"
        return found

    def now(self) -> float:
        """On the clock that `extra_s` compares with."""
        return self._clock()

    def wake(self, names: Collection[str]) -> None:
        """Start what of these is asleep; returns at once."""
        for name in names:
            if name in self._asks and name not in self._waking and not self._is_awake(name):
                logger.info("%s is asleep: waking it", name)
                task = asyncio.create_task(self._wake_one(name))
                self._waking[name] = task
                task.add_done_callback(partial(self._woken, name))

    def extra_s(self, names: Collection[str], since: float) -> float:
        """What a request that came at `since` may wait beyond its usual deadline: nothing unless one of these
        has been asleep in its time."""
        margin_s = 2 * self._period_s  # one may have fallen asleep after the last look
        asleep = (self._asleep_at[name] for name in names if name in self._asks)
        return self._cold_start_s if any(at >= since - margin_s for at in asleep) else 0.0

    async def watch(self) -> None:
        """Look at Serve for ever. Run as a task; cancel to stop."""
        while self._asks:
            await self.look()
            await asyncio.sleep(self._period_s)

    async def look(self) -> None:
        try:
            self._statuses = await self._ask_serve()
        except Exception as error:  # noqa: BLE001 - Serve's controller may be starting anew; `problems` counts the silence
            logger.warning("Serve's status isn't known: %r", error)
            return
        self._heard_at = self._clock()
        for name in self._asks:
            if not self._is_awake(name):
                self._asleep_at[name] = self._heard_at

    def close(self) -> None:
        for task in list(self._waking.values()):
            task.cancel()

    def _is_awake(self, name: str) -> bool:
        status = self._statuses.get(name)
        return status is not None and status.replica_states.get(ReplicaState.RUNNING, 0) > 0

    def _woken(self, name: str, _: asyncio.Task[None]) -> None:
        del self._waking[name]

    async def _wake_one(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._cold_start_s):
                await self._asks[name](0.0)
        except Exception as error:  # noqa: BLE001 - the request itself meets the same, and says so
            logger.warning("waking %s: %r", name, error)
