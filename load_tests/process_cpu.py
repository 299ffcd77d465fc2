"""CPU seconds of a Ray Serve start by the part that each process plays.

A snapshot walks the launcher's descendants; two of them give what each part used in between. Busy threads
tell more than a process: in Python a process whose threads add up to one core waits for its own lock (GIL).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

_REPLICA = re.compile(r"ray::ServeReplica:[^:]*:([^\s:.#]+)")
_ENGINE = re.compile(r"deployments\.engine_child (\w+)")
_PARTS = (  # by a word of the command line, first match wins
    ("ray::ServeController", "controller"),
    ("ray::ProxyActor", "proxy"),
    ("ray::HAProxyManager", "proxy"),
    ("haproxy", "haproxy"),
    ("ray::IDLE", "idle worker"),
    ("ray::", "other actor"),
    ("gcs_server", "gcs"),
    ("agent", "ray agents"),
    ("log_monitor", "ray agents"),
    ("dashboard", "ray agents"),
    ("monitor.py", "ray agents"),
    ("raylet", "raylet"),
    ("serve_child", "driver"),
    ("deployments.launch", "driver"),
    ("engine_counters", "counter reader"),
)


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """CPU seconds so far, or within a span: of one process, and of each of its threads by id."""

    part: str
    cpu_s: float
    threads: Mapping[int, float]


Snapshot = dict[int, ProcessUse]
"""By process id."""


def part_of(command_line: str) -> str:
    """`Talker`, `Talker engine` where that has a process of its own, `raylet` and so on; the program's name for what
    is none of Ray's."""
    if replica := _REPLICA.search(command_line):
        return replica.group(1)
    if engine := _ENGINE.search(command_line):
        return f"{engine.group(1)} engine"
    for word, part in _PARTS:
        if word in command_line:
            return part
    program = command_line.split(" ")[0].rpartition("/")[2]
    return program or "?"


def snapshot(root: int, parts: Mapping[int, str] | None = None) -> Snapshot:
    """The process `root` and all its descendants. parts: names for processes that are known otherwise.

    Raises psutil.NoSuchProcess when `root` has ended.
    """
    parent = psutil.Process(root)
    found: Snapshot = {}
    for process in [parent, *parent.children(recursive=True)]:
        try:
            with process.oneshot():
                times = process.cpu_times()
                threads = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
                name = (parts or {}).get(process.pid) or part_of(
                    " ".join(process.cmdline()) or process.name()
                )
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue  # ended while we looked
        found[process.pid] = ProcessUse(name, times.user + times.system, threads)
    return found


def find_argument(root: int, name: str) -> str | None:
    """The value of `name=value` in the command line of any descendant of `root`."""
    for process in psutil.Process(root).children(recursive=True):
        try:
            arguments = process.cmdline()
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
        for argument in arguments:
            if argument.startswith(f"{name}="):
                return argument.partition("=")[2]
    return None


def difference(before: Snapshot, after: Snapshot) -> list[ProcessUse]:
    """What each process used in between; one that is new since `before` counts from its start."""
    used = []
    for pid, now in after.items():
        then = before.get(pid, ProcessUse(now.part, 0.0, {}))
        threads = {thread: cpu_s - then.threads.get(thread, 0.0) for thread, cpu_s in now.threads.items()}
        used.append(ProcessUse(now.part, now.cpu_s - then.cpu_s, threads))
    return used


@dataclass(frozen=True, slots=True)
class PartUse:
    """One part of the system in a span. busiest_*: cores, CPU seconds per second, of its busiest process and thread."""

    part: str
    cpu_s: float
    num_processes: int
    busiest_process: float
    busiest_thread: float


def by_part(used: Iterable[ProcessUse], wall_s: float) -> list[PartUse]:
    """The most expensive first."""
    parts: dict[str, list[ProcessUse]] = {}
    for process in used:
        parts.setdefault(process.part, []).append(process)
    uses = [
        PartUse(
            part,
            sum(process.cpu_s for process in processes),
            len(processes),
            max(process.cpu_s for process in processes) / wall_s,
            max((cpu_s for process in processes for cpu_s in process.threads.values()), default=0.0) / wall_s,
        )
        for part, processes in parts.items()
    ]
    return sorted(uses, key=lambda use: use.cpu_s, reverse=True)
