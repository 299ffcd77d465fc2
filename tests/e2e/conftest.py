"""One Serve instance for the whole run, deployed from the configs that people use, on loopback.

    /               serve_configs/tiny_cpu.yaml with checkpoints/tiny and more patience, on a free port
    /deterministic  the same with `deterministic: true`, both transports the other way round, engines in
                    processes of their own, and JSON logs
    /models         serve_configs/tiny_all.yaml, in test_models.py alone
    /codec_ingress  as /deterministic, with `ingress: codec`; in test_codec_ingress.py alone
    /speaking       serve_configs/tiny_cpu.yaml as it is, but for its patience; in test_speaking.py alone

Each starts when the first test needs it. Everything that starts here ends here, by Ray's own shutdown of what this process started.
"""

import copy
import json
import os
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema, TracingConfig

from deployments.launch import BEFORE_RAY
from load_tests.drills.ports import free_port
from load_tests.drills.ray_start import ON_A_BUSY_MACHINE, start_ray
from load_tests.drills.server import TINY

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "serve_configs" / "tiny_cpu.yaml"
START_TIMEOUT_S = 300
TEST_TIMEOUT_S = 900
"""Of whatever hangs: a test may be the one that starts Ray and two applications, on a machine with much else to do."""
DEADLINE_S = 120
"""For what takes a moment."""
LASTING_SEED, ANOTHER_LASTING_SEED = 1012, 1093
"""With them "Hello there." in the first voice has no end in 2,100 frames, whatever runs beside it: the best two choices
of the nearest draws are 2.6e-4 and 1.2e-4 apart in float64, 20 and 9 times what float32 rounds in a logit. Seed 8, say,
draws from two that are 4e-7 apart (frame 122, group 13): which one wins changes with the rows of the steps before."""
PATIENCE = {"first_audio_timeout_s": 240, "resume_timeout_s": 240}
"""Args of the apps: a replica's start, and a turn in the queue, may take long beside other tests."""


def pytest_itemcollected(item):
    """Of this folder's tests."""
    item.add_marker(pytest.mark.e2e)
    item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


class App:
    """One deployed application: its HTTP client, and a way to its deployments' stats."""

    def __init__(self, name, url):
        self.name, self.url = name, url
        self.client = httpx.Client(base_url=url, timeout=300)

    def stats(self, deployment):
        """Of one replica. This process may be the last to hear that one has died: then of another."""
        handle, deadline = serve.get_deployment_handle(deployment, self.name), time.monotonic() + DEADLINE_S
        while True:
            try:
                return handle.stats.remote().result(timeout_s=DEADLINE_S)
            except RayActorError:
                assert time.monotonic() < deadline, f"every {deployment} is dead"
                time.sleep(0.1)

    def stats_of_a_successor(self, deployment, *pids):
        """Once nobody answers any more whose process, or whose engine's, was one of these."""
        deadline = time.monotonic() + DEADLINE_S
        while not {(stats := self.stats(deployment))["pid"], stats["engine_pid"]}.isdisjoint(pids):
            assert time.monotonic() < deadline, f"{deployment} {pids} is still there"
            time.sleep(0.1)
        return stats

    @property
    def num_held(self):
        """Talker slots, places in its queue, and codec rows that someone holds."""
        talker, codec = self.stats("Talker"), self.stats("Codec")
        return talker["num_running"] + talker["num_waiting"] + codec["num_rows_in_use"]

    def wait_until_free(self, deadline_s=DEADLINE_S):
        """A client may hear an end before its slot and its row are free."""
        deadline = time.monotonic() + deadline_s
        while held := self.num_held:
            assert time.monotonic() < deadline, f"{held} still held after {deadline_s} s"
            time.sleep(0.02)

    @contextmanager
    def freed_before(self, num_frames):
        """Whoever leaves within is noticed: all is freed, not by a lease, and before the Talker has made so many frames."""
        self.wait_until_free()
        before = self.stats("Talker")
        yield
        self.wait_until_free()
        after = self.stats("Talker")
        assert after["frames"] - before["frames"] < num_frames, "freed at its own end"
        assert after["reaped"] == before["reaped"], "freed by a lease that ran out"

    def leave_while_it_speaks(self, path, body, num_running=1):
        """Ask for what has no answer before its end, and go once so many streams of it run."""
        address = httpx.URL(self.url)
        connection = HTTPConnection(address.host, address.port, timeout=DEADLINE_S)
        connection.request(
            "POST", address.path + path, json.dumps(body), {"content-type": "application/json"}
        )
        deadline = time.monotonic() + DEADLINE_S
        while self.stats("Talker")["num_running"] < num_running:
            assert time.monotonic() < deadline, f"{path} isn't spoken"
        connection.close()

    def speak(self, **fields):
        response = self.client.post("v1/audio/speech", json={"input": "Hello there.", **fields})
        assert response.status_code == 200, response.text
        return response

    def wait_until_ready(self, timeout_s=START_TIMEOUT_S):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if self.client.get("health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise TimeoutError(f"{self.name} is not ready after {timeout_s} s: {serve.status()}")


class Server:
    """The Serve instance: its applications, and how to deploy them again."""

    def __init__(self, port):
        config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
        config["http_options"]["port"] = port
        (plain,) = config["applications"]
        plain["args"] |= PATIENCE | {"checkpoint": TINY}
        other = copy.deepcopy(plain)
        other["name"], other["route_prefix"] = "deterministic", "/deterministic"
        other["args"]["deterministic"] = True
        other["logging_config"] = {"encoding": "JSON", "enable_access_log": False}
        # Every step pays for the whole bucket in this mode, so the sizes are what the tests need.
        other["args"]["talker"] = {"num_slots": 8, "max_queued": 0, "max_positions": 512}
        other["args"]["transport"] = {"talker_to_codec": "value", "codec_to_ingress": "object_ref"}
        other["args"]["engines"] = {"talker": "process", "codec": "process"}
        for deployment in other["deployments"]:
            deployment["health_check_period_s"] = (
                1  # three of them, and a replica without its engine is replaced
            )
        self.config, self._url = config, f"http://127.0.0.1:{port}"
        self._applications, self._apps, self._running = {}, [], []
        self.plain, self.deterministic = self.add(plain), self.add(other)

    def add(self, application):
        """An application from its part of a Serve config; `start` starts it."""
        self._applications[application["name"]] = application
        app = App(application["name"], self._url + application["route_prefix"].rstrip("/") + "/")
        self._apps.append(app)
        return app

    def config_of(self, app):
        """A copy of what it is deployed from, to change and `add`."""
        return copy.deepcopy(self._applications[app.name])

    def start(self, *apps):
        """Beside those that run."""
        self._deploy([*self._running, *(app for app in apps if app not in self._running)])
        for app in apps:
            app.wait_until_ready()

    def stop(self, app):
        self._deploy([other for other in self._running if other is not app])
        deadline = time.monotonic() + START_TIMEOUT_S
        while app.name in serve.status().applications:
            assert time.monotonic() < deadline, "the application doesn't go"
            time.sleep(0.2)

    def restart(self, app):
        """Delete one application and deploy it again: new processes."""
        self.stop(app)
        self.start(app)

    def _deploy(self, apps):
        config = {**self.config, "applications": [self._applications[app.name] for app in apps]}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=False)
        self._running = apps

    def close(self):
        for app in self._apps:
            app.client.close()


@pytest.fixture(scope="session")
def server():
    os.environ.update(BEFORE_RAY | ON_A_BUSY_MACHINE)  # as `make serve` does; other tests run beside these
    start_ray(
        num_cpus=2,
        num_gpus=2,  # claimed: for test_placement.py alone
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        _system_config={"metrics_report_interval_ms": 1000},  # of 10 s: test_metrics.py waits for it
    )
    try:
        server = Server(free_port())
        # Nothing is sampled but what a request asks for with a `traceparent`: see test_tracing.py.
        tracing = TracingConfig(enabled=True, sampling_ratio=0.0)
        serve.start(http_options=server.config["http_options"], tracing_config=tracing)
        yield server
        server.close()
        serve.shutdown()
    finally:
        ray.shutdown()


@pytest.fixture(scope="session")
def _pair(server):
    server.start(server.plain, server.deterministic)


@pytest.fixture(scope="session")
def app(server, _pair):
    return server.plain


@pytest.fixture(scope="session")
def deterministic(server, _pair):
    return server.deterministic
