"""`make soak`: mixed load for some minutes, and nothing grows: memory, open files, slots, pages, rows.

    python -m load_tests.soak [--minutes 10] [--port 28200] [--plot build/soak.png]

Starts the tiny CPU config itself, and ends it. Listeners of every kind speak without a pause, some leave, some are
refused; every few seconds each of the server's processes is looked at. The first third is warm-up; then the medians of
the second and the last third are compared. Exit status 1 when something grew, was held at the end, or failed. The
last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from load_tests.drills.disconnects import ways
from load_tests.drills.flatness import growth
from load_tests.drills.listening import SPEECH, body, compare_lengths, listen, references
from load_tests.drills.processes import name_of, num_open_files, rss_bytes
from load_tests.drills.report import DrillResult, drilling, say
from load_tests.drills.server import TINY, App, DrillServer

_NUM_FRAMES = 40
_NUM_LISTENERS, _NUM_LEAVERS = 4, 2
_BURST_PERIOD_S, _BURST = 20.0, 60  # more at once than are admitted: some are refused
_MEMORY_SHARE, _MEMORY_SLACK_MIB = 0.05, 24.0
_FILES_SHARE, _FILES_SLACK = 0.0, 6.0
_CLIENTS_OF = "ProxyActor"  # whose files are also our own connections: as many as a burst has, or none
_LONG_TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9
_KINDS = (
    (r"ray::ServeReplica:\w+:(\w+)", r"\1"),
    (r"deployments\.engine_child (\w+)", r"\1 engine"),
    (r"ray::(ProxyActor|ServeController)", r"\1"),
    (r"(raylet|gcs_server)", r"\1"),
)

Series = dict[str, list[float]]  # by kind of process


@dataclass(slots=True)
class Samples:
    """One row a look: seconds since the start, per kind of process its memory and files, and what is held."""

    at_s: list[float] = field(default_factory=list)
    memory_mib: Series = field(default_factory=lambda: defaultdict(list))
    files: Series = field(default_factory=lambda: defaultdict(list))
    held: Series = field(default_factory=lambda: defaultdict(list))

    def look(self, server: DrillServer, at_s: float) -> None:
        memory, files = Counter[str](), Counter[str]()
        for process in server.processes:
            kind = kind_of(name_of(process.pid))
            memory[kind] += rss_bytes(process.pid)
            files[kind] += num_open_files(process.pid)
        for series, now, unit in ((self.memory_mib, memory, 1 << 20), (self.files, files, 1)):
            for kind in now.keys() | series.keys():
                series[kind] += [0.0] * (len(self.at_s) - len(series[kind])) + [now[kind] / unit]
        self.at_s.append(at_s)


def kind_of(name: str) -> str:
    """Of a process by its command line: a deployment, a part of Serve or Ray, or "other"."""
    for pattern, kind in _KINDS:
        if found := re.search(pattern, name):
            return found.expand(kind)
    return "other"


async def soak(server: DrillServer, app: App, minutes: float, period_s: float) -> tuple[DrillResult, Samples]:
    with drilling("soak") as result:
        samples, is_over = Samples(), asyncio.Event()
        async with app.client(timeout_s=600) as client:
            requests = [
                body(1, _NUM_FRAMES),
                body(2, _NUM_FRAMES, stream_format="sse"),
                body(3, _NUM_FRAMES, stream=False),
                body(4, 2 * _NUM_FRAMES, input=_LONG_TEXT),
            ]
            whole = [len(heard.pcm) for heard in await references(client, requests)]
            load = [
                *(_listen(client, requests, whole, n, is_over, result) for n in range(_NUM_LISTENERS)),
                *(_leave(app, n, is_over, result) for n in range(_NUM_LEAVERS)),
                _burst(client, is_over, result),
                _batch(client, is_over, result),
            ]
            tasks = [asyncio.create_task(one) for one in load]
            try:
                await _watch(server, app, samples, 60 * minutes, period_s, result)
            finally:
                is_over.set()
                await asyncio.gather(*tasks)
        result.leaks(await app.held_at_rest())
        judge(result, samples)
    return result, samples


def judge(result: DrillResult, samples: Samples) -> None:
    """Growth of every kind of process, as notes; what is not flat, as a problem."""
    rules = (
        ("MiB", samples.memory_mib, _MEMORY_SHARE, _MEMORY_SLACK_MIB),
        ("files", samples.files, _FILES_SHARE, _FILES_SLACK),
    )
    for (unit, series, share, slack), kind in ((rule, kind) for rule in rules for kind in sorted(rule[1])):
        grown = growth(series[kind])
        result.notes[f"{kind} {unit}"] = f"{grown.before:.0f}→{grown.after:.0f}"
        if not grown.is_flat(share, slack + _BURST * (kind == _CLIENTS_OF and unit == "files")):
            result.problem(f"{kind} grew from {grown.before:.1f} to {grown.after:.1f} {unit}")


async def _watch(
    server: DrillServer, app: App, samples: Samples, seconds: float, period_s: float, result: DrillResult
) -> None:
    began = time.monotonic()
    said = began
    while (at_s := time.monotonic() - began) < seconds:
        await asyncio.to_thread(samples.look, server, at_s)
        held = await app.held()
        for name in ("slots", "pages", "rows"):
            samples.held[name].append(float("nan") if held is None else getattr(held, name))
        if time.monotonic() - said > 30:
            said = time.monotonic()
            total = sum(series[-1] for series in samples.memory_mib.values())
            say(
                f"soak: {at_s:.0f} of {seconds:.0f} s, {result.requests} requests, {total:.0f} MiB, held {held}"
            )
        await asyncio.sleep(period_s)


# ---------------------------------------------------------------- load
async def _listen(
    client: httpx.AsyncClient,
    requests: Sequence[Mapping[str, Any]],
    whole: Sequence[int],
    first: int,
    is_over: asyncio.Event,
    result: DrillResult,
) -> None:
    for number in itertools.count(first):
        if is_over.is_set():
            return
        which = number % len(requests)
        heard = await listen(client, requests[which])
        result.requests += 1
        if heard.is_refused:
            await asyncio.sleep(0.5)
        else:
            result.add(compare_lengths(heard, whole[which]), heard)


async def _leave(app: App, seed: int, is_over: asyncio.Event, result: DrillResult) -> None:
    draw, each = random.Random(seed), list(ways().values())
    while not is_over.is_set():
        await draw.choice(each)(app, draw)
        result.requests += 1
        await asyncio.sleep(draw.uniform(0, 0.5))


async def _burst(client: httpx.AsyncClient, is_over: asyncio.Event, result: DrillResult) -> None:
    while not is_over.is_set():
        calls = await asyncio.gather(*(listen(client, body(9, 10)) for _ in range(_BURST)))
        result.requests += len(calls)
        for heard in calls:
            if not heard.is_refused and not (heard.status == 200 and heard.is_whole):
                result.fail(f"neither served nor refused as promised: {heard}")
        try:
            await asyncio.wait_for(is_over.wait(), _BURST_PERIOD_S)
        except TimeoutError:
            continue


async def _batch(client: httpx.AsyncClient, is_over: asyncio.Event, result: DrillResult) -> None:
    items = [{"input": text, "seed": 5, "max_new_tokens": 20} for text in ("One.", "And two.")]
    while not is_over.is_set():
        answer = await client.post(f"{SPEECH}/batch", json={"items": items})
        result.requests += 1
        if answer.status_code != 200 or any(
            item["status"] not in (200, 503) for item in answer.json()["data"]
        ):
            result.fail(f"a batch: {answer.status_code} {answer.text[:200]}")
        await asyncio.sleep(1.0)


# ---------------------------------------------------------------- plot
def plot(samples: Samples, path: Path) -> None:
    """Memory, open files, and what is held, over time; PNG."""
    import matplotlib  # only this needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(9, 10), constrained_layout=True)
    panels = (("memory, MiB", samples.memory_mib), ("open files", samples.files), ("held", samples.held))
    minutes = [at_s / 60 for at_s in samples.at_s]
    for axis, (label, series) in zip(axes, panels, strict=True):
        for name in sorted(series):
            axis.plot(minutes[: len(series[name])], series[name], label=name, linewidth=1)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.axvspan(0, minutes[-1] / 3, color="0.92", zorder=0)  # warm-up, not judged
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small", frameon=False)
    axes[-1].set_xlabel("minutes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


async def run(server: DrillServer, minutes: float, period_s: float) -> tuple[DrillResult, Samples]:
    app = await server.start("tiny_cpu", {"checkpoint": TINY, "first_audio_timeout_s": 240}, name="soak")
    return await soak(server, app, minutes, period_s)


def main() -> int:
    parser = argparse.ArgumentParser(prog="load_tests.soak", description="Mixed load; nothing may grow.")
    parser.add_argument("--minutes", type=float, default=10.0, help="of load, besides start and end")
    parser.add_argument("--period", type=float, default=5.0, help="seconds between two looks")
    parser.add_argument("--port", type=int, default=0, help="of HTTP; by default a free one")
    parser.add_argument("--plot", type=Path, default=Path("build/soak.png"), help="where the PNG goes")
    arguments = parser.parse_args()
    with DrillServer(arguments.port) as server:
        result, samples = asyncio.run(run(server, arguments.minutes, arguments.period))
    plot(samples, arguments.plot)
    for name, value in result.notes.items():
        say(f"{name:24} {value}")
    say(f"{'flat' if result.is_good else 'NOT FLAT, OR BROKEN'}; the plot is {arguments.plot}")
    print(
        json.dumps({"command": "soak", "minutes": arguments.minutes, **result.as_dict()}, ensure_ascii=False)
    )
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
