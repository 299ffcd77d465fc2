"""Where Ray puts replicas that share GPUs by fractions. The GPUs are only claimed, and so are the models."""

import time

import pytest
import ray
import yaml
from ray import serve

from tests.e2e.conftest import ROOT, START_TIMEOUT_S

FRACTIONS = {"Talker": 0.6, "Codec": 0.3, "ReferenceEncoder": 0.1}


def stand_ins(num_replicas):
    """tiny_base.yaml with the fractions that the README names."""
    config = yaml.safe_load((ROOT / "serve_configs" / "tiny_base.yaml").read_text(encoding="utf-8"))
    (application,) = config["applications"]
    application.update(
        name=f"placed-{num_replicas}",
        route_prefix=f"/placed-{num_replicas}",
        import_path="tests.e2e.stand_ins:build",
    )
    application["deployments"] = [
        {
            "name": name,
            "num_replicas": num_replicas,
            "ray_actor_options": {"num_cpus": 0, "num_gpus": share},
        }
        for name, share in FRACTIONS.items()
    ] + [{"name": "Ingress", "ray_actor_options": {"num_cpus": 0}}]
    return application


@ray.remote(num_gpus=1, num_cpus=0)
class Occupant:
    def gpus(self):
        return ray.get_gpu_ids()


@pytest.fixture(params=[1, 2])
def num_gpus(server, request):
    """The session's node claims two GPUs; this many of them are free."""
    occupants = [Occupant.remote() for _ in range(2 - request.param)]
    ray.get([occupant.gpus.remote() for occupant in occupants])
    yield request.param
    for occupant in occupants:
        ray.kill(occupant)


def test_a_talker_a_codec_and_an_encoder_share_each_gpu(server, num_gpus):
    """Codecs placed first would leave no GPU with room for the second Talker."""
    app = server.add(stand_ins(num_gpus))
    server.start(app)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while serve.status().applications[app.name].status != "RUNNING":
            assert time.monotonic() < deadline, serve.status().applications[app.name]
            time.sleep(0.2)
        placed = app.client.get("").json()
        while {len(gpus) for gpus in placed.values()} != {num_gpus}:
            assert time.monotonic() < deadline, placed  # the ingress hears of replicas one after the other
            time.sleep(0.2)
            placed = app.client.get("").json()
        assert set(placed) == set(FRACTIONS)
        for name, gpus in placed.items():
            assert len({index for (index,) in gpus}) == num_gpus, f"each {name} has a GPU to itself: {gpus}"
    finally:
        server.stop(app)
