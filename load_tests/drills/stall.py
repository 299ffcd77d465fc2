"""A decode step that hangs: for a moment, which its streams outlast; for good, and others take them over."""

from __future__ import annotations

import asyncio
import time

from load_tests.drills.report import DrillResult, drilling, say
from load_tests.drills.server import App
from load_tests.drills.under_load import Listeners, speeches

_NUM_LISTENERS = 4
_NUM_FRAMES = 150
_MOMENT_S = 3.0
_FOR_GOOD_S = 3_600.0
_REPLACED_WITHIN_S = 300.0


async def stall(app: App) -> DrillResult:
    """app: with two Talkers at least, of stalling.py's kind."""
    with drilling("stalled step") as result:
        listeners = Listeners(app, result, speeches(_NUM_FRAMES))
        async with listeners.listening(_NUM_LISTENERS):
            num_hit = await _stall_one_that_speaks(app, _MOMENT_S)
            await asyncio.sleep(2 * _MOMENT_S)
            before = set(app.pids("Talker"))
            num_lost = await _stall_one_that_speaks(app, _FOR_GOOD_S)
            say("stalled step: one hangs for good; now Serve has to notice")
            replaced_s = await _until_replaced(app, before)
        if replaced_s is None:
            result.problem(f"a Talker that hangs was not replaced within {_REPLACED_WITHIN_S:.0f} s")
        result.leaks(await app.held_at_rest())
        result.notes = {
            "streams hit": num_hit + num_lost,
            "replaced after s": replaced_s and round(replaced_s, 1),
            "longest s": round(listeners.longest_s, 1),
        }
    return result


async def _stall_one_that_speaks(app: App, seconds: float) -> int:
    """Streams that it hit: at least one."""
    while True:
        num_hit: int = await app.ask("Talker", "stall", seconds)
        if num_hit:
            return num_hit
        await asyncio.sleep(0.2)


async def _until_replaced(app: App, before: set[int]) -> float | None:
    began = time.monotonic()
    while time.monotonic() - began < _REPLACED_WITHIN_S:
        now = set(await asyncio.to_thread(app.pids, "Talker"))
        if len(now) == len(before) and now != before:
            return time.monotonic() - began
        await asyncio.sleep(0.5)
    return None
