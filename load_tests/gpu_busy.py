"""How busy the GPUs are, sampled through NVML in a thread.

Utilisation is the share of time in which at least one kernel ran, over NVML's last sampling period (1/6 to 1 s).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

_PERIOD_S = 0.2

Sample = tuple[float, float, float, float]
"""Utilisation 0 to 1, memory MiB, power W, SM clock MHz; NaN for what this machine does not tell."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Means over a span, of the busiest GPU; memory is the most seen. busy: 0 to 1."""

    busy: float
    memory_mib: float
    power_w: float
    sm_mhz: float


class GpuSampler:
    """Samples while its `with` lasts; nothing where `nvidia-ml-py` or a GPU is missing: `problem` says why."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, Sample]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.problem: str | None = None

    def __enter__(self) -> GpuSampler:
        try:
            import pynvml
        except ImportError:
            self.problem = "nvidia-ml-py is not installed"
            return self
        try:
            pynvml.nvmlInit()
            devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            self.problem = str(error)
            return self
        self._thread = threading.Thread(target=self._sample, args=(pynvml, devices), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self, nvml: Any, devices: list[Any]) -> None:
        while not self._stop.wait(_PERIOD_S):
            for index, device in enumerate(devices):
                self._samples.append((time.perf_counter(), index, read_sample(nvml, device)))

    def between(self, began: float, ended: float) -> GpuUse | None:
        """On `perf_counter`'s clock; None where nothing was sampled."""
        by_gpu: dict[int, list[Sample]] = {}
        for at, index, sample in list(self._samples):
            if began <= at <= ended:
                by_gpu.setdefault(index, []).append(sample)
        uses = [
            GpuUse(
                busy=statistics.fmean(sample[0] for sample in samples),
                memory_mib=max(sample[1] for sample in samples),
                power_w=statistics.fmean(sample[2] for sample in samples),
                sm_mhz=statistics.fmean(sample[3] for sample in samples),
            )
            for samples in by_gpu.values()
        ]
        return max(uses, key=lambda use: use.busy, default=None)


def read_sample(nvml: Any, device: Any) -> Sample:
    def told(read: Callable[[], float]) -> float:
        try:
            return read()
        except nvml.NVMLError:
            return float("nan")

    return (
        told(lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100),
        told(lambda: nvml.nvmlDeviceGetMemoryInfo(device).used / 2**20),
        told(lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000),
        told(lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)),
    )
