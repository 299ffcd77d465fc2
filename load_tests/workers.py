"""Client processes: several, so that no single event loop delays the times it takes.

Each process sends its share of a scenario and returns its records, with what it cost itself: CPU seconds,
and how late its event loop was (a timer of 5 ms; the p99 of its lateness is the error of a measured TTFA).
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
import wave
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from load_tests.adapters import BYTES_PER_SAMPLE, SAMPLE_RATE_HZ, SpeechJob
from load_tests.client import Leave, SpeechClient, Target
from load_tests.jobs import JobMaker
from load_tests.measurement import ClientCost, percentile
from load_tests.records import SpeechRecord
from load_tests.scenarios import Scenario, Share

_START_S = 240.0
_TIMER_S = 0.005
_PROGRESS_S = 1.0
COUNTED = ("ok", "refused", "failed", "left")


@dataclass(frozen=True, slots=True)
class Pass:
    """One scenario against one server. wav_folder: where each answer's audio goes, by its number."""

    target: Target
    scenario: Scenario
    jobs: JobMaker
    first_number: int = 0
    wav_folder: Path | None = None


@dataclass(frozen=True, slots=True)
class PassResult:
    """began: on the clock of the records' `sent_at`."""

    records: list[SpeechRecord]
    clients: list[ClientCost]
    began: float


class Workers:
    """`count` client processes for as long as the `with` lasts."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"workers must be 1 or more, got {count}")
        context = multiprocessing.get_context("spawn")
        self._counts: Any = context.Array("q", len(COUNTED))
        self._next: Any = context.Value("q")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for number in range(count):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve_passes, args=(there, self._counts, self._next, number, count), daemon=True
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def __enter__(self) -> Workers:
        for connection in self._connections:
            if not connection.poll(_START_S):
                raise TimeoutError(f"a client process did not start within {_START_S:g} s")
            connection.recv()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()  # its process ends at the end of its input
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.terminate()
                process.join()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def run(self, one_pass: Pass, show: Callable[[dict[str, int]], None] = lambda _: None) -> PassResult:
        """Send the pass from all processes. show: gets the counts by outcome so far, about once a second.

        Raises RuntimeError when a client process failed.
        """
        with self._counts.get_lock():
            self._counts[:] = [0] * len(COUNTED)
        self._next.value = 0
        began = time.perf_counter()
        for connection in self._connections:
            connection.send(one_pass)
        results: list[tuple[list[SpeechRecord], ClientCost]] = []
        waiting = list(self._connections)
        while waiting:
            for ready in wait(waiting, _PROGRESS_S):
                assert isinstance(ready, Connection)
                waiting.remove(ready)
                results.append(_received(ready))
            show(dict(zip(COUNTED, self._counts, strict=True)))
        records = sorted((record for part, _ in results for record in part), key=lambda record: record.number)
        return PassResult(records, [cost for _, cost in results], began)


def _received(connection: Connection) -> tuple[list[SpeechRecord], ClientCost]:
    try:
        answer = connection.recv()
    except EOFError as error:
        raise RuntimeError("a client process died") from error
    if isinstance(answer, str):
        raise RuntimeError(f"a client process failed: {answer}")
    records, cost = answer
    return records, cost


# ---------------------------------------------------------------- in the process
def _serve_passes(
    connection: Connection, counts: Any, next_number: Any, worker: int, num_workers: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which ends this
    connection.send(os.getpid())
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            one_pass: Pass = connection.recv()
            share = Share(partial(_take, next_number), worker, num_workers, one_pass.first_number)
            try:
                answer: Any = _run(_send_pass(one_pass, share, counts))
            except (OSError, ValueError, RuntimeError) as error:
                answer = f"{type(error).__name__}: {error}"
            connection.send(answer)


def _take(next_number: Any) -> int:
    with next_number.get_lock():
        number = int(next_number.value)
        next_number.value += 1
    return number


def _run(coroutine: Any) -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


async def _send_pass(one_pass: Pass, share: Share, counts: Any) -> tuple[list[SpeechRecord], ClientCost]:
    records: list[SpeechRecord] = []
    lateness: list[float] = []
    cpu, wall = time.process_time(), time.perf_counter()
    timer = asyncio.create_task(_measure_lateness(lateness))
    async with SpeechClient(one_pass.target) as client:

        async def speak(job: SpeechJob, leave: Leave | None = None, tag: str = "") -> SpeechRecord:
            keep = bytearray() if one_pass.wav_folder is not None else None
            record = await client.speak(job, leave, tag, keep)
            records.append(record)
            with counts.get_lock():
                counts[COUNTED.index(record.outcome)] += 1
            if one_pass.wav_folder is not None and keep and record.outcome == "ok":
                _write_wav(one_pass.wav_folder / f"{job.number:05d}.wav", keep)
            return record

        await one_pass.scenario.run(speak, one_pass.jobs, share)
    timer.cancel()
    cost = ClientCost(
        cpu_s=time.process_time() - cpu,
        wall_s=time.perf_counter() - wall,
        loop_late_p99_s=percentile(lateness, 0.99) if lateness else 0.0,
    )
    return records, cost


async def _measure_lateness(lateness: list[float]) -> None:
    while True:
        due = time.perf_counter() + _TIMER_S
        await asyncio.sleep(_TIMER_S)
        lateness.append(time.perf_counter() - due)


def _write_wav(file: Path, pcm: bytearray) -> None:
    with wave.open(str(file), "wb") as writer:
        writer.setparams((1, BYTES_PER_SAMPLE, SAMPLE_RATE_HZ, 0, "NONE", ""))
        writer.writeframes(pcm)
