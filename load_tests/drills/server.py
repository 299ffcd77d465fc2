"""The server under drill: a Ray and a Serve of our own on loopback, apps of `serve_configs/`, and a view inside.

Everything that starts here ends here: by Serve's and Ray's own shutdown, and what is left of it by its pid.
"""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from deployments.launch import BEFORE_RAY
from load_tests.drills.ports import free_port
from load_tests.drills.processes import ProcessId, descendants, end_all
from load_tests.drills.ray_start import ON_A_BUSY_MACHINE, start_ray

ROOT = Path(__file__).parents[2]
TINY = "checkpoints/tiny"
"""For apps of `tiny_cpu`, which speaks with a larger one: drills are about streams, and random weights babble on."""
_START_TIMEOUT_S = 900.0  # of an app, or for all its replicas to be replaced: a machine may be busy
_ASK_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Held:
    """What requests hold in the engines of one app; all zero when nothing runs."""

    slots: int
    pages: int
    rows: int


class App:
    """One application: where it is, and what its replicas say of themselves."""

    def __init__(self, name: str, url: str) -> None:
        """url: ends in a slash."""
        self.name, self.url = name, url
        self._free_pages = 0  # of an idle Talker replica

    def client(self, timeout_s: float = 120.0, limit: int = 1_000) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=limit, max_keepalive_connections=limit)
        return httpx.AsyncClient(base_url=self.url, timeout=timeout_s, limits=limits)

    async def stats(self, deployment: str) -> list[dict[str, Any]]:
        """Of every replica that answers; one that has just died doesn't."""
        handle = serve.get_deployment_handle(deployment, self.name)

        def ask() -> list[Any]:
            try:
                answers = handle.broadcast("stats").results(timeout_s=_ASK_TIMEOUT_S, return_exceptions=True)
            except TimeoutError:
                return []
            return [answer for answer in answers if isinstance(answer, dict)]

        return await asyncio.to_thread(ask)

    async def ask(self, deployment: str, method: str, *arguments: Any) -> Any:
        """One of its replicas."""
        remote = getattr(serve.get_deployment_handle(deployment, self.name), method).remote
        return await asyncio.to_thread(lambda: remote(*arguments).result(timeout_s=_ASK_TIMEOUT_S))

    async def held(self) -> Held | None:
        """None while a replica that should run doesn't answer."""
        talkers, codecs = await asyncio.gather(self.stats("Talker"), self.stats("Codec"))
        if (len(talkers), len(codecs)) != (len(self.pids("Talker")), len(self.pids("Codec"))) or not talkers:
            return None
        self._free_pages = max([self._free_pages, *(each["num_free_pages"] for each in talkers)])
        return Held(
            slots=sum(each["num_running"] + each["num_waiting"] for each in talkers),
            pages=sum(self._free_pages - each["num_free_pages"] for each in talkers),
            rows=sum(each["num_rows_in_use"] for each in codecs),
        )

    async def held_at_rest(self, patience_s: float = 60.0) -> Held:
        """Once nothing is held any more, or what still is after a while: that has leaked. Raises TimeoutError."""
        deadline = time.monotonic() + patience_s
        while True:
            held = await self.held()
            if held == Held(0, 0, 0):
                return held
            if time.monotonic() > deadline:
                if held is None:
                    raise TimeoutError(f"not every replica of {self.name} answers after {patience_s:.0f} s")
                return held
            await asyncio.sleep(0.2)

    def pids(self, deployment: str) -> list[int]:
        """Of its running replicas, as Serve's controller knows them."""
        details = _get_global_client().get_serve_details()["applications"].get(self.name, {})
        replicas = details.get("deployments", {}).get(deployment, {}).get("replicas", [])
        return [replica["pid"] for replica in replicas if replica["state"] == "RUNNING" and replica["pid"]]

    async def wait_until_ready(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        async with self.client(timeout_s=10) as client:
            while time.monotonic() < deadline:
                try:
                    if (await client.get("health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.2)
        raise TimeoutError(f"{self.name} is not ready after {timeout_s:.0f} s: {serve.status().applications}")


class DrillServer:
    """Ray and Serve, from `with` to its end."""

    def __init__(self, port: int = 0, num_cpus: int = 2) -> None:
        """port: of HTTP; 0 takes a free one. num_cpus: what Ray believes to have; replicas ask for none."""
        self._num_cpus = num_cpus
        self._port = port or free_port()
        self._config: dict[str, Any] = {}
        self._applications: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> DrillServer:
        for name, value in {**BEFORE_RAY, **ON_A_BUSY_MACHINE}.items():
            os.environ.setdefault(name, value)
        try:
            start_ray(
                num_cpus=self._num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                _node_ip_address="127.0.0.1",
            )
            serve.start(http_options={"host": "127.0.0.1", "port": self._port, "request_timeout_s": 900})
            # After `ray.init`, which sets its own: this ends like Ctrl-C, through every `finally`.
            signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs below this process; said aloud where force was needed."""
        ours = descendants(os.getpid())
        try:
            if ray.is_initialized():
                serve.shutdown()
        finally:
            ray.shutdown()
            killed = end_all(ours)
            if killed:
                print(f"==> {len(killed)} processes had to be killed")

    @property
    def processes(self) -> list[ProcessId]:
        """Everything that runs below this process: Ray's daemons, Serve's, the replicas."""
        return descendants(os.getpid())

    async def start(
        self,
        config: str,
        args: Mapping[str, Any],
        *,
        name: str,
        num_replicas: Mapping[str, int] | None = None,
        import_path: str | None = None,
    ) -> App:
        """Deploy an app of `serve_configs/CONFIG.yaml` with some of its args changed; ready when it returns."""
        application = self._read(config)
        application.update(name=name, route_prefix=f"/{name}")
        application["args"].update(args)
        if import_path:
            application["import_path"] = import_path
        for deployment in application["deployments"]:
            deployment["num_replicas"] = (num_replicas or {}).get(deployment["name"], 1)
            deployment["graceful_shutdown_timeout_s"] = _START_TIMEOUT_S
        self._applications[name] = application
        self._deploy()
        app = App(name, f"http://127.0.0.1:{self._port}/{name}/")
        await app.wait_until_ready()
        await self._all_running(name)
        await app.held()  # now, at rest, what an idle replica's free pages are
        return app

    async def redeploy(self, app: App, args: Mapping[str, Any]) -> None:
        """The same app with other args: Serve replaces every replica, one after the other. Returns when it has."""
        self._applications[app.name]["args"].update(args)
        self._deploy()
        await asyncio.sleep(1.0)  # until the controller has taken the order
        await self._all_running(app.name)

    async def stop(self, app: App) -> None:
        del self._applications[app.name]
        self._deploy()
        await self._until(lambda: app.name not in serve.status().applications, f"{app.name} doesn't go")

    async def _all_running(self, name: str) -> None:
        def are_running() -> bool:
            app = serve.status().applications[name]
            if app.status == "DEPLOY_FAILED":
                raise RuntimeError(f"{name} can't start: {app.message}")
            return app.status == "RUNNING" and all(
                deployment.status == "HEALTHY" for deployment in app.deployments.values()
            )

        await self._until(are_running, f"{name} isn't running")

    async def _until(self, is_true: Any, complaint: str) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not await asyncio.to_thread(is_true):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{complaint}: {serve.status().applications}")
            await asyncio.sleep(0.3)

    def _read(self, config: str) -> dict[str, Any]:
        content = yaml.safe_load((ROOT / "serve_configs" / f"{config}.yaml").read_text(encoding="utf-8"))
        self._config = {key: value for key, value in content.items() if key != "applications"}
        self._config["http_options"] = {**self._config["http_options"], "port": self._port}
        (application,) = content["applications"]
        return copy.deepcopy(application)

    def _deploy(self) -> None:
        applications: Sequence[dict[str, Any]] = list(self._applications.values())
        schema = ServeDeploySchema.model_validate({**self._config, "applications": applications})
        _get_global_client().deploy_apps(schema, _blocking=False)
