"""Whether every deployment answers, known at any moment without asking on the spot.

A question to a busy replica waits behind its requests, so `/health` never asks: one task asks each
deployment all the time, and `/health` reads the last answers. A replica keeps a question for a second
before it answers, so one is nearly always with it, and fails the moment that the replica dies. An error
in an answer counts at once; a death, unless another replica answers soon; silence only when it has
lasted: a long queue is no fault.

Serve alone would tell later: its controller looks at replicas every few seconds, and a question asked
after a death waits in the router, without an error, until there is a new replica.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ray.exceptions import RayActorError

from deployments.handles import Ask, root_cause

PERIOD_S = 1.0
"""How long a replica keeps a question; one that is shutting down waits for it."""
GRACE_S = 1.0
"""After a death, for another replica of the deployment to answer."""
PATIENCE_S = 10.0
_ASK_AGAIN_S = 0.1


@dataclass(slots=True)
class _Answer:
    heard_at: float | None = None
    problem: str | None = "has not answered yet"
    died_at: float | None = None


class Readiness:
    """asks: one caller per deployment's name, of its `ready`; an answer is good unless it raises."""

    def __init__(
        self,
        asks: Mapping[str, Ask],
        *,
        period_s: float = PERIOD_S,
        grace_s: float = GRACE_S,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asks = asks
        self._period_s, self._grace_s, self._patience_s = period_s, grace_s, patience_s
        self._clock = clock
        self._answers = {name: _Answer() for name in asks}

    def problems(self) -> dict[str, str]:
        """What keeps each deployment from being ready, by name; empty when all are."""
        now = self._clock()
        found = {}
        for name, answer in self._answers.items():
            if answer.problem is not None:
                found[name] = answer.problem
            elif answer.died_at is not None and now - answer.died_at > self._grace_s:
                found[name] = "lost its replica"
            elif answer.heard_at is not None and now - answer.heard_at > self._patience_s:
                found[name] = f"silent for {now - answer.heard_at:.0f} s"
        return found

    async def watch(self) -> None:
        """Ask for ever, each deployment at its own pace. Run as a task; cancel to stop."""
        async with asyncio.TaskGroup() as group:
            for name, ask in self._asks.items():
                group.create_task(self._watch_one(name, ask))

    async def _watch_one(self, name: str, ask: Ask) -> None:
        stay_s = 0.0
        while True:
            is_good = await self.ask_once(name, ask, stay_s)
            stay_s = self._period_s if is_good else 0.0
            if not is_good:
                await asyncio.sleep(min(self._period_s, _ASK_AGAIN_S))

    async def ask_once(self, name: str, ask: Ask, stay_s: float = 0.0) -> bool:
        """stay_s: how long the replica keeps the question. Whether there was a good answer."""
        answer = self._answers[name]
        try:
            async with asyncio.timeout(stay_s + self._patience_s):
                await ask(stay_s)
        except TimeoutError:
            return False  # `problems` sees by the clock how long the silence has lasted
        except Exception as error:  # noqa: BLE001 - any error means not ready; it is told, not lost
            cause = root_cause(error)
            if not isinstance(cause, RayActorError):
                answer.problem = type(cause).__name__
            elif answer.died_at is None:
                answer.died_at = self._clock()
            return False
        answer.heard_at, answer.problem, answer.died_at = self._clock(), None, None
        return True
