"""An MPS daemon of our own: kernels of the processes that share a GPU run side by side.

Without it a GPU gives whole time slices to one process at a time, so a Codec step waits for a
Talker step to end. The daemon belongs to this user, has its own folders, and ends with the server.
Source: CUDA's Multi-Process Service guide.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAM = "nvidia-cuda-mps-control"
PIPE_FOLDER, LOG_FOLDER = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_START_S, _QUIT_S = 10.0, 15.0


class MpsUnavailable(Exception):
    """Why there is no daemon, in one line."""


@contextmanager
def mps_daemon() -> Iterator[None]:
    """Run a daemon for the processes started inside; they find it through the environment.

    One that the environment names already is used as it is, and left alone. Raises MpsUnavailable.
    """
    if PIPE_FOLDER in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="qwen3tts-mps-", ignore_cleanup_errors=True) as folder:
        pipes, logs = Path(folder, "pipe"), Path(folder, "log")
        pipes.mkdir()
        logs.mkdir()
        os.environ[PIPE_FOLDER], os.environ[LOG_FOLDER] = str(pipes), str(logs)
        try:
            daemon = _start(logs)
            try:
                yield
            finally:
                _stop(daemon)
        finally:
            del os.environ[PIPE_FOLDER], os.environ[LOG_FOLDER]


def _start(logs: Path) -> subprocess.Popen[bytes]:
    """In the foreground of a session of its own: a terminal's Ctrl-C must not end it before its clients."""
    try:
        daemon = subprocess.Popen(
            [_PROGRAM, "-f"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        raise MpsUnavailable(
            f"{_PROGRAM} can't be run ({error.strerror}); it comes with the GPU's driver"
        ) from None
    until = time.monotonic() + _START_S
    while daemon.poll() is None:
        if _ask("get_server_list"):
            return daemon
        if time.monotonic() > until:
            _stop(daemon)
            raise MpsUnavailable(f"{_PROGRAM} doesn't answer after {_START_S:.0f} s; {_last_words(logs)}")
        time.sleep(0.1)
    raise MpsUnavailable(f"{_PROGRAM} ended with status {daemon.returncode}; {_last_words(logs)}")


def _stop(daemon: subprocess.Popen[bytes]) -> None:
    """Ask it to quit, which also ends the server process of its own; then less politely."""
    _ask("quit")
    for end in (daemon.terminate, daemon.kill):
        try:
            daemon.wait(_QUIT_S)
            return
        except subprocess.TimeoutExpired:
            end()
    daemon.wait()


def _ask(command: str) -> bool:
    """Whether a daemon took the command."""
    try:
        asked = subprocess.run(
            [_PROGRAM], input=f"{command}\n".encode(), capture_output=True, timeout=_QUIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


def _last_words(logs: Path) -> str:
    lines = [
        line for file in sorted(logs.glob("*.log")) for line in file.read_text(errors="replace").splitlines()
    ]
    return f"its log ends with: {lines[-1]}" if lines else "it has written no log"
