"""Who asks when: the share of one client process in each kind of load.

A scenario is spread over processes, each of which holds its part of the concurrency; they take their requests'
numbers from one counter, so that all clients end together.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from load_tests.adapters import SpeechJob
from load_tests.arrivals import poisson_arrivals
from load_tests.client import Leave
from load_tests.jobs import JobMaker
from load_tests.records import SpeechRecord

LEAVER, STEADY, WARM_UP = "leaver", "steady", "warm-up"
"""Tags of records."""


class Speak(Protocol):
    """`SpeechClient.speak`, with the record noted as well."""

    def __call__(
        self, job: SpeechJob, leave: Leave | None = None, tag: str = ""
    ) -> Awaitable[SpeechRecord]: ...


@dataclass(frozen=True, slots=True)
class Share:
    """Part `worker` of `num_workers`. take: the next number of the pass, 0 first, over all parts."""

    take: Callable[[], int]
    worker: int = 0
    num_workers: int = 1
    first_number: int = 0

    def of(self, count: int) -> int:
        """How many of `count` fall to this part."""
        return len(range(self.worker, count, self.num_workers))

    def numbers(self, count: int | None) -> Iterator[int]:
        """The pass's numbers as they are taken; without end for None."""
        while True:
            number = self.take()
            if count is not None and number >= count:
                return
            yield self.first_number + number


class Scenario(Protocol):
    @property
    def num_requests(self) -> int | None:
        """Of all parts; None where time ends it."""

    async def run(self, speak: Speak, jobs: JobMaker, share: Share) -> None: ...


@dataclass(frozen=True, slots=True)
class Closed:
    """`concurrency` clients, each of which asks again as soon as it has its answer.

    Ends after `num_requests`, or when each client has had an answer after `seconds`; both: whichever is first.
    A refusal is an answer, after which that client waits a drawn time up to `pause_s`; within that time they begin, too.
    """

    concurrency: int
    num_requests: int | None = None
    seconds: float | None = None
    pause_s: float = 0.0
    tag: str = ""

    async def run(self, speak: Speak, jobs: JobMaker, share: Share) -> None:
        numbers = share.numbers(self.num_requests)
        until = None if self.seconds is None else time.perf_counter() + self.seconds
        generator = random.Random(share.worker)

        async def one() -> None:
            if self.pause_s:
                await asyncio.sleep(self.pause_s * generator.random())
            for number in numbers:
                record = await speak(jobs.job(number), tag=self.tag)
                if record.outcome == "refused" and self.pause_s:
                    await asyncio.sleep(self.pause_s * generator.uniform(0.5, 1.0))
                if until is not None and time.perf_counter() >= until:
                    return

        await asyncio.gather(*(one() for _ in range(share.of(self.concurrency))))


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests at Poisson times, whether or not earlier ones are answered.

    Those of the first `warm_up_s` are tagged so; the `window_s` after that is what is measured.
    """

    rate_per_s: float
    warm_up_s: float
    window_s: float
    seed: int = 0

    @property
    def arrivals(self) -> list[float]:
        return poisson_arrivals(self.rate_per_s, self.warm_up_s + self.window_s, self.seed)

    @property
    def num_requests(self) -> int | None:
        return len(self.arrivals)

    async def run(self, speak: Speak, jobs: JobMaker, share: Share) -> None:
        began = time.perf_counter()
        arrivals = self.arrivals

        async def one(number: int, at_s: float) -> None:
            await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
            await speak(jobs.job(number), tag=WARM_UP if at_s < self.warm_up_s else "")

        mine = list(enumerate(arrivals))[share.worker :: share.num_workers]
        await asyncio.gather(*(one(share.first_number + number, at_s) for number, at_s in mine))


@dataclass(frozen=True, slots=True)
class Players:
    """`concurrency` listeners, each of whom hears an answer to its end before asking for the next.

    They begin at drawn times within the first `spread_s`, and ask for nothing new after `seconds`.
    """

    concurrency: int
    seconds: float
    spread_s: float = 5.0
    num_requests: int | None = None

    async def run(self, speak: Speak, jobs: JobMaker, share: Share) -> None:
        numbers = share.numbers(self.num_requests)
        until = time.perf_counter() + self.seconds
        generator = random.Random(share.worker)

        async def one() -> None:
            await asyncio.sleep(generator.uniform(0.0, min(self.spread_s, self.seconds)))
            for number in numbers:
                record = await speak(jobs.job(number))
                ends_at = record.sent_at + (record.ttfa_s or 0.0) + record.audio_s + record.underrun_s
                await asyncio.sleep(max(0.0, ends_at - time.perf_counter()) or (record.outcome != "ok") * 0.1)
                if time.perf_counter() >= until:
                    return

        await asyncio.gather(*(one() for _ in range(share.of(self.concurrency))))


@dataclass(frozen=True, slots=True)
class Storm:
    """Clients that go away, beside steady ones that listen to the end.

    Of the leavers a third goes before its first audio, a third right after it, a third some chunks later.
    """

    leavers: int
    steady: int
    seconds: float
    num_requests: int | None = None

    async def run(self, speak: Speak, jobs: JobMaker, share: Share) -> None:
        generator = random.Random(share.worker)
        until = time.perf_counter() + self.seconds
        numbers = share.numbers(None)

        async def one(draw: Callable[[random.Random], Leave | None], tag: str) -> None:
            for number in numbers:
                record = await speak(jobs.job(number), draw(generator), tag)
                if record.outcome == "refused":
                    await asyncio.sleep(generator.uniform(0.02, 0.1))
                if time.perf_counter() >= until:
                    return

        await asyncio.gather(
            *(one(draw_leave, LEAVER) for _ in range(share.of(self.leavers))),
            *(one(lambda _: None, STEADY) for _ in range(share.of(self.steady))),
        )


def draw_leave(generator: random.Random) -> Leave:
    """When one leaver goes."""
    return generator.choice(
        [
            Leave(after_s=generator.uniform(0.0, 0.02)),
            Leave(after_reads=1),
            Leave(after_reads=generator.randint(2, 6)),
        ]
    )
