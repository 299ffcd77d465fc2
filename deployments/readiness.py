"""Whether every deployment answers, known at any moment without asking on the spot.

A question to a busy replica waits behind its requests, so `/health` never asks: one task asks each
deployment once a second, and `/health` reads the last answers. An error in an answer counts at
once, silence only when it has lasted: a long queue is no fault.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deployments.handles import Ask, root_cause

PERIOD_S = 1.0
PATIENCE_S = 10.0


@dataclass(slots=True)
class _Answer:
    heard_at: float | None = None
    problem: str | None = "has not answered yet"


class Readiness:
    """asks: one caller per deployment's name; an answer is good unless it raises."""

    def __init__(
        self,
        asks: Mapping[str, Ask],
        *,
        period_s: float = PERIOD_S,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asks = asks
        self._period_s, self._patience_s, self._clock = period_s, patience_s, clock
        self._answers = {name: _Answer() for name in asks}

    def problems(self) -> dict[str, str]:
        """What keeps each deployment from being ready, by name; empty when all are."""
        now = self._clock()
        found = {}
        for name, answer in self._answers.items():
            if answer.problem is not None:
                found[name] = answer.problem
            elif answer.heard_at is not None and now - answer.heard_at > self._patience_s:
                found[name] = f"silent for {now - answer.heard_at:.0f} s"
        return found

    async def watch(self) -> None:
        """Ask for ever, each deployment at its own pace. Run as a task; cancel to stop."""
        async with asyncio.TaskGroup() as group:
            for name, ask in self._asks.items():
                group.create_task(self._watch_one(name, ask))

    async def _watch_one(self, name: str, ask: Ask) -> None:
        while True:
            await self.ask_once(name, ask)
            await asyncio.sleep(self._period_s)

    async def ask_once(self, name: str, ask: Ask) -> None:
        answer = self._answers[name]
        try:
            async with asyncio.timeout(self._patience_s):
                await ask()
        except TimeoutError:
            return  # `problems` sees by the clock how long the silence has lasted
        except Exception as error:  # noqa: BLE001 - any error means not ready; it is told, not lost
            answer.problem = f"{type(root_cause(error)).__name__}"
        else:
            answer.heard_at, answer.problem = self._clock(), None
