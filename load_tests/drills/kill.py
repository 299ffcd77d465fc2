"""Codec and Talker replicas killed with SIGKILL under their streams: no stream loses or repeats a sample."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from typing import Any

from load_tests.drills.report import DrillResult, drilling, say
from load_tests.drills.server import App
from load_tests.drills.under_load import Listeners, speeches

_NUM_LISTENERS = 4
_NUM_FRAMES = 100
_IN_USE = {"Talker": "num_running", "Codec": "num_rows_in_use"}
_REPLACED_WITHIN_S = 300.0
_GO_ON_WITHIN_S = 300.0  # as the app's resume_timeout_s, and more: a machine may be busy


async def kill(app: App, *, count: int, seed: int = 0) -> DrillResult:
    """count: of kills, Talkers and Codecs in turn, each of a replica that speaks, and never of the last one.

    Between two of them every listener hears something new: a stream that is killed again while it is still being
    taken up has no promise but its timeout.
    """
    with drilling("kill") as result:
        draw, killed = random.Random(seed), Counter[str]()
        num_hit = 0
        listeners = Listeners(app, result, speeches(_NUM_FRAMES))
        async with listeners.listening(_NUM_LISTENERS):
            for number in range(count):
                deployment = ("Talker", "Codec")[number % 2]
                victim = await _speaking_replica(app, deployment, draw)
                process = draw.choice(("pid", "engine_pid"))  # one and the same unless engines have processes
                os.kill(victim[process], signal.SIGKILL)  # of this drill's own server, by its id
                killed[deployment] += 1
                num_hit += victim[_IN_USE[deployment]]
                if not await listeners.all_went_on(_GO_ON_WITHIN_S):
                    result.problem(
                        f"a stream stands still {_GO_ON_WITHIN_S:.0f} s after the death of a {deployment}"
                    )
                result.notes = {
                    **{f"{name}s killed": killed[name] for name in sorted(killed)},
                    "streams hit": num_hit,
                    "longest s": round(listeners.longest_s, 1),
                }
                if (number + 1) % 10 == 0 or number + 1 == count:
                    say(f"kill: {number + 1} of {count}, {num_hit} streams hit, {result.failed} failed")
        result.leaks(await app.held_at_rest())
    return result


async def _speaking_replica(app: App, deployment: str, draw: random.Random) -> dict[str, Any]:
    """Stats of a replica with streams, once there is another of its kind that would go on. Raises TimeoutError."""
    deadline = time.monotonic() + _REPLACED_WITHIN_S
    while time.monotonic() < deadline:
        replicas = await app.stats(deployment)
        speaking = [stats for stats in replicas if stats[_IN_USE[deployment]]]
        if len(replicas) > 1 and speaking:
            return draw.choice(speaking)
        await asyncio.sleep(draw.uniform(0.05, 0.3))
    raise TimeoutError(f"no second {deployment} within {_REPLACED_WITHIN_S:.0f} s")
