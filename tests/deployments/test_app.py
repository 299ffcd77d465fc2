from functools import partial
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from ray.serve._private.build_app import build_app as build_graph

from deployments import app, plan
from deployments.app import AppArgs, build_app
from deployments.plan import plan_app
from qwen3tts_core.config import TalkerEngineConfig
from qwen3tts_core.model.checkpoint import CHECKPOINTS

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path for path in (ROOT / "serve_configs").glob("*.yaml") if path.name != "kuberay.yaml")


@pytest.fixture(autouse=True)
def _published_checkpoints_are_here(monkeypatch, make_checkpoint, tmp_path):
    """No downloads: a published name means the tiny checkpoint of its kind, all with one codec."""
    folders = {
        kind: make_checkpoint(kind, kind, "base") for kind in ("custom_voice_large", "voice_design", "base")
    }

    def resolve(name, files):
        assert "config.json" in files
        if Path(name).is_absolute():
            return Path(name)
        kind = CHECKPOINTS.get(name, name).rpartition("-")[2]
        return Path(folders[{"Base": "base", "VoiceDesign": "voice_design"}.get(kind, "custom_voice_large")])

    monkeypatch.setattr(app, "plan_app", partial(plan_app, resolve=resolve))
    monkeypatch.setattr(plan, "HASHES", tmp_path / "hashes.json")


def graph_of(args):
    """The deployments by name, in the order in which Serve starts them."""
    built = build_graph(build_app(args), name="app")
    return {deployment.name: deployment for deployment in built.deployments}


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"chekpoint": "x"}, "chekpoint"),
        ({"talker": {"num_slot": 4}}, "talker.num_slot"),
        ({"codec": {"rows": 4}}, "codec.rows"),
        ({"chunk_ramp": {"stedy": 4}}, "chunk_ramp.stedy"),
        ({"transport": {"talker": "value"}}, "transport.talker"),
        ({"transport": {"talker_to_codec": "ref"}}, "transport.talker_to_codec"),
        ({"engines": "process"}, "engines"),
        ({"engines": {"talker": "fork"}}, "engines.talker"),
        ({"talker": {"num_slots": 0}}, "talker"),
        ({"codec": {"mode": "windowed"}}, "codec.mode"),
        ({"talker_dtype": "fp16"}, "talker_dtype"),
        ({"talker_weight_dtype": "fp8"}, "talker_weight_dtype"),
        ({"talker": {"decode_attention": "flash"}}, "talker.decode_attention"),
        ({"talker": [1]}, "talker"),
        ({"talker": {"num_slots": True}}, "talker.num_slots"),
        ({"talker": {"num_slots": "8"}}, "talker.num_slots"),
        ({"talker": {"num_slots": 8.0}}, "talker.num_slots"),
        ({"talker": {"prefill_buckets": [32, "64"]}}, "talker.prefill_buckets.1"),
        ({"codec": {"num_rows": "8"}}, "codec.num_rows"),
        ({"chunk_ramp": {"ramp": [True, 3]}}, "chunk_ramp.ramp.0"),
        ({"ingress": "talker"}, "ingress"),
        ({"deterministic": "yes"}, "deterministic"),
        ({"deterministic": 1}, "deterministic"),
        ({"model_name": 7}, "model_name"),
        ({"checkpoint": ""}, "checkpoint"),
        ({"checkpoint": " "}, "checkpoint"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:x"}, "device"),
        ({"allowed_origins": ["app.example"]}, "allowed_origins.0"),
        ({"first_audio_timeout_s": True}, "first_audio_timeout_s"),
        ({"first_audio_timeout_s": "30"}, "first_audio_timeout_s"),
        ({"reference": {"allow_http": "no"}}, "reference.allow_http"),
        ({"reference": {"limits": {"max_seconds": "30"}}}, "reference.limits.max_seconds"),
        ({"reference": {"allowed_networks": [10]}}, "reference.allowed_networks.0"),
        ({"voices": {"max_voices": "5"}}, "voices.max_voices"),
        ({"long_text": {"from_chars": "700"}}, "long_text.from_chars"),
    ],
)
def test_a_wrong_key_or_value_stops_the_start_by_name(args, key):
    """known_faults row 49: at once, with the key."""
    with pytest.raises(ValidationError) as caught:
        AppArgs.model_validate({"checkpoint": "checkpoints/tiny", **args})
    assert key in {".".join(map(str, error["loc"])) for error in caught.value.errors()}


def test_a_wrong_value_of_one_model_is_named_too():
    with pytest.raises(ValidationError) as caught:
        AppArgs.model_validate({"models": [{"checkpoint": "x", "talker": {"num_slots": True}}]})
    assert "models.0.talker.num_slots" in {".".join(map(str, e["loc"])) for e in caught.value.errors()}


@pytest.mark.parametrize(
    "args",
    [
        {"first_audio_timeout_s": 30},
        {"device": "cuda:1"},
        {"reference": {"allowed_networks": ["10.0.0.0/8"], "file_roots": ["~/clips"], "total_s": 3}},
        {"voices": {"folder": "build/voices"}},
        {"chunk_ramp": {"ramp": [1, 2], "steady": 9}},
        {"api_keys_file": "keys"},
        {"stream_lease_s": 0},
        {"stream_lease_s": 2},
    ],
)
def test_what_yaml_can_write_is_taken(args):
    AppArgs.model_validate({"checkpoint": "x", **args})


def test_a_lease_that_frees_streams_that_are_heard_is_refused():
    with pytest.raises(ValidationError, match="must be 0 or at least 2"):
        AppArgs.model_validate({"checkpoint": "x", "stream_lease_s": 1e-300})


def test_a_checkpoint_is_required():
    with pytest.raises(ValidationError, match="checkpoint"):
        AppArgs.model_validate({})


def test_the_codec_has_a_row_for_every_request_a_talker_admits():
    args = AppArgs.model_validate({"checkpoint": "x", "talker": {"num_slots": 3, "max_queued": 2}})
    assert args.codec.num_rows == 5
    assert AppArgs(checkpoint="x").codec.num_rows == 8 + 32
    assert AppArgs(checkpoint="x", talker=TalkerEngineConfig(num_slots=4, max_queued=1)).codec.num_rows == 5
    assert AppArgs.model_validate({"checkpoint": "x", "codec": {"num_rows": 7}}).codec.num_rows == 7


def test_deterministic_reaches_both_engines():
    args = AppArgs.model_validate({"checkpoint": "x", "deterministic": True, "talker": {"num_slots": 6}})
    assert args.talker_engine.deterministic
    assert args.codec_engine.deterministic
    assert args.talker_engine.num_slots == 6
    assert len(args.talker_engine.decode_buckets) == len(args.codec_engine.batch_buckets) == 1


def test_a_folder_means_the_same_wherever_a_replica_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert AppArgs(checkpoint="checkpoints/tiny").checkpoint_path == str(ROOT / "checkpoints" / "tiny")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert AppArgs(checkpoint="mine/").checkpoint_path == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("checkpoint", "model_name", "served"),
    [
        ("checkpoints/tiny", "", "tiny"),
        ("checkpoints/tiny", "my-voice", "my-voice"),
        ("Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice", "", "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"),
        ("qwen3_tts_1p7b", "", "qwen3_tts_1p7b"),
    ],
)
def test_the_served_name_is_given_or_follows_the_checkpoint(checkpoint, model_name, served):
    assert AppArgs(checkpoint=checkpoint, model_name=model_name).served_name == served


def test_talkers_start_before_codecs_and_the_ingress_last():
    assert list(graph_of(AppArgs(checkpoint="checkpoints/tiny"))) == ["Talker", "Codec", "Ingress"]


def test_serve_lets_through_what_the_engines_admit_and_some_calls_besides():
    args = AppArgs.model_validate(
        {"checkpoint": "checkpoints/tiny", "talker": {"num_slots": 3, "max_queued": 2}}
    )
    graph = graph_of(args)
    for name in ("Talker", "Codec"):
        assert graph[name].max_ongoing_requests > 5
        assert graph[name].max_queued_requests > 0
    assert graph["Ingress"].max_ongoing_requests > 1000


def test_each_deployment_scales_by_its_own_args_and_the_ingress_knows_who_may_sleep():
    scaling = {"talker": {"max_replicas": 4, "min_replicas": 0}, "codec": {"max_replicas": 2}}
    graph = graph_of(AppArgs.model_validate({"checkpoint": "checkpoints/tiny", "autoscaling": scaling}))
    talker, codec = (graph[name]._deployment_config.autoscaling_config for name in ("Talker", "Codec"))
    assert (talker.min_replicas, talker.max_replicas) == (0, 4)
    assert (codec.min_replicas, codec.max_replicas) == (1, 2)
    assert graph["Ingress"]._deployment_config.autoscaling_config is None
    assert graph["Talker"].max_queued_requests > 4 * 40, "callers wait for the replicas that are to come"
    (settings, *_) = graph["Ingress"].init_args
    assert settings.models[0].sleepers == ("Talker",)


def test_the_codec_may_be_the_ingress_as_well():
    """One deployment less; it has the codec's name and replicas, and takes every request."""
    scaling = {"codec": {"max_replicas": 3}}
    args = {
        "checkpoint": "checkpoints/tiny",
        "ingress": "codec",
        "autoscaling": scaling,
        "stream_lease_s": 10,
    }
    graph = graph_of(AppArgs.model_validate(args))
    assert list(graph) == ["Talker", "Codec"]
    codec = graph["Codec"]
    assert codec.max_ongoing_requests > 1000
    assert codec._deployment_config.autoscaling_config.max_replicas == 3
    codec_settings, ingress_settings, handles, transport = codec.init_args
    assert (codec_settings.engine.num_rows, list(handles), transport) == (40, ["Talker"], "object_ref")
    assert (ingress_settings.models[0].codec, ingress_settings.roll_call_period_s) == ("Codec", 2.0)


@pytest.mark.parametrize("place", ["alone", "above models", "in a model"])
def test_an_ingress_cannot_sleep(place):
    one, scaling = (
        {"checkpoint": "checkpoints/tiny"},
        {"autoscaling": {"codec": {"min_replicas": 0, "max_replicas": 2}}},
    )
    args = {
        "alone": {**one, **scaling},
        "above models": {"models": [one], **scaling},
        "in a model": {"models": [{**one, **scaling}]},
    }[place]
    AppArgs.model_validate({**args, "ingress": "separate"})
    with pytest.raises(
        ValidationError, match=r"autoscaling\.codec\.min_replicas must be at least 1 with ingress: codec"
    ):
        AppArgs.model_validate({**args, "ingress": "codec"})


def test_the_talker_of_an_ingress_that_decodes_may_sleep():
    args = {"checkpoint": "checkpoints/tiny", "ingress": "codec"}
    args["autoscaling"] = {"talker": {"min_replicas": 0, "max_replicas": 2}}
    (_, ingress_settings, *_) = graph_of(AppArgs.model_validate(args))["Codec"].init_args
    assert ingress_settings.models[0].sleepers == ("Talker",)


@pytest.mark.filterwarnings("ignore:`look_back_period_s`:FutureWarning")  # a drill is in a hurry
@pytest.mark.parametrize("config_file", CONFIGS, ids=lambda path: path.name)
def test_every_config_builds_and_names_deployments_that_exist(config_file):
    text = config_file.read_text(encoding="utf-8")
    assert text.startswith("# For "), "a config says at its top for what it is, on what"
    config = yaml.safe_load(text)
    assert config["http_options"]["request_timeout_s"] >= 600, (
        "a long utterance would be cut, or one that hangs never"
    )
    (application,) = config["applications"]
    assert application["import_path"] == "deployments.app:build_app"
    graph = graph_of(AppArgs.model_validate(application["args"]))
    assert [d["name"] for d in application["deployments"]] == list(graph)
