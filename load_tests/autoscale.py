"""The autoscaling drill: nothing, one request, load, less load, nothing; and what the cluster had at each moment.

    python -m load_tests.autoscale            three levels of load, some minutes
    python -m load_tests.autoscale --quick    one level, as the tests run it

A fake cluster of one head and worker nodes of one GPU each, all of them processes of this machine; Ray's
autoscaler, Serve's, our policy and the tiny checkpoint are real. Every request is heard to its end and its
samples are counted. Prints a line for each second, a table of each phase, and one JSON object; exits with 1
when a request failed or the cluster did not grow and shrink.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import httpx
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from deployments.scaling_args import AutoscalingArgs
from load_tests.drills.listening import BYTES_PER_FRAME, Heard, body, listen
from load_tests.drills.ports import free_port
from load_tests.drills.ray_start import ON_A_BUSY_MACHINE
from load_tests.drills.report import aligned, say
from load_tests.fake_cluster import FakeCluster

CONFIG = Path(__file__).parents[1] / "serve_configs" / "tiny_autoscaling.yaml"
DEPLOYMENTS = ("Talker", "Codec")
HEAD = {"CPU": 4, "head": 1}
WORKER = {"CPU": 4, "GPU": 1}
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # as the Makefile sets it for this process, whose Ray looks when it is imported
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    **ON_A_BUSY_MACHINE,
}
"""For all that this process starts, where there is no other value."""
PATIENCE_S = 240.0
"""For any one thing to happen: a machine that is busy with something else is no failure."""
SHORT, LONG = 40, 400
"""Frames of a request of the load, and of those that should outlive a scaling down."""
LONG_SEEDS = (1, 3)
"""With these the tiny checkpoint doesn't end a sentence before."""


@dataclass(frozen=True, slots=True)
class Moment:
    """replicas, starting, stopping: by deployment; the last still end their streams. nodes: beside the head."""

    second: float
    phase: str
    in_flight: int
    replicas: tuple[int, ...]
    starting: tuple[int, ...]
    stopping: tuple[int, ...]
    nodes: int
    done: int
    refused: int
    failed: int


@dataclass(slots=True)
class Drill:
    """What has happened so far. done_of: requests heard to their end, by the phase that sent them."""

    phase: str = "start"
    in_flight: int = 0
    done: int = 0
    refused: int = 0
    done_of: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    timeline: list[Moment] = field(default_factory=list)
    first_s: dict[str, float] = field(default_factory=dict)

    async def speak(self, client: httpx.AsyncClient, seed: int, num_frames: int = SHORT) -> Heard:
        """One request, heard to its end; the tiny checkpoint babbles until it is stopped, so every sample counts."""
        phase = self.phase
        self.in_flight += 1
        try:
            heard = await listen(client, body(seed, num_frames))
        finally:
            self.in_flight -= 1
        self.first_s.setdefault(phase, heard.first_s)
        if heard.is_refused:
            self.refused += 1
            return heard
        expected = num_frames * BYTES_PER_FRAME
        if heard.status != 200 or not heard.is_whole or len(heard.pcm) != expected:
            self.problems.append(f"{phase}, seed {seed}: {heard}, expected {expected:,}")
            say(f"FAILED: {self.problems[-1]}")
        self.done += 1
        self.done_of[phase] += 1
        return heard

    def look(self, began: float, cluster: FakeCluster) -> Moment:
        second, phase, in_flight = round(time.monotonic() - began, 1), self.phase, self.in_flight
        # Only then the cluster, which may be long in answering: the phase is not to be one that began meanwhile.
        deployments = serve.status().applications["qwen3tts"].deployments
        states = [deployments[name].replica_states for name in DEPLOYMENTS]
        moment = Moment(
            second=second,
            phase=phase,
            in_flight=in_flight,
            replicas=tuple(state.get("RUNNING", 0) for state in states),
            starting=tuple(state.get("STARTING", 0) for state in states),
            stopping=tuple(state.get("STOPPING", 0) for state in states),
            nodes=cluster.num_workers,
            done=self.done,
            refused=self.refused,
            failed=len(self.problems),
        )
        self.timeline.append(moment)
        return moment


async def drill(
    cluster: FakeCluster, url: str, levels: Sequence[int], hold_s: float, wakes_again: bool
) -> Drill:
    """levels: requests in flight, one after the other. hold_s: each, once the replicas it wants are there."""
    it = Drill()
    async with (
        httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=500)) as client,
        _watching(it, cluster) as look,
    ):
        await _until(it, "it is asleep at first", lambda now: not any(now.replicas) and not now.nodes)
        it.phase = "wake"
        await look()
        await it.speak(client, seed=1)
        async with _load(it, client) as want:
            for level in levels:
                it.phase = f"load {level}"
                wanted = _talkers_for(level)
                want(range(1, level + 1), SHORT)
                await _until(it, f"{level} streams get {wanted} Talkers", _has_talkers(wanted))
                await asyncio.sleep(hold_s)
            it.phase = "shrink"
            want(LONG_SEEDS, LONG)  # at once, so that no Talker goes before there are streams to end
            await _until(it, "one Talker is left to the last streams", lambda now: now.replicas[0] == 1)
            await _until(it, "the other has ended its own and is gone", lambda now: not any(now.stopping))
        it.phase = "rest"
        await _until(it, "it sleeps again", lambda now: not any(now.replicas) and not now.nodes)
        if wakes_again:
            it.phase = "wake again"
            await it.speak(client, seed=1)
    return it


def _talkers_for(level: int) -> int:
    """What the policy wants for so many streams."""
    args: dict[str, Any] = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["applications"][0]["args"]
    scaling = AutoscalingArgs.model_validate(args["autoscaling"]).talker
    assert scaling is not None, "the config is there for this"
    num_slots: int = args["talker"]["num_slots"]
    return min(scaling.max_replicas, math.ceil(level / (num_slots * scaling.max_use) - 1e-9))


def _has_talkers(count: int) -> Callable[[Moment], bool]:
    return lambda now: now.replicas[0] == count and now.nodes >= count


@asynccontextmanager
async def _watching(it: Drill, cluster: FakeCluster) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A moment each second, and one more whenever what this yields is called."""
    began = time.monotonic()

    async def look() -> None:
        say(_line(await asyncio.to_thread(it.look, began, cluster)))

    async def watch() -> None:
        while True:
            await look()
            await asyncio.sleep(1.0)

    watching = asyncio.create_task(watch())
    try:
        yield look
    finally:
        watching.cancel()
        await look()


@asynccontextmanager
async def _load(it: Drill, client: httpx.AsyncClient) -> AsyncIterator[Callable[[Sequence[int], int], None]]:
    """Clients, each with one request after the other. What this yields says which there are from now on, by their
    seeds, and how many frames they ask for; a request that runs is heard to its end, the last ones before this ends."""
    num_frames_of: dict[int, int] = {}
    clients: dict[int, asyncio.Task[None]] = {}

    async def speak_on(seed: int) -> None:
        while seed in num_frames_of:
            heard = await it.speak(client, seed, num_frames_of[seed])
            if heard.status != 200:
                await asyncio.sleep(float(heard.headers.get("retry-after", 1)))

    def want(seeds: Sequence[int], num_frames: int) -> None:
        num_frames_of.clear()
        num_frames_of.update(dict.fromkeys(seeds, num_frames))
        for seed in seeds:
            if seed not in clients or clients[seed].done():
                clients[seed] = asyncio.create_task(speak_on(seed))

    try:
        yield want
    finally:
        num_frames_of.clear()
        await asyncio.gather(*clients.values())


async def _until(it: Drill, promise: str, is_true: Callable[[Moment], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (it.timeline and is_true(it.timeline[-1])):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{promise}: not after {PATIENCE_S:.0f} s: {it.timeline[-1:]}")
        await asyncio.sleep(0.1)
    say(f"{promise}: yes")


@contextmanager
def serving(cluster: FakeCluster) -> Iterator[str]:
    """The config on this cluster; its URL."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["http_options"]["port"] = free_port()
    schema = ServeDeploySchema.model_validate(config)
    serve.start(proxy_location=config["proxy_location"], http_options=config["http_options"])
    try:
        _get_global_client().deploy_apps(schema, _blocking=False)
        _wait_until_running()
        yield f"http://127.0.0.1:{config['http_options']['port']}/"
    finally:
        serve.shutdown()


def _wait_until_running() -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        app = serve.status().applications.get("qwen3tts")
        if app is not None and app.status == "RUNNING":
            return
        if (app is not None and app.status == "DEPLOY_FAILED") or time.monotonic() > deadline:
            raise RuntimeError(f"the app does not start: {app}")
        time.sleep(0.3)


# ---------------------------------------------------------------- what is shown
_LINE = "{:>6} s  {:<10} {:>9}  {:>6} {:>5}  {:>8} {:>8} {:>5}  {:>5} {:>7} {:>6}"


def _head() -> str:
    names = (*DEPLOYMENTS, "starting", "stopping", "nodes", "done", "refused", "failed")
    return _LINE.format("", "phase", "in flight", *names)


def _line(now: Moment) -> str:
    numbers = (
        *now.replicas,
        sum(now.starting),
        sum(now.stopping),
        now.nodes,
        now.done,
        now.refused,
        now.failed,
    )
    return _LINE.format(now.second, now.phase, now.in_flight, *numbers)


def phases_of(timeline: Sequence[Moment]) -> list[dict[str, Any]]:
    """One row a phase, from its first moment to the next one's: the most in flight, replicas and nodes as they
    changed, and what was done in it."""
    begins = [n for n, now in enumerate(timeline) if not n or now.phase != timeline[n - 1].phase]
    rows = []
    for first, last in pairwise([*begins, len(timeline) - 1]):
        own = timeline[first : last + 1]
        changes = {
            deployment: _changes(moment.replicas[number] for moment in own)
            for number, deployment in enumerate(DEPLOYMENTS)
        }
        rows.append(
            {
                "phase": own[0].phase,
                "seconds": round(own[-1].second - own[0].second),
                "most in flight": max(moment.in_flight for moment in timeline[first : max(first + 1, last)]),
                **changes,
                "nodes": _changes(moment.nodes for moment in own),
                "done": own[-1].done - own[0].done,
                "refused": own[-1].refused - own[0].refused,
                "failed": own[-1].failed - own[0].failed,
            }
        )
    return rows


def _changes(values: Iterable[int]) -> str:
    return " > ".join(str(value) for value, _ in groupby(values))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a phase."""
    return aligned([list(rows[0]), *([str(value) for value in row.values()] for row in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="load_tests.autoscale")
    parser.add_argument("--quick", action="store_true", help="one level of load, nothing is held")
    parser.add_argument("--levels", type=int, nargs="+", default=[2, 6, 14, 6], help="requests in flight")
    parser.add_argument("--hold-s", type=float, default=15.0, help="each level, once its replicas are there")
    arguments = parser.parse_args()
    levels, hold_s = ([6], 0.0) if arguments.quick else (arguments.levels, arguments.hold_s)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    began = time.monotonic()
    with FakeCluster(HEAD, {"one_gpu": (WORKER, 4)}, 4) as cluster, serving(cluster) as url:
        say(f"an app without a replica of {' or '.join(DEPLOYMENTS)}, after {time.monotonic() - began:.0f} s")
        say(_head())
        it = asyncio.run(drill(cluster, url, levels, hold_s, wakes_again=not arguments.quick))
    rows = phases_of(it.timeline)
    print(table(rows))
    result = {
        "requests": it.done, "failed": len(it.problems), "refused": it.refused, "done_of": it.done_of,
        "most": dict(zip(DEPLOYMENTS, map(max, zip(*(m.replicas for m in it.timeline), strict=True)), strict=True)),
        "most_nodes": max(moment.nodes for moment in it.timeline),
        "cold_start_s": round(it.first_s["wake"], 1), "seconds": round(time.monotonic() - began),
        "phases": rows, "timeline": [asdict(moment) for moment in it.timeline],
    }  # fmt: skip
    print(json.dumps(result))
    return int(bool(it.problems))


if __name__ == "__main__":
    sys.exit(main())
