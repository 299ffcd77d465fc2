"""`make bench-serve`: our own server under a closed loop, what it cost, and what stopped it.

    python -m load_tests.bench_serve --checkpoint DIR --out runs/a [--fast] [--seconds 20] [--mps]
        [--config serve_configs/qwen3tts.yaml] [--set codec_dtype=float16] [--set transport.talker_to_codec=value]
        [--set ingress=codec] [--replicas Codec=2,Talker=2] [--env Talker:CUDA_MPS_CLIENT_PRIORITY=1]

Starts the config with another checkpoint and as many slots as the highest concurrency, waits until it is ready,
then sends requests for so many seconds at each concurrency, and ends what it started. Frame limits are drawn
per request, since random weights find no end of their own: `--frames 60-112` is 4.8 to 9 s of audio. Needs
aiohttp, psutil and PyYAML beside what serves. The tables come last; `load_tests.report` draws plots later.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from deployments.mps import MpsUnavailable, mps_daemon
from load_tests.__main__ import (
    add_closed,
    add_common,
    jobs_of,
    key_and_value,
    plain,
    target_of,
    verdict,
    whole_numbers,
)
from load_tests.commands import find_model, measure_closed
from load_tests.engine_counters import EngineCounters
from load_tests.environment import describe_environment
from load_tests.gpu_busy import GpuSampler
from load_tests.process_cpu import find_argument, snapshot
from load_tests.report import write_report
from load_tests.run import Run, say
from load_tests.scenarios import Closed
from load_tests.served import ServedConfig, changed_config
from load_tests.watch import Watch
from load_tests.workers import Pass, Workers

_REPLICAS_WITHIN_S = 300.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    try:
        levels = measure(arguments, list(argv or sys.argv[1:]))
        print(write_report(arguments.out, plots=False), flush=True)
    except (OSError, ValueError, RuntimeError, MpsUnavailable) as error:
        print(f"==> {error}", file=sys.stderr)
        return 1
    print(json.dumps({"out": str(arguments.out), "levels": [brief(level) for level in levels]}))
    return verdict(levels)


def measure(arguments: argparse.Namespace, argv: list[str]) -> list[dict[str, Any]]:
    """The levels. Raises OSError, ValueError, RuntimeError."""
    config = changed_config(
        arguments.config, changes_of(arguments), http_of(arguments), arguments.replicas, arguments.env
    )
    with ExitStack() as stack:
        if arguments.mps:
            stack.enter_context(mps_daemon())
        served = stack.enter_context(ServedConfig(config, arguments.out, fast=arguments.fast))
        workers = stack.enter_context(Workers(arguments.workers))
        gpu = stack.enter_context(GpuSampler())
        if gpu.problem is not None:
            say(f"GPU busy time stays unknown: {gpu.problem}")
        engines = None
        address = find_argument(served.pid, "--gcs-address")
        if arguments.engine_counters and address is not None:
            engines = EngineCounters(address, arguments.out / "engine_counters.log")
            stack.callback(engines.close)
        wait_for_replicas(arguments.replicas, partial(count_replicas, served.pid, engines))
        arguments.url = served.address.url
        target = find_model(target_of(arguments))
        about = {
            "kind": "bench_serve",
            "label": arguments.label or "Ray Serve",
            "engine": target.engine,
            "model": target.model,
            "ready_s": served.ready_s,
            "ray_s": served.ray_s,
            "config": config,
            "mps": arguments.mps,
            "fast": arguments.fast,
            "arguments": {name: plain(value) for name, value in vars(arguments).items() if name != "api_key"},
            "environment": describe_environment(["python", "-m", "load_tests.bench_serve", *argv]),
        }
        watch = Watch({os.getpid(): "bench", **dict.fromkeys(workers.pids, "client")}, gpu, engines)
        run = Run(
            arguments.out,
            arguments.name or "bench_serve",
            about,
            workers,
            ends_by_limit=arguments.ends_by_limit,
        )
        stack.callback(run.close)
        jobs = jobs_of(arguments)
        for concurrency in arguments.concurrency:
            noted = measure_closed(
                arguments, run, Pass(target, Closed(concurrency), jobs), str(concurrency), watch
            )
            say(f"{concurrency} streams: {noted['bottleneck']}")
        run.save()
        return run.levels


def count_replicas(pid: int, engines: EngineCounters | None) -> dict[str, int]:
    """By deployment: those that have answered, and where nobody can be asked for counts the processes."""
    processes = Counter(use.part for use in snapshot(pid).values())
    answered = Counter(name.partition(" ")[0] for name in (engines.read() if engines else {}))
    return {**processes, **answered}


def wait_for_replicas(
    wanted: Mapping[str, int], count: Callable[[], Mapping[str, int]], patience_s: float = _REPLICAS_WITHIN_S
) -> None:
    """The server is ready with the first of each. Raises RuntimeError: one that finds no room never comes."""
    deadline = time.monotonic() + patience_s
    while wanted:
        found = count()
        missing = [name for name, number in wanted.items() if found.get(name, 0) < number]
        if not missing:
            return
        if time.monotonic() > deadline:
            told = ", ".join(f"{found.get(name, 0)} of {wanted[name]} of {name}" for name in missing)
            raise RuntimeError(f"after {patience_s:g} s there are {told}: is there no room for more?")
        time.sleep(1.0)


def changes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the config's args, by dotted name: what was asked for, over what follows from the concurrency."""
    changes: dict[str, Any] = {"talker.num_slots": max(arguments.concurrency)}
    if arguments.checkpoint is not None:
        changes["checkpoint"] = str(arguments.checkpoint)
    return {**changes, **dict(arguments.set)}


def http_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {} if arguments.port is None else {"port": arguments.port}


def replica_counts(text: str) -> dict[str, int]:
    """`NAME=COUNT,NAME=COUNT`."""
    counts = {}
    for part in text.split(","):
        name, _, count = part.partition("=")
        if not name or not count.isdecimal() or int(count) < 1:
            raise argparse.ArgumentTypeError(f"NAME=COUNT expected, from 1 on, got {part!r}")
        counts[name] = int(count)
    return counts


def variable_of_a_deployment(text: str) -> tuple[str, str, str]:
    """`NAME:VARIABLE=VALUE`."""
    name, _, assignment = text.partition(":")
    variable, equals, value = assignment.partition("=")
    if not name or not variable or not equals:
        raise argparse.ArgumentTypeError(f"NAME:VARIABLE=VALUE expected, got {text!r}")
    return name, variable, value


def brief(level: dict[str, Any]) -> dict[str, Any]:
    names = (
        "name",
        "num_ok",
        "num_failed",
        "ttfa_s_p50",
        "ttfa_s_p95",
        "rtf_mean",
        "audio_per_s",
        "bottleneck",
    )
    return {name: level[name] for name in names}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="load_tests.bench_serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common(parser, default_out=Path("runs/bench_serve"))
    add_closed(parser)
    parser.add_argument("--concurrency", type=whole_numbers, default=[1, 8, 32, 64, 128])
    parser.add_argument("--config", type=Path, default=Path("serve_configs/qwen3tts.yaml"))
    parser.add_argument("--checkpoint", type=Path, help="instead of the config's")
    parser.add_argument(
        "--set", type=key_and_value, action="append", default=[], metavar="ARG=VALUE", help="of `args`"
    )
    parser.add_argument(
        "--replicas", type=replica_counts, default={}, metavar="NAME=COUNT,…", help="of deployments"
    )
    parser.add_argument(
        "--env",
        type=variable_of_a_deployment,
        action="append",
        default=[],
        metavar="NAME:VARIABLE=VALUE",
        help="of a deployment's processes",
    )
    parser.add_argument("--port", type=int, help="instead of the config's")
    parser.add_argument("--fast", action="store_true", help="HAProxy in front and one loop per replica")
    parser.add_argument(
        "--mps", action="store_true", help="under NVIDIA's Multi-Process Service, started here"
    )
    parser.add_argument("--no-engine-counters", dest="engine_counters", action="store_false")
    parser.set_defaults(seconds=20.0, repeats=1, frames=(60, 112))
    return parser


if __name__ == "__main__":
    sys.exit(main())
