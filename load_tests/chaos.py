"""`make chaos`: every drill against a server of its own, on the tiny CPU configs, and one table of what they found.

    python -m load_tests.chaos [--scale 0.05] [--only kill,overload] [--port 28200] [--seed 0]

Starts Ray and Serve itself, on loopback, and ends them, whatever happens. Exit status 1 when a promise
was broken: a failed request, a lost or repeated sample, a slot, page or row that did not come back,
or what a drill's own lines say. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

from load_tests.drills.disconnects import disconnects
from load_tests.drills.half_open import half_open
from load_tests.drills.overload import overload
from load_tests.drills.report import DrillResult, table
from load_tests.drills.server import App, DrillServer
from load_tests.drills import slow_readers

PLAIN_SLOTS, PLAIN_QUEUE = 8, 32  # of serve_configs/tiny_cpu.yaml


class Scale:
    """How much of each drill: 1 is what is promised, less is for a quick look."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def count(self, whole: int, least: int = 1) -> int:
        return max(least, round(self._factor * whole))

    def seconds(self, whole: float, least: float) -> float:
        return max(least, self._factor * whole)


Drill = Callable[[DrillServer, App, Scale], Awaitable[DrillResult]]


async def _overload(_: DrillServer, app: App, scale: Scale) -> DrillResult:
    return await overload(
        app,
        seconds=scale.seconds(60, least=5),
        num_slots=PLAIN_SLOTS,
        num_admitted=PLAIN_SLOTS + PLAIN_QUEUE,
    )


async def _disconnects(_: DrillServer, app: App, scale: Scale) -> DrillResult:
    return await disconnects(app, count=scale.count(1_000, least=20))


async def _slow_readers(server: DrillServer, app: App, scale: Scale) -> DrillResult:
    return await slow_readers.slow_readers(
        server, app, count=scale.count(8, least=4), num_others=scale.count(40, least=4)
    )


async def _half_open(server: DrillServer, app: App, scale: Scale) -> DrillResult:
    return await half_open(server, app, count=scale.count(400, least=16))


PLAIN: dict[str, Drill] = {
    "overload": _overload,
    "slow readers": _slow_readers,
    "half-open": _half_open,
    "disconnects": _disconnects,
}


async def run(server: DrillServer, wanted: set[str], scale: Scale) -> list[DrillResult]:
    results = []
    if chosen := {name: drill for name, drill in PLAIN.items() if name in wanted}:
        app = await server.start(
            "tiny_cpu", {**slow_readers.APP_ARGS, "first_audio_timeout_s": 240}, name="plain"
        )
        results += [await drill(server, app, scale) for drill in chosen.values()]
        await server.stop(app)
    return results


def main() -> int:
    names = [*PLAIN]
    parser = argparse.ArgumentParser(prog="load_tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="share of each drill's counts and seconds")
    parser.add_argument("--only", default=",".join(names), help="drills, separated by commas")
    parser.add_argument("--port", type=int, default=0, help="of HTTP; by default a free one")
    arguments = parser.parse_args()
    wanted = set(arguments.only.split(","))
    if unknown := wanted - set(names):
        parser.error(f"no such drill: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    began = time.monotonic()
    with DrillServer(arguments.port) as server:
        results = asyncio.run(run(server, wanted, Scale(arguments.scale)))
    print(f"\n{table(results)}\n")
    is_good = all(result.is_good for result in results)
    report = {
        "command": "chaos",
        "scale": arguments.scale,
        "is_good": is_good,
        "seconds": round(time.monotonic() - began, 1),
        "drills": [result.as_dict() for result in results],
    }
    print(json.dumps(report))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
