"""What the machine did during a pass: CPU by part, GPU, and the engines' counters."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from load_tests.bottleneck import engine_figures, name_bottleneck
from load_tests.engine_counters import Counters, EngineCounters, growth
from load_tests.gpu_busy import GpuSampler
from load_tests.process_cpu import Snapshot, by_part, difference, snapshot
from load_tests.run import say
from load_tests.workers import PassResult

NUM_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Look:
    """One look at everything. at: on `perf_counter`'s clock. machine_cpu_s: of all processes, others' too."""

    at: float
    processes: Snapshot
    counters: Counters
    machine_cpu_s: float


class Watch:
    """Call with None before a pass and with its result after it; what it returns joins the pass's numbers.

    Everything is a descendant of this process. parts: the names of processes that are not the server's.
    """

    def __init__(self, parts: Mapping[int, str], gpu: GpuSampler, engines: EngineCounters | None) -> None:
        self._parts, self._gpu, self._engines = dict(parts), gpu, engines
        self._before: Look | None = None

    def __call__(self, result: PassResult | None) -> dict[str, Any]:
        now, before = self._look(), self._before
        self._before = now
        if result is None or before is None:
            return {}
        wall_s = now.at - before.at
        used = by_part(difference(before.processes, now.processes), wall_s)
        gpu = self._gpu.between(before.at, now.at)
        resources = {
            "wall_s": wall_s,
            "audio_s": sum(record.audio_s for record in result.records),
            "cpus": NUM_CPUS,
            "cores_used": sum(use.cpu_s for use in used) / wall_s,
            "machine_cores_used": (now.machine_cpu_s - before.machine_cpu_s) / wall_s,
            "parts": [dataclasses.asdict(use) for use in used],
            "gpu": None if gpu is None else dataclasses.asdict(gpu),
            "engines": engine_figures(growth(before.counters, now.counters), wall_s),
        }
        return {"resources": resources, "bottleneck": name_bottleneck(resources)}

    def _look(self) -> Look:
        counters = self._read_engines()
        times = psutil.cpu_times()
        waiting = times.idle + getattr(times, "iowait", 0.0)
        return Look(time.perf_counter(), snapshot(os.getpid(), self._parts), counters, sum(times) - waiting)

    def _read_engines(self) -> Counters:
        """Nothing once it has failed: everything else can still be measured."""
        if self._engines is None:
            return {}
        try:
            return self._engines.read()
        except RuntimeError as error:
            say(f"goes on without: {error}")
            self._engines = None
            return {}
