"""How busy the GPUs are: `nvidia-smi`'s own sampling, read from a child process.

Its utilisation is the share of time in which at least one kernel ran, over its last sampling period.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from types import TracebackType

_PERIOD_MS = 250
_FIELDS = ("utilization.gpu", "memory.used", "power.draw", "clocks.sm")


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Means over a span, of the busiest GPU; memory is the most seen. busy: 0 to 1."""

    busy: float
    memory_mib: float
    power_w: float
    sm_mhz: float


class GpuSampler:
    """Samples while its `with` lasts; nothing where there is no nvidia-smi."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, int, tuple[float, ...]]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> GpuSampler:
        program = shutil.which("nvidia-smi")
        if program is not None:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--query-gpu=index,{','.join(_FIELDS)}",
                    "--format=csv,noheader,nounits",
                    f"-lms={_PERIOD_MS}",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sample = parse_sample(line)
            if sample is not None:
                self._samples.append((time.perf_counter(), *sample))

    def between(self, began: float, ended: float) -> GpuUse | None:
        """On `perf_counter`'s clock; None where nothing was sampled."""
        by_gpu: dict[int, list[tuple[float, ...]]] = {}
        for at, index, values in list(self._samples):
            if began <= at <= ended:
                by_gpu.setdefault(index, []).append(values)
        uses = [
            GpuUse(
                busy=statistics.fmean(value[0] for value in values) / 100,
                memory_mib=max(value[1] for value in values),
                power_w=statistics.fmean(value[2] for value in values),
                sm_mhz=statistics.fmean(value[3] for value in values),
            )
            for values in by_gpu.values()
        ]
        return max(uses, key=lambda use: use.busy, default=None)


def parse_sample(line: str) -> tuple[int, tuple[float, ...]] | None:
    """The GPU's number and its values; a value that the machine does not tell is NaN. None for another line."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 1 + len(_FIELDS) or not parts[0].isdigit():
        return None
    return int(parts[0]), tuple(_number(part) for part in parts[1:])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # [N/A]
        return float("nan")
