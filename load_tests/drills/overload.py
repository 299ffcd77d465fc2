"""Ten times what the server can serve, for a while: who is let in is served whole, the rest is sent away at once."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import NamedTuple

import httpx

from load_tests.drills.listening import Heard, body, compare_lengths, listen, references
from load_tests.drills.report import DrillResult, drilling, say
from load_tests.drills.server import App

TIMES_CAPACITY = 10
_NUM_FRAMES = 40  # long enough that ten times the capacity is a rate which HTTP alone can take
_SEEDS = range(8)
REQUESTS = [body(seed, _NUM_FRAMES) for seed in _SEEDS]
_HEALTH_PERIOD_S = 0.5


class _Health(NamedTuple):
    statuses: list[int]
    longest_s: float


async def overload(app: App, *, seconds: float, num_slots: int, num_admitted: int) -> DrillResult:
    """num_slots: streams that the Talker speaks at once. num_admitted: these and the queue behind them."""
    with drilling("overload") as result:
        async with app.client(limit=20_000) as client:
            whole = [len(heard.pcm) for heard in await references(client, REQUESTS)]
            per_second = await _capacity(client, num_slots)
            stop = asyncio.Event()
            watching = asyncio.create_task(_watch_health(app, stop))
            rate = TIMES_CAPACITY * per_second
            say(f"overload: {rate:.0f} requests a second for {seconds:.0f} s, {per_second:.1f} can be served")
            calls = await _offer(client, rate, seconds, num_admitted)
            stop.set()
            health = await watching
        served = [heard for heard in calls if heard.status == 200]
        refused = [heard for heard in calls if heard.is_refused]
        result.requests = len(calls)
        for number, heard in enumerate(calls):
            if heard.status == 200:
                result.add(compare_lengths(heard, whole[number % len(whole)]), heard)
            elif heard.status != 200 and not heard.is_refused:
                result.fail(f"neither served nor refused as promised: {heard}")
        if not served or not refused:
            result.problem(f"{len(served)} served and {len(refused)} refused: that was no overload")
        if set(health.statuses) != {200}:
            result.problem(f"/health said {sorted(set(health.statuses))}")
        result.leaks(await app.held_at_rest())
        result.notes = {
            "offered/s": round(rate, 1),
            "served": len(served),
            "refused": len(refused),
            "refusal p50/p99 ms": _quantiles_ms([heard.total_s for heard in refused]),
            "health checks": len(health.statuses),
            "slowest ms": round(1000 * health.longest_s),
        }
    return result


async def _capacity(client: httpx.AsyncClient, num_slots: int) -> float:
    """Requests a second with every slot taken, measured over two full rounds."""
    began = time.perf_counter()
    for _ in range(2):
        await asyncio.gather(*(listen(client, REQUESTS[n % len(REQUESTS)]) for n in range(num_slots)))
    return 2 * num_slots / (time.perf_counter() - began)


async def _offer(client: httpx.AsyncClient, rate: float, seconds: float, num_admitted: int) -> list[Heard]:
    """Open loop: as many at once as fill every place, then Poisson arrivals that wait for nobody."""
    draw, clock = random.Random(0), time.perf_counter
    calls: list[asyncio.Task[Heard]] = []

    def begin() -> None:
        calls.append(asyncio.create_task(listen(client, REQUESTS[len(calls) % len(REQUESTS)])))

    for _ in range(num_admitted):
        begin()
    ends_at, next_at = clock() + seconds, clock()
    while next_at < ends_at:
        await asyncio.sleep(max(0.0, next_at - clock()))
        begin()
        next_at += draw.expovariate(rate)
    return await asyncio.gather(*calls)


async def _watch_health(app: App, stop: asyncio.Event) -> _Health:
    statuses, longest_s = [], 0.0
    async with app.client(timeout_s=30) as client:
        while not stop.is_set():
            began = time.perf_counter()
            statuses.append((await client.get("health")).status_code)
            longest_s = max(longest_s, time.perf_counter() - began)
            await asyncio.sleep(_HEALTH_PERIOD_S)
    return _Health(statuses, longest_s)


def _quantiles_ms(seconds: list[float]) -> str:
    if len(seconds) < 2:
        return "-"
    cuts = statistics.quantiles(seconds, n=100)
    return f"{1000 * cuts[49]:.0f}/{1000 * cuts[98]:.0f}"
