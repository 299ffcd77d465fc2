"""Several models in one app, over fake engines: each request finds its own talker."""

import json

import pytest

from deployments.frontend import Frontend
from deployments.served_models import ServedModel, ServedModels
from qwen3tts_core.errors import UnknownModel
from tests.clips import as_base64, form, wav_clip
from tests.deployments.conftest import GOLDEN, TINY
from tests.fakes import FakeReferenceEncoder

SPEECH, VOICES = "/v1/audio/speech", "/v1/audio/voices"
MODELS = {
    "tiny": TINY,
    "large": str(GOLDEN / "custom_voice_large"),
    "design": str(GOLDEN / "voice_design"),
    "base": str(GOLDEN / "base"),
}
CLONE = {"ref_audio": as_base64(wav_clip()), "x_vector_only_mode": True}


@pytest.fixture
def open_all(open_chain):
    return lambda: open_chain(models=MODELS, encoders={"base": FakeReferenceEncoder()})


def speak(chain, **fields):
    body = json.dumps({"input": "Hello there.", "seed": 3, "max_new_tokens": 5, **fields}).encode()
    return chain.call("POST", SPEECH, body, content_type="application/json").finish()


async def get(chain, path):
    call = await chain.call("GET", path).finish()
    return call.status, json.loads(call.body)


async def test_a_request_goes_to_its_models_talker_and_to_the_first_without_one(open_all):
    async with open_all() as chain:
        for seed, name in enumerate(("large", "design", "tiny", "large", None)):
            assert (await speak(chain, model=name, seed=seed)).status == 200
        assert (await speak(chain, model="base", seed=5, **CLONE)).status == 200
        seeds = {
            name: [request.seed for request in engine.requests]
            for name, engine in chain.talker_engines.items()
        }
        assert seeds == {"tiny": [2, 4], "large": [0, 3], "design": [1], "base": [5]}


async def test_what_a_request_may_say_is_its_models_business(open_all):
    async with open_all() as chain:
        refused = {
            "tiny": [{"instructions": "Whisper."}, CLONE, {"task_type": "VoiceDesign"}],
            "large": [CLONE, {"task_type": "Base"}],
            "design": [{"voice": "vivian"}, CLONE, {"task_type": "CustomVoice"}],
            "base": [{}, {"voice": "vivian"}, {**CLONE, "instructions": "Whisper."}],
        }
        for name, bodies in refused.items():
            for fields in bodies:
                assert (await speak(chain, model=name, **fields)).status == 400, (name, fields)
        accepted = {
            "tiny": [{"voice": "vivian"}, {"task_type": "CustomVoice"}],
            "large": [{"instructions": "Whisper."}],
            "design": [{}, {"instructions": "An old sailor."}, {"task_type": "VoiceDesign"}],
            "base": [CLONE, {**CLONE, "task_type": "Base"}],
        }
        for name, bodies in accepted.items():
            for fields in bodies:
                assert (await speak(chain, model=name, **fields)).status == 200, (name, fields)


async def test_a_voice_description_goes_into_the_prompt(open_all):
    async with open_all() as chain:
        for fields in ({}, {"instructions": "An old sailor."}, {"non_streaming_mode": False}):
            await speak(chain, model="design", **fields)
        bare, described, streaming = (request.plan for request in chain.talker_engines["design"].requests)
        assert described.num_rows > bare.num_rows > streaming.num_rows


async def test_models_and_voices_list_everything_and_may_be_asked_for_one(open_all):
    async with open_all() as chain:
        body, content_type = form(name="ada", audio_sample=wav_clip())
        assert (await chain.call("POST", VOICES, body, content_type=content_type).finish()).status == 200
        _, models = await get(chain, "/v1/models")
        assert [(m["id"], m["task_type"]) for m in models["data"]] == [
            ("tiny", "CustomVoice"),
            ("large", "CustomVoice"),
            ("design", "VoiceDesign"),
            ("base", "Base"),
        ]
        _, every = await get(chain, VOICES)
        by_name = {voice["id"]: voice for voice in every["data"]}
        assert by_name["ada"]["models"] == ["base"]
        assert by_name["vivian"]["models"] == ["tiny", "large"]
        assert every["default"] == chain.ingress._models.default.frontend.default_voice
        for name, expected in {"base": {"ada"}, "design": set(), "large": set(by_name) - {"ada"}}.items():
            _, own = await get(chain, f"{VOICES}?model={name}")
            assert set(own["voices"]) == expected
            assert (own["default"] is None) == (name in ("base", "design"))
        assert (await get(chain, f"{VOICES}?model=nope"))[0] == 404


async def test_health_names_whichever_talker_is_down(open_all):
    async with open_all() as chain:
        readiness = chain.ingress._readiness
        assert set(readiness.problems()) == {
            *("Talker", "Talker-large", "Talker-design", "Talker-base"),
            *("Codec", "Encoder-base"),
        }


@pytest.fixture(scope="module")
def frontends():
    folder = GOLDEN / "voice_design"
    return [Frontend.from_checkpoint(folder, model_name=name, max_positions=64) for name in ("a", "b")]


def test_a_models_own_name_goes_before_an_alias_and_the_first_alias_before_a_later(frontends):
    a, b = (
        ServedModel(frontend, None, None, aliases)
        for frontend, aliases in zip(frontends, (("b", "short"), ("short",)), strict=True)
    )
    models = ServedModels([a, b])
    assert models.find(None) is models.find("a") is models.find("short") is a
    assert models.find("b") is b
    with pytest.raises(UnknownModel, match=r"accepted: a, b, short$"):
        models.find("nope")
