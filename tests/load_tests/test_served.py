from pathlib import Path

import pytest
import yaml

from load_tests.drills.ports import free_port
from load_tests.served import ServedConfig, changed_config

CONFIGS = Path(__file__).parents[2] / "serve_configs"


def test_args_are_changed_by_dotted_names_and_the_rest_stays():
    config = changed_config(
        CONFIGS / "qwen3tts.yaml",
        {
            "checkpoint": "/x",
            "talker.num_slots": 128,
            "transport.talker_to_codec": "value",
            "codec.memory_gib": 5,
        },
        {"port": 9},
    )
    (application,) = config["applications"]
    before = yaml.safe_load((CONFIGS / "qwen3tts.yaml").read_text())["applications"][0]
    assert application["args"]["checkpoint"] == "/x"
    assert application["args"]["talker"] == before["args"]["talker"] | {"num_slots": 128}
    assert application["args"]["transport"]["talker_to_codec"] == "value"
    assert application["args"]["codec"]["memory_gib"] == 5
    assert application["deployments"] == before["deployments"]
    assert config["http_options"]["port"] == 9


def test_changed_args_are_still_checked_by_the_app(tmp_path):
    from deployments.app_args import AppArgs

    config = changed_config(
        CONFIGS / "qwen3tts.yaml", {"talker.num_slots": 128, "codec_dtype": "float16"}, {}
    )
    args = AppArgs.model_validate(config["applications"][0]["args"])
    assert args.talker.num_slots == 128


def test_a_name_that_leads_into_a_value_is_told():
    with pytest.raises(ValueError, match=r"checkpoint is no mapping"):
        changed_config(CONFIGS / "qwen3tts.yaml", {"checkpoint.x": 1}, {})


def test_replicas_are_set_by_the_names_of_deployments():
    config = changed_config(CONFIGS / "qwen3tts.yaml", {}, {}, {"Codec": 2, "Ingress": 3})
    counts = {d["name"]: d.get("num_replicas", 1) for d in config["applications"][0]["deployments"]}
    assert counts == {"Talker": 1, "Codec": 2, "Ingress": 3}
    with pytest.raises(ValueError, match=r"no deployment Codecs, only Talker, Codec, Ingress"):
        changed_config(CONFIGS / "qwen3tts.yaml", {}, {}, {"Codecs": 2})


def test_the_environment_of_a_deployment_is_set_beside_its_other_options():
    def options_of(environment):
        config = changed_config(CONFIGS / "qwen3tts.yaml", {}, {}, environment=environment)
        return {d["name"]: d.get("ray_actor_options", {}) for d in config["applications"][0]["deployments"]}

    before, options = (
        options_of([]),
        options_of([("Talker", "A", "1"), ("Talker", "B", "x=y"), ("Codec", "B", "x=y")]),
    )
    assert options["Talker"] == {**before["Talker"], "runtime_env": {"env_vars": {"A": "1", "B": "x=y"}}}
    env_vars = before["Codec"]["runtime_env"]["env_vars"]
    assert options["Codec"]["runtime_env"] == {"env_vars": {**env_vars, "B": "x=y"}}
    assert options["Ingress"] == before["Ingress"]
    with pytest.raises(ValueError, match="no deployment Nobody, only"):
        changed_config(CONFIGS / "qwen3tts.yaml", {}, {}, environment=[("Nobody", "A", "1")])


def test_replicas_fit_where_one_was_unless_each_has_a_gpu_for_itself():
    def gpus(config, count):
        deployments = changed_config(CONFIGS / config, {}, {}, {"Codec": count})["applications"][0][
            "deployments"
        ]
        return next(d["ray_actor_options"]["num_gpus"] for d in deployments if d["name"] == "Codec")

    assert gpus("qwen3tts.yaml", 1) == 0.3
    assert gpus("qwen3tts.yaml", 7) == 0.0428
    assert gpus("two_gpus.yaml", 2) == 1


def test_where_the_codec_is_the_ingress_no_other_is_configured():
    config = changed_config(CONFIGS / "qwen3tts.yaml", {"ingress": "codec"}, {}, {"Codec": 2})
    talker, codec = config["applications"][0]["deployments"]
    assert (talker["name"], codec["name"], codec["num_replicas"]) == ("Talker", "Codec", 2)
    assert codec["ray_actor_options"]["num_gpus"] == 0.15
    with pytest.raises(ValueError, match="no deployment Ingress"):
        changed_config(CONFIGS / "qwen3tts.yaml", {"ingress": "codec"}, {}, {"Ingress": 2})


def test_a_server_that_cannot_start_is_told_with_its_last_lines(tmp_path):
    content = {"http_options": {"port": free_port()}, "applications": []}
    server = ServedConfig(content, tmp_path, fast=False)
    server._config.write_text("applications: [")  # no YAML any more
    with pytest.raises(RuntimeError, match="did not start"):
        server.__enter__()
    assert server._process.poll() is not None
