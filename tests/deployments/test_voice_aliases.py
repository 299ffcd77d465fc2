"""Aliases of voices: each test here would fail without the line of the config that it is about."""

import json

import pytest
from pydantic import ValidationError

from deployments.app_args import AppArgs
from deployments.plan import plan_app
from tests.clips import form, wav_clip
from tests.deployments.conftest import GOLDEN, TINY
from tests.fakes import FakeReferenceEncoder

SPEECH, VOICES = "/v1/audio/speech", "/v1/audio/voices"
BASE = str(GOLDEN / "base")


async def speak(chain, **fields):
    body = json.dumps({"input": "Hello there.", "seed": 3, "response_format": "pcm", **fields}).encode()
    return await chain.call("POST", SPEECH, body, content_type="application/json").finish()


async def listed(chain):
    return json.loads((await chain.call("GET", VOICES).finish()).body)


def planned(aliases, checkpoint=TINY):
    return plan_app(AppArgs.model_validate({"checkpoint": checkpoint, "voice_aliases": aliases}))


# ---------------------------------------------------------------- at the start
@pytest.mark.parametrize(
    ("checkpoint", "aliases", "words"),
    [
        (TINY, {"alloy": "nope"}, "'alloy' leads to 'nope'.*vivian"),
        (TINY, {"alloy": "echo", "echo": "vivian"}, "'alloy' leads to 'echo'"),
        (TINY, {"Vivian": "serena"}, "'Vivian' is a voice itself"),
        (BASE, {"alloy": "no such/name"}, "uploaded voice"),
        (BASE, {"alloy": "Echo", "echo": "ada"}, "'alloy' leads to 'Echo'"),
    ],
)
def test_an_alias_that_leads_nowhere_or_hides_a_voice_stops_the_start(checkpoint, aliases, words):
    with pytest.raises(ValueError, match=words):
        planned(aliases, checkpoint)


@pytest.mark.parametrize("aliases", [{"alloy": "vivian", "Alloy": "serena"}, {"": "vivian"}, {"alloy": 7}])
def test_aliases_that_are_none_stop_the_start_by_key(aliases):
    with pytest.raises(ValidationError, match="voice_aliases"):
        AppArgs.model_validate({"checkpoint": "x", "voice_aliases": aliases})


def test_an_alias_may_lead_to_a_voice_or_to_an_upload_still_to_come():
    planned({"alloy": "Vivian"})
    planned({"alloy": "ada"}, BASE)


async def test_an_alias_may_not_hide_an_uploaded_voice(open_base):
    async with open_base() as chain:
        body, content_type = form(audio_sample=wav_clip(), name="Ada", ref_text="Hello.")
        await chain.call("POST", VOICES, body, content_type=content_type).finish()
    with pytest.raises(ValueError, match="'Ada' is an uploaded voice"):
        async with open_base(voice_aliases={"ada": "eve"}):
            pass


# ---------------------------------------------------------------- requests
@pytest.mark.parametrize("field", ["voice", "speaker"])
@pytest.mark.parametrize("name", ["alloy", "Alloy", "ALLOY"])
async def test_an_alias_speaks_as_its_voice_in_any_case(open_chain, field, name):
    """known_faults row 17: an alias is honoured, and nothing falls back in silence."""
    async with open_chain(voice_aliases={"Alloy": "Serena"}) as chain:
        for fields in ({field: name}, {"voice": "serena"}, {"voice": "vivian"}):
            assert (await speak(chain, **fields)).status == 200
        alias, own, other = (request.plan for request in chain.talker_engine.requests)
    assert alias == own != other


async def test_a_name_that_is_no_alias_stays_unknown(open_chain):
    """known_faults row 17."""
    async with open_chain(voice_aliases={"alloy": "serena"}) as chain:
        call = await speak(chain, voice="echo")
        assert call.status == 400
        assert json.loads(call.body)["error"]["code"] == "unknown_voice"
        assert chain.talker_engine.requests == []


async def test_aliases_are_listed_beside_the_voices_they_mean(open_chain):
    async with open_chain(voice_aliases={"alloy": "Serena"}) as chain:
        shown = await listed(chain)
    by_id = {voice["id"]: voice for voice in shown["data"]}
    assert by_id["alloy"] == {**by_id["serena"], "id": "alloy", "alias_of": "serena"}
    assert shown["voices"] == list(by_id)


async def test_an_alias_of_an_uploaded_voice_works_once_that_is_there(open_chain):
    models, encoders = {"base": BASE}, {"base": FakeReferenceEncoder()}
    async with open_chain(models=models, encoders=encoders, voice_aliases={"alloy": "ada"}) as chain:
        assert (await speak(chain, voice="alloy")).status == 400
        assert "alloy" not in (await listed(chain))["voices"]
        for name, status in (("ada", 200), ("Alloy", 409)):
            body, content_type = form(audio_sample=wav_clip(), name=name, ref_text="Hello.")
            call = await chain.call("POST", VOICES, body, content_type=content_type).finish()
            assert call.status == status
        assert (await speak(chain, voice="Alloy")).status == 200
        assert "alloy" in (await listed(chain))["voices"]
