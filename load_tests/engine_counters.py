"""The engines' own counters, read by a second driver of the same Ray.

    python -m load_tests.engine_counters GCS_ADDRESS

One JSON line on stdout for each line on stdin: deployment -> its `stats()`; of several replicas each has its own,
`Codec 1`, `Codec 2`. A process of its own, so that
Ray's threads are not in the client's. `EngineCounters` is the other end.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

Counters = dict[str, dict[str, float]]
"""Numbers by name, by deployment."""
_PATIENCE_S = 240.0
"""Joining a Ray takes some seconds, and a busy machine many."""


class EngineCounters:
    """Starts the reader once Serve is up. address: of that Ray's GCS. log: where the reader's complaints go."""

    def __init__(self, address: str, log: Path) -> None:
        self._log = log
        with log.open("wb") as complaints:
            self._process = self._start(address, complaints)

    def _start(self, address: str, complaints: IO[bytes]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "load_tests.engine_counters", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self) -> Counters:
        """Raises RuntimeError when they can't be read."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], _PATIENCE_S)[0]:
                raise TimeoutError(f"nothing within {_PATIENCE_S:g} s")
            counters: Counters = json.loads(self._process.stdout.readline())
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the engines' counters can't be read, see {self._log}: {error}") from error
        return counters

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def growth(before: Counters, after: Counters) -> Counters:
    """By how much each counter grew."""
    return {
        deployment: {
            name: value - before.get(deployment, {}).get(name, 0) for name, value in counters.items()
        }
        for deployment, counters in after.items()
    }


def name_replicas(deployment: str, answers: Iterable[Mapping[str, Any]]) -> Counters:
    """The numbers of each replica, in the order of their process ids, which stays while they live."""
    ordered = sorted(answers, key=lambda answer: int(answer["pid"]))
    names = [deployment] if len(ordered) == 1 else [f"{deployment} {i}" for i, _ in enumerate(ordered, 1)]
    return {
        name: {key: value for key, value in answer.items() if isinstance(value, int | float)}
        for name, answer in zip(names, ordered, strict=True)
    }


def main() -> None:
    import ray
    from ray import serve

    answers = sys.stdout
    sys.stdout = sys.stderr  # Ray prints
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR", namespace="serve")
    handles = {}
    for app, overview in serve.status().applications.items():
        for deployment in overview.deployments:
            if deployment.startswith(("Talker", "Codec")):
                handles[deployment] = serve.get_deployment_handle(deployment, app)
    for handle in handles.values():
        handle.stats.remote().result(
            timeout_s=120
        )  # knows its replicas from then on; a broadcast waits for none
    for _ in sys.stdin:
        asked = {name: handle.broadcast("stats") for name, handle in handles.items()}
        numbers: Counters = {}
        for name, responses in asked.items():
            numbers |= name_replicas(name, responses.results(timeout_s=120))
        answers.write(json.dumps(numbers) + "\n")
        answers.flush()
    ray.shutdown()


if __name__ == "__main__":
    main()
