"""Processes as the kernel shows them: children, memory, open files. Linux, `/proc` alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PPID, _START_TIME = (
    1,
    19,
)  # positions in /proc/PID/stat after the name. Source: proc_pid_stat(5), fields 4 and 22


class ProcessId(NamedTuple):
    """A pid may be given out again, but not with the same start time (clock ticks since boot)."""

    pid: int
    started: int


def descendants(root: int) -> list[ProcessId]:
    """Every living process below `root`, itself left out."""
    parents: dict[int, tuple[int, int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[_PPID]), int(fields[_START_TIME])
    found, frontier = [], {root}
    while frontier:
        children = {pid for pid, (parent, _) in parents.items() if parent in frontier}
        found += [ProcessId(pid, parents[pid][1]) for pid in children]
        frontier = children
    return found


def is_alive(process: ProcessId) -> bool:
    fields = _stat(process.pid)
    return bool(fields) and int(fields[_START_TIME]) == process.started and fields[0] != "Z"


def end_all(processes: Iterable[ProcessId], patience_s: float = 5.0) -> list[ProcessId]:
    """Wait for these to be gone; kill, by pid, those that stay. Returns the killed ones."""
    left = list(processes)
    deadline = time.monotonic() + patience_s
    while (left := [process for process in left if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in left:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return left


def name_of(pid: int) -> str:
    """Its command line; empty when it is gone. Ray's workers change theirs with what they do."""
    try:
        return (
            (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
    except (FileNotFoundError, ProcessLookupError):
        return ""


def rss_bytes(pid: int) -> int:
    """Resident memory without pages shared with a file or another process; 0 when it is gone.

    Shared ones are left out because Ray maps its object store into every worker.
    """
    try:
        _, resident, shared, *_ = (_PROC / str(pid) / "statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (int(resident) - int(shared)) * _PAGE_BYTES


def num_open_files(pid: int) -> int:
    """0 when it is gone."""
    try:
        return len(os.listdir(_PROC / str(pid) / "fd"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _stat(pid: int) -> list[str]:
    """Fields after the name, the state first; empty when it is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
