"""A Ray cluster of several nodes on this machine, that grows and shrinks: Ray's real autoscaler, and its
"fake_multinode" provider, whose nodes are processes with whatever resources they claim.

`ray.cluster_utils.AutoscalingCluster` does the same, and ends every other Ray of the machine (`ray stop`);
this one ends the processes that it started.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from load_tests.drills.ports import free_port
from load_tests.drills.processes import ProcessId, descendants, end_all

Resources = Mapping[str, float]

_START_TIMEOUT_S = 240.0
_ATTEMPTS = 3
"""Ray gives a node 30 s to start, which a busy machine may not keep."""
_IDLE_S = 2.0
"""How long a node must have nothing to do before it goes."""


class FakeCluster:
    """A head, and worker nodes of one or more types, each from none to as many as are wanted."""

    def __init__(
        self, head: Resources, workers: Mapping[str, tuple[Resources, int]], num_workers: int
    ) -> None:
        """workers: by type, the resources of such a node and the most there may be. num_workers: of all types."""
        self._head, self._workers, self._num_workers = head, workers, num_workers
        self._folder = Path(tempfile.mkdtemp(prefix="ray-fake-"))  # short: sockets lie in it
        self._port = free_port()
        self._starter: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FakeCluster:
        try:
            self._start()
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(keep_logs=error is not None)

    @property
    def num_workers(self) -> int:
        """Nodes beside the head, as Ray knows them."""
        return len([node for node in ray.nodes() if node["Alive"]]) - 1

    def _start(self) -> None:
        config = self._folder / "cluster.json"
        config.write_text(json.dumps(self._autoscaler_config()), encoding="utf-8")
        others = {name: amount for name, amount in self._head.items() if name not in ("CPU", "GPU")}
        command = [
            str(Path(sys.executable).parent / "ray"),
            *["start", "--head", "--block", "--disable-usage-stats"],
            *("--node-ip-address=127.0.0.1", f"--port={self._port}", f"--temp-dir={self._folder}"),
            *("--include-dashboard=false", "--min-worker-port=0", "--max-worker-port=0"),
            *(f"--num-cpus={self._head.get('CPU', 0):g}", f"--num-gpus={self._head.get('GPU', 0):g}"),
            *(f"--resources={json.dumps(others)}", f"--autoscaling-config={config}"),
        ]
        for attempts_left in reversed(range(_ATTEMPTS)):
            log = self._folder / f"start-{attempts_left}.log"
            self._starter = self._start_ray(command, log)
            if self._has_started(log):
                return
            self._end_ray()
            if not attempts_left:
                raise RuntimeError(f"Ray has not started: {log.read_text(encoding='utf-8')[-2_000:]}")

    @staticmethod
    def _start_ray(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        with log.open("wb") as output:
            return subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _has_started(self, log: Path) -> bool:
        assert self._starter is not None, "it is asked of what was started"
        deadline = time.monotonic() + _START_TIMEOUT_S
        while "Ray runtime started" not in log.read_text(encoding="utf-8"):
            if self._starter.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def _connect(self) -> None:
        """On a busy machine Ray says that it runs before it answers."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                ray.init(address=f"127.0.0.1:{self._port}", _node_ip_address="127.0.0.1", log_to_driver=False)
                return
            except ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)

    def _autoscaler_config(self) -> dict[str, Any]:
        """As `ray up` takes it. Source: ray 2.60.0, ray/autoscaler/ray-schema.json, and what
        ray/autoscaler/_private/fake_multi_node/node_provider.py reads."""
        types: dict[str, Any] = {
            name: {"resources": dict(resources), "node_config": {}, "min_workers": 0, "max_workers": most}
            for name, (resources, most) in self._workers.items()
        }
        types["ray.head.default"] = {"resources": dict(self._head), "node_config": {}, "max_workers": 0}
        return {
            "cluster_name": "fake",
            "max_workers": self._num_workers,
            "upscaling_speed": 10.0,
            "idle_timeout_minutes": _IDLE_S / 60,
            "provider": {
                "type": "fake_multinode",
                "gcs_address": f"127.0.0.1:{self._port}",
                "use_node_id_as_ip": True,  # the nodes share an address
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "available_node_types": types,
            "head_node_type": "ray.head.default",
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            **{
                f"{whose}_commands": [] for whose in ("initialization", "setup", "head_setup", "worker_setup")
            },
            **{f"{whose}_start_ray_commands": [] for whose in ("head", "worker")},
        }

    def close(self, keep_logs: bool = False) -> None:
        """End what was started, by its process ids, and remove its files."""
        ray.shutdown()
        self._end_ray()
        if keep_logs:
            print(f"==> what Ray wrote: {self._folder}", flush=True)
        else:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _orphans(self) -> list[ProcessId]:
        """Of nodes that Ray gave up while they started: they name this cluster's folder, and nobody ends them."""
        folder = str(self._folder).encode()
        return [process for process in descendants(1) if folder in _command_of(process.pid)]

    def _end_ray(self) -> None:
        if self._starter is None:
            return
        ours = [*descendants(self._starter.pid), *self._orphans()]
        self._starter.terminate()
        try:
            self._starter.wait(30)
        except subprocess.TimeoutExpired:
            self._starter.kill()
            self._starter.wait()
        end_all(ours)
        self._starter = None


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
