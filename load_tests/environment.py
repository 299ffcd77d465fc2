"""Where numbers come from: commit, versions, machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PACKAGES = (
    "ray",
    "torch",
    "triton",
    "flashinfer-python",
    "fastapi",
    "uvicorn",
    "uvloop",
    "aiohttp",
    "numpy",
)
_ROOT = Path(__file__).parents[1]
_GPU_FIELDS = "name,driver_version,memory.total"


def describe_environment(argv: list[str]) -> dict[str, Any]:
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(argv),
        "commit": os.environ.get("COMMIT") or _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "gpus": _lines("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"),
        "flags": {name: value for name, value in sorted(os.environ.items()) if name.startswith("RAY_SERVE_")},
    }


def _commit() -> str | None:
    """With `+changes` where the tree differs; None outside a repository."""
    head = _lines("git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD")
    if not head:
        return None
    changed = _lines("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")
    return head[0] + ("+changes" if changed else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(*command: str) -> list[str]:
    """What a command prints; nothing where it is missing or fails."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return ended.stdout.strip().splitlines()
