"""Several checkpoints in one app: what each gets, what they share, and what they are called."""

import dataclasses
from pathlib import Path

import pytest
from pydantic import ValidationError
from ray.serve._private.build_app import build_app as build_graph

from deployments import plan
from deployments.app import build_app
from deployments.app_args import AppArgs
from deployments.plan import plan_app, shared_codec_engine
from qwen3tts_core.config import CodecEngineConfig


@pytest.fixture(autouse=True)
def _own_memory_of_hashes(monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "HASHES", tmp_path / "hashes.json")


def args_of(*models, **others):
    listed = [model if isinstance(model, dict) else {"checkpoint": model} for model in models]
    return AppArgs.model_validate({"models": listed, **others})


def graph_of(args):
    return {d.name: d for d in build_graph(build_app(args), name="app").deployments}


# ---------------------------------------------------------------- args
def test_one_checkpoint_is_short_for_a_list_of_one():
    short = AppArgs.model_validate({"checkpoint": "x", "talker": {"num_slots": 3, "max_queued": 1}})
    listed = args_of({"checkpoint": "x", "talker": {"num_slots": 3, "max_queued": 1}})
    assert short.served == listed.served


def test_a_key_that_a_model_leaves_out_is_taken_from_the_level_above():
    args = args_of(
        {"checkpoint": "a", "talker": {"num_slots": 2, "max_queued": 0}},
        {"checkpoint": "b", "deterministic": False},
        talker={"num_slots": 5, "max_queued": 1},
        talker_dtype="bfloat16",
        deterministic=True,
    )
    a, b = args.served
    assert (a.talker.num_slots, b.talker.num_slots) == (2, 5)
    assert (a.codec.num_rows, b.codec.num_rows) == (2, 6)
    assert (a.talker_dtype, b.talker_dtype) == ("bfloat16", "bfloat16")
    assert (a.deterministic, b.deterministic) == (True, False)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "nothing to serve"),
        ({"models": []}, "nothing to serve"),
        ({"models": [{"checkpoint": "a"}], "checkpoint": "b"}, "checkpoint can't stand beside models"),
        ({"models": [{"checkpoint": "a"}], "model_name": "b"}, "model_name can't stand beside models"),
        ({"models": [{"model_name": "a"}]}, "checkpoint"),
        ({"models": [{"checkpoint": "a"}, {"checkpoint": "a"}]}, "names of their own"),
        ({"models": [{"checkpoint": "a", "model_name": "b"}, {"checkpoint": "b"}]}, "names of their own"),
        ({"models": [{"checkpoint": "a", "device": "cpu"}]}, "device"),
        ({"models": [{"checkpoint": "a", "talker": {"slots": 1}}]}, "slots"),
        ({"models": {"checkpoint": "a"}}, "models"),
        ({"models": ["a"]}, "models"),
        ({"checkpoint": "a", "reference": {"max_bytes": 1}}, "max_bytes"),
        ({"checkpoint": "a", "reference": {"limits": {"min_seconds": 0}}}, "limits"),
        ({"checkpoint": "a", "reference": {"device": "tpu"}}, "device"),
        ({"checkpoint": "a", "reference": {"allowed_networks": ["nowhere"]}}, "allowed_networks"),
        ({"checkpoint": "a", "voices": {"max_voices": 0}}, "max_voices"),
    ],
)
def test_a_wrong_list_stops_the_start_and_says_why(args, words):
    with pytest.raises(ValidationError) as caught:
        AppArgs.model_validate(args)
    assert words in str(caught.value)


def test_the_size_of_a_clip_bounds_what_is_fetched_too():
    args = AppArgs.model_validate(
        {
            "checkpoint": "a",
            "reference": {
                "limits": {"max_bytes": 1000, "max_seconds": 5},
                "total_s": 3,
                "allowed_networks": ["10.0.0.0/8"],
                "file_roots": ["clips"],
            },
        }
    )
    policy = args.reference.fetch_policy
    assert (policy.max_bytes, policy.total_s, policy.connect_s) == (1000, 3, 5)
    assert policy.file_roots == (Path.cwd() / "clips",)
    assert str(policy.allowed_networks[0]) == "10.0.0.0/8"
    assert args.reference.encoder_settings("a").limits.max_seconds == 5


def test_uploaded_voices_lie_in_the_users_data_folder_unless_told_otherwise(tmp_path, monkeypatch):
    assert AppArgs(checkpoint="a").voices.path == Path.home() / ".local/share/qwen3tts/voices"
    monkeypatch.chdir(tmp_path)
    args = AppArgs.model_validate({"checkpoint": "a", "voices": {"folder": "build/voices"}})
    assert args.voices.path == tmp_path / "build/voices"


@pytest.mark.parametrize(
    ("checkpoint", "aliases"),
    [
        ("qwen3_tts_base", ("Qwen/Qwen3-TTS-12Hz-1.7B-Base",)),
        ("Qwen/Qwen3-TTS-12Hz-1.7B-Base", ("qwen3_tts_base",)),
        ("Qwen/Qwen3-TTS-12Hz-1.7B-Base@main", ("qwen3_tts_base", "Qwen/Qwen3-TTS-12Hz-1.7B-Base")),
        ("someone/else", ()),
    ],
)
def test_a_published_checkpoint_answers_to_its_short_name_and_its_hub_id(checkpoint, aliases):
    (model,) = AppArgs(checkpoint=checkpoint).served
    assert model.aliases == aliases


# ---------------------------------------------------------------- what is shared
def test_models_share_a_codec_when_its_files_and_settings_are_the_same(make_checkpoint):
    one, two = make_checkpoint("one", "custom_voice_large", codec="base"), make_checkpoint("two", "base")
    other = make_checkpoint("other", "voice_design")
    models = plan_app(args_of(one, two, other))
    assert [model.codec for model in models] == ["Codec-one", "Codec-one", "Codec-other"]
    assert len({model.talker for model in models}) == 3
    assert [model.encoder for model in models] == [None, "ReferenceEncoder", None]
    for setting in (
        {"codec": {"mode": "window"}},
        {"codec_dtype": "bfloat16"},
        {"autoscaling": {"codec": {"max_replicas": 2}}},
        {"deterministic": True},
        {"codec": {"batch_buckets": [1, 4]}},
    ):
        apart = plan_app(args_of(one, {"checkpoint": two, **setting}))
        assert [model.codec for model in apart] == ["Codec-one", "Codec-two"], setting


def test_one_codec_for_all_is_called_codec(make_checkpoint):
    models = plan_app(
        args_of(make_checkpoint("one", "custom_voice_large", codec="base"), make_checkpoint("two", "base"))
    )
    assert {model.codec for model in models} == {"Codec"}


def test_an_ingress_that_decodes_needs_one_codec_for_all(make_checkpoint):
    one, two = make_checkpoint("one", "custom_voice_large", codec="base"), make_checkpoint("two", "base")
    other = make_checkpoint("other", "voice_design")
    assert {model.codec for model in plan_app(args_of(one, two, ingress="codec"))} == {"Codec"}
    with pytest.raises(ValueError, match=r"^ingress: codec needs .* 2: Codec-one, Codec-other$"):
        plan_app(args_of(one, two, other, ingress="codec"))


def test_a_shared_codec_has_the_rows_of_all_and_buckets_that_follow(make_checkpoint):
    args = args_of(
        {"checkpoint": "a", "talker": {"num_slots": 4, "max_queued": 1}},
        {"checkpoint": "b", "codec": {"num_rows": 7}},
    )
    assert shared_codec_engine(args.served) == CodecEngineConfig(num_rows=12)
    chosen = args_of(
        {"checkpoint": "a", "codec": {"num_rows": 4, "batch_buckets": [1, 3]}}, {"checkpoint": "b"}
    )
    assert shared_codec_engine(chosen.served[:1]).batch_buckets == (1, 3)


def test_a_shared_deterministic_codec_is_deterministic(make_checkpoint):
    args = args_of("a", "b", deterministic=True, codec={"num_rows": 3})
    engine = shared_codec_engine(args.served)
    assert engine == dataclasses.replace(CodecEngineConfig(num_rows=6), deterministic=True)


def test_one_base_checkpoint_under_two_names_has_one_encoder(make_checkpoint):
    base, other = make_checkpoint("base", "base"), make_checkpoint("other", "base")
    models = plan_app(args_of(base, {"checkpoint": base, "model_name": "exact", "deterministic": True}))
    assert [model.encoder for model in models] == ["ReferenceEncoder"] * 2
    assert [model.encoder for model in plan_app(args_of(base, other))] == [
        "ReferenceEncoder-base",
        "ReferenceEncoder-other",
    ]


def test_deployment_names_fit_files_and_never_meet(make_checkpoint):
    folder = make_checkpoint("x", "custom_voice_large")
    names = ("Qwen/Qwen3-TTS-1.7B", "mine/Qwen3-TTS-1.7B", "voix française#1", "..", "Qwen3-TTS-1.7B-2")
    models = plan_app(args_of(*({"checkpoint": folder, "model_name": name} for name in names)))
    assert [model.talker for model in models] == [
        "Talker-Qwen3-TTS-1.7B",
        "Talker-Qwen3-TTS-1.7B-2",
        "Talker-voix-fran-aise-1",
        "Talker-model",
        "Talker-Qwen3-TTS-1.7B-2-2",
    ]


# ---------------------------------------------------------------- the graph
def test_all_talkers_start_before_all_codecs(make_checkpoint):
    args = args_of(
        make_checkpoint("one", "custom_voice_large"),
        make_checkpoint("two", "base"),
        make_checkpoint("three", "voice_design"),
    )
    assert list(graph_of(args)) == [
        *("Talker-one", "Talker-two", "Talker-three"),
        *("Codec-one", "Codec-two", "Codec-three"),
        *("ReferenceEncoder", "Ingress"),
    ]


def test_a_reference_encoder_is_bound_for_base_checkpoints_alone(make_checkpoint):
    assert "ReferenceEncoder" not in graph_of(
        AppArgs(checkpoint=make_checkpoint("large", "custom_voice_large"))
    )
    graph = graph_of(AppArgs(checkpoint=make_checkpoint("base", "base")))
    assert list(graph) == ["Talker", "Codec", "ReferenceEncoder", "Ingress"]
    assert graph["ReferenceEncoder"].max_ongoing_requests > 8


def test_models_of_an_ingress_that_decodes_have_talkers_and_encoders_of_their_own(make_checkpoint):
    one, two = make_checkpoint("one", "custom_voice_large", codec="base"), make_checkpoint("two", "base")
    graph = graph_of(args_of(one, two, ingress="codec"))
    assert list(graph) == ["Talker-one", "Talker-two", "ReferenceEncoder", "Codec"]
    codec_settings, ingress_settings, *_ = graph["Codec"].init_args
    assert codec_settings.engine.num_rows == 80
    assert [model.talker for model in ingress_settings.models] == ["Talker-one", "Talker-two"]


def test_a_shared_codec_lets_through_what_all_its_talkers_admit(make_checkpoint):
    args = args_of(
        make_checkpoint("one", "custom_voice_large", codec="base"),
        make_checkpoint("two", "base"),
        talker={"num_slots": 30, "max_queued": 20},
    )
    graph = graph_of(args)
    assert graph["Codec"].max_ongoing_requests > 100
    assert graph["Talker-one"].max_ongoing_requests < 100
