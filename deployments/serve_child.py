"""`serve run CONFIG`, which also tells the launcher that an application can't start.

    python -m deployments.serve_child CONFIG PIPE

`serve run` itself only logs a failed start and then waits for ever. Here a thread of the same process,
so of the same cluster, looks at Serve's status, and writes what failed, one line, to the pipe. A config that
Serve would answer with a traceback is told in the same way.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import ray
import yaml
from pydantic import ValidationError
from ray import serve
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ServeDeploySchema
from ray.serve.scripts import cli

_PERIOD_S = 1.0
_LONGEST_LINE = 1_000


def main() -> None:
    config, pipe = sys.argv[1], int(sys.argv[2])
    if mistake := find_mistake(Path(config)):
        os.write(pipe, mistake.encode())
        sys.exit(1)
    # A shell that starts the launcher in the background makes it ignore SIGINT, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_watch, args=(pipe, os.getppid()), daemon=True).start()
    cli(["run", config])


def find_mistake(config: Path) -> str | None:
    """The first thing in the config that Serve itself would refuse, by its key, as one line."""
    try:
        ServeDeploySchema.model_validate(yaml.safe_load(config.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        words = f"{config}: {place}: {first['msg']}, got {first['input']!r}"
        return " ".join(words.split())[:_LONGEST_LINE]
    return None


def _watch(pipe: int, launcher: int) -> None:
    """Report the first failed start, then end; end the whole process when the launcher is gone."""
    is_starting = True
    while True:
        time.sleep(_PERIOD_S)
        if os.getppid() != launcher:  # killed, so it could not end us
            os.kill(os.getpid(), signal.SIGINT)
            return
        if is_starting and ray.is_initialized():
            applications = _ask_serve()
            if problem := find_failure(applications):
                os.write(pipe, problem.encode())
            is_up = applications and all(
                application.status == ApplicationStatus.RUNNING for application in applications.values()
            )
            is_starting = not (problem or is_up)  # what happens later is Serve's to mend


def _ask_serve() -> Mapping[str, ApplicationStatusOverview]:
    try:
        applications: Mapping[str, ApplicationStatusOverview] = serve.status().applications
    except Exception as error:  # noqa: BLE001 - Serve may be half up; it is asked again
        sys.stderr.write(f"==> Serve's status isn't known yet: {type(error).__name__}\n")
        return {}
    return applications


def find_failure(applications: Mapping[str, ApplicationStatusOverview]) -> str | None:
    """One line about the first application that can't start."""
    for name, application in applications.items():
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            return f"{name} can't start: {first_cause(application)}"
    return None


def first_cause(application: ApplicationStatusOverview) -> str:
    """Of a failed application: its first failed deployment's error, else its own."""
    for name, deployment in application.deployments.items():
        if deployment.status == "DEPLOY_FAILED" and deployment.message:
            return f"{name}: {last_error(deployment.message)}"
    return last_error(application.message)


def last_error(message: str) -> str:
    """The error that a message's traceback ends with, as one line, without the traceback."""
    lines = message.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    traceback_ends = [
        number
        for number in frames
        if number + 1 < len(lines) and re.match(r"[A-Za-z_][\w.]*(\(|:|$)", lines[number + 1])
    ]
    start = traceback_ends[-1] + 1 if traceback_ends else 0
    text = " ".join(" ".join(lines[start:]).split())
    text = re.sub(r"^(?:\w+\.)+(?=\w+:)", "", text)  # the module of the error's type
    text = re.sub(r" For further information visit \S+", "", text)  # pydantic's
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}…"


if __name__ == "__main__":
    main()
