"""`make chaos`: every drill against a server of its own, on the tiny CPU configs, and one table of what they found.

    python -m load_tests.chaos [--scale 0.05] [--only kill,overload] [--port 28200]

Starts Ray and Serve itself, on loopback, and ends them, whatever happens. Exit status 1 when a promise
was broken: a failed request, a lost or repeated sample, a slot, page or row that did not come back,
or what a drill's own lines say. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from load_tests.drills import slow_readers
from load_tests.drills.disconnects import disconnects
from load_tests.drills.full_disk import full_disk
from load_tests.drills.half_open import half_open
from load_tests.drills.kill import kill
from load_tests.drills.overload import overload
from load_tests.drills.redeploy import redeploy
from load_tests.drills.report import BEGUN, DrillResult, table
from load_tests.drills.server import TINY, App, DrillServer
from load_tests.drills.stall import stall

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
    return await slow_readers.slow_readers(server, app, count=4, num_others=scale.count(40, least=4))


async def _half_open(server: DrillServer, app: App, scale: Scale) -> DrillResult:
    return await half_open(server, app, count=scale.count(400, least=16))


async def _kill(_: DrillServer, app: App, scale: Scale) -> DrillResult:
    return await kill(app, count=scale.count(100, least=2))


async def _redeploy(server: DrillServer, app: App, scale: Scale) -> DrillResult:
    changes = [{"first_audio_timeout_s": _PATIENCE_S + number + 1} for number in range(scale.count(2))]
    return await redeploy(server, app, changes)


async def _stall(_: DrillServer, app: App, __: Scale) -> DrillResult:
    return await stall(app)


PLAIN: dict[str, Drill] = {
    "overload": _overload,
    "slow readers": _slow_readers,
    "half-open": _half_open,
    "disconnects": _disconnects,
}
"""On serve_configs/tiny_cpu.yaml with random weights, one replica of each deployment."""
SPARED: dict[str, Drill] = {"kill": _kill, "redeploy": _redeploy, "stalled step": _stall}
"""In deterministic mode, where a body is the same to the byte, and with replicas to spare."""
FULL_DISK = "full disk"

_PATIENCE_S = 240.0  # of the server, for what these drills don't ask: how fast a shared machine is
_SPARED_ARGS: dict[str, Any] = {
    "checkpoint": TINY,
    "deterministic": True,
    "talker": {"num_slots": 4, "max_queued": 16, "max_positions": 512},
    "first_audio_timeout_s": _PATIENCE_S,
    "resume_timeout_s": _PATIENCE_S,
}
_SPARED_REPLICAS = {"Talker": 3, "Codec": 3, "Ingress": 2}


async def run(server: DrillServer, wanted: set[str], scale: Scale) -> None:
    """The drills, each on the app it needs; one app at a time. Their results are in BEGUN."""
    if chosen := [drill for name, drill in PLAIN.items() if name in wanted]:
        args = {"checkpoint": TINY, **slow_readers.APP_ARGS, "first_audio_timeout_s": _PATIENCE_S}
        app = await server.start("tiny_cpu", args, name="plain")
        for drill in chosen:
            await drill(server, app, scale)
        await server.stop(app)
    if chosen := [drill for name, drill in SPARED.items() if name in wanted]:
        app = await server.start(
            "tiny_cpu",
            _SPARED_ARGS,
            name="spared",
            num_replicas=_SPARED_REPLICAS,
            import_path="load_tests.drills.stalling:build_app",
        )
        for drill in chosen:
            await drill(server, app, scale)
        await server.stop(app)
    if FULL_DISK in wanted:
        with tempfile.TemporaryDirectory() as folder:
            app = await server.start("tiny_base", {"voices": {"folder": folder}}, name="clone")
            await full_disk(app, Path(folder), count=scale.count(20, least=2))
            await server.stop(app)


def main() -> int:
    names = [*PLAIN, *SPARED, FULL_DISK]
    parser = argparse.ArgumentParser(prog="load_tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="share of each drill's counts and seconds")
    parser.add_argument("--only", default=",".join(names), help="drills, separated by commas")
    parser.add_argument("--port", type=int, default=0, help="of HTTP; by default a free one")
    arguments = parser.parse_args()
    wanted = set(arguments.only.split(","))
    if unknown := wanted - set(names):
        parser.error(f"no such drill: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    began = time.monotonic()
    problem = None
    try:
        with DrillServer(arguments.port) as server:
            asyncio.run(run(server, wanted, Scale(arguments.scale)))
    except KeyboardInterrupt:
        problem = "interrupted"
    except Exception as error:  # noqa: BLE001 - told, also by the exit status; what was found until then is shown
        traceback.print_exc()
        problem = repr(error)
    print(f"\n{table(BEGUN)}\n")
    is_good = problem is None and all(result.is_good for result in BEGUN)
    report = {
        "command": "chaos",
        "scale": arguments.scale,
        "is_good": is_good,
        "problem": problem,
        "seconds": round(time.monotonic() - began, 1),
        "drills": [result.as_dict() for result in BEGUN],
    }
    print(json.dumps(report))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
