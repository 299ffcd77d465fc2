"""A server of our own for the time of a measurement: `deployments.launch` with some args changed.

It is a process group of its own that ends by its process id; what it prints goes into a file.
"""

from __future__ import annotations

import http.client
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from deployments.launch import Address, find_problem, open_here, read_address
from load_tests.run import say

_SAY_AGAIN_AFTER_S = 10.0
_ENDINGS = ((signal.SIGINT, 90.0), (signal.SIGTERM, 20.0))
_LAST_LINES = 15
_RAY_IS_UP = b"Submitted deploy config"
"""What `serve run` of Ray 2.60 says when it has handed over the app."""


def changed_config(
    config: Path,
    changes: Mapping[str, Any],
    http: Mapping[str, Any],
    replicas: Mapping[str, int] | None = None,
    environment: Iterable[tuple[str, str, str]] = (),
) -> dict[str, Any]:
    """The Serve config with `changes` in its only application's args, by dotted name, and in `http_options`.

    replicas: how many, by the names of deployments; a fraction of a GPU is shared out among them, so that they stay on
    the device that one would be on. environment: (deployment, variable, value), for the processes of its replicas.
    What the args leave without an Ingress loses its entry, which Serve would refuse.
    Raises ValueError when it holds several applications, a name leads into what is no mapping, or names no deployment
    of the config.
    """
    content = yaml.safe_load(config.read_text(encoding="utf-8"))
    applications = content.get("applications") or []
    if len(applications) != 1:
        raise ValueError(f"{config}: one application expected, got {len(applications)}")
    for name, value in changes.items():
        section = applications[0].setdefault("args", {})
        *path, last = name.split(".")
        for key in path:
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                raise ValueError(f"{name}: {key} is no mapping in {config}")
        section[last] = value
    deployments = applications[0].get("deployments", [])
    if applications[0].get("args", {}).get("ingress") == "codec":
        deployments[:] = [deployment for deployment in deployments if deployment["name"] != "Ingress"]
    by_name = {deployment["name"]: deployment for deployment in deployments}
    named = {*(replicas or {}), *(name for name, *_ in environment)}
    if unknown := sorted(named - set(by_name)):
        raise ValueError(f"{config} has no deployment {', '.join(unknown)}, only {', '.join(by_name)}")
    for name, variable, value in environment:
        options = by_name[name].setdefault("ray_actor_options", {})
        options.setdefault("runtime_env", {}).setdefault("env_vars", {})[variable] = value
    for name, count in (replicas or {}).items():
        by_name[name]["num_replicas"] = count
        options = by_name[name].get("ray_actor_options", {})
        if 0 < (fraction := options.get("num_gpus", 0)) < 1:
            options["num_gpus"] = math.floor(1e4 * fraction / count) / 1e4  # Ray takes four places
    content.setdefault("http_options", {}).update(http)
    return dict(content)


class ServedConfig:
    """Starts with `with`, is ready when that returns, ends with it.

    ready_s: how long that took. ray_s: of that, until Ray and Serve were up and the app was handed over to them.
    """

    def __init__(self, content: Mapping[str, Any], folder: Path, *, fast: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "serve_config.yaml"
        self._config.write_text(yaml.safe_dump(dict(content), sort_keys=False), encoding="utf-8")
        self._log = folder / "server.log"
        self._flags = ["--fast"] if fast else []
        self.address: Address = read_address(self._config)
        self.ready_s = 0.0
        self.ray_s: float | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> ServedConfig:
        """Raises RuntimeError when the port is taken or the start fails, with the server's last lines."""
        problem = find_problem(self.address)
        if problem is not None:
            raise RuntimeError(problem)
        command = [sys.executable, "-m", "deployments.launch", *self._flags, str(self._config)]
        say(f"starting {' '.join(command[1:])}; its output is in {self._log}")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        say("ending the server")
        self._end()

    def _wait_until_ready(self) -> None:
        began = said = time.monotonic()
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"the server did not start:\n{self.last_lines()}")
            now = time.monotonic()
            if self.ray_s is None and _RAY_IS_UP in self._log.read_bytes():
                self.ray_s = now - began
            if now - said >= _SAY_AGAIN_AFTER_S:
                said = now
                say(f"still starting after {now - began:.0f} s: {self.last_lines(1)[:160]}")
            time.sleep(0.1)
        self.ready_s = time.monotonic() - began
        say(f"ready after {self.ready_s:.1f} s at {self.address.url}")

    def _is_ready(self) -> bool:
        try:
            with open_here(f"{self.address.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, http.client.HTTPException):
            return False

    def last_lines(self, count: int = _LAST_LINES) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-count:])

    def _end(self) -> None:
        for number, patience_s in _ENDINGS:
            if self._process.poll() is None:
                self._process.send_signal(number)
                self._wait(patience_s)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _wait(self, patience_s: float) -> None:
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            say(f"the server has not ended after {patience_s:.0f} s")
