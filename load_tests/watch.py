"""What the machine did during a pass: CPU by part, GPU, and the engines' counters."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

from load_tests.bottleneck import engine_figures, name_bottleneck
from load_tests.engine_counters import Counters, EngineCounters, growth
from load_tests.gpu_busy import GpuSampler
from load_tests.process_cpu import Snapshot, by_part, difference, snapshot
from load_tests.workers import PassResult

NUM_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Watch:
    """Call with None before a pass and with its result after it; what it returns joins the pass's numbers.

    Everything is a descendant of this process. parts: the names of processes that are not the server's.
    """

    def __init__(self, parts: Mapping[int, str], gpu: GpuSampler, engines: EngineCounters | None) -> None:
        self._parts, self._gpu, self._engines = dict(parts), gpu, engines
        self._before: tuple[float, Snapshot, Counters] | None = None

    def __call__(self, result: PassResult | None) -> dict[str, Any]:
        counters = self._engines.read() if self._engines else {}
        now = time.perf_counter(), snapshot(os.getpid(), self._parts), counters
        before, self._before = self._before, now
        if result is None or before is None:
            return {}
        wall_s = now[0] - before[0]
        used = by_part(difference(before[1], now[1]), wall_s)
        gpu = self._gpu.between(before[0], now[0])
        resources = {
            "wall_s": wall_s,
            "audio_s": sum(record.audio_s for record in result.records),
            "cpus": NUM_CPUS,
            "cores_used": sum(use.cpu_s for use in used) / wall_s,
            "parts": [dataclasses.asdict(use) for use in used],
            "gpu": None if gpu is None else dataclasses.asdict(gpu),
            "engines": engine_figures(growth(before[2], now[2]), wall_s),
        }
        return {"resources": resources, "bottleneck": name_bottleneck(resources)}
