"""Uploaded voices through the HTTP API, over fake engines and a real store."""

import asyncio
import json
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.clone import VoiceLookups
from deployments.reference_fetch import FetchPolicy
from tests.clips import as_base64, form, wav_clip
from tests.deployments.conftest import GOLDEN, TINY
from tests.fakes import FakeReferenceEncoder

SPEECH, VOICES = "/v1/audio/speech", "/v1/audio/voices"
CLIP, OTHER_CLIP = wav_clip(), wav_clip(pitch_hz=330.0)


def speak(chain, **fields):
    body = json.dumps({"input": "Hello there.", "seed": 3, "max_new_tokens": 5, **fields}).encode()
    return chain.call("POST", SPEECH, body, content_type="application/json").finish()


def send(chain, **fields):
    body, content_type = form(**fields)
    return chain.call("POST", VOICES, body, content_type=content_type).finish()


async def upload(chain, name, clip=CLIP, **fields):
    call = await send(chain, name=name, audio_sample=clip, **fields)
    assert call.status == 200, call.body
    return json.loads(call.body)


async def listed(chain, query=""):
    return json.loads((await chain.call("GET", VOICES + query).finish()).body)


def delete(chain, name):
    return chain.call("DELETE", f"{VOICES}/{name}").finish()


def error_of(call):
    return json.loads(call.body)["error"]


async def spoken_with(chain, **fields):
    """The voice that reaches the Talker."""
    call = await speak(chain, **fields)
    assert call.status == 200, call.body
    return chain.talker_engine.requests[-1].reference


# ---------------------------------------------------------------- upload, use, delete
async def test_an_uploaded_voice_is_listed_and_speaks_as_its_clip_does(open_base):
    async with open_base() as chain:
        shown = await upload(chain, "Ada", ref_text="Good morning.")
        assert (shown["id"], shown["ref_text"], shown["built_in"]) == ("Ada", "Good morning.", False)
        assert (shown["clip_seconds"], shown["models"]) == (2.0, ["base"])
        assert (await listed(chain))["data"] == [shown]
        by_name = await spoken_with(chain, voice="Ada")
        by_clip = await spoken_with(chain, ref_audio=as_base64(CLIP), ref_text="Good morning.")
        assert by_name == by_clip
        assert by_name.codes
        assert (await delete(chain, "Ada")).status == 200
        gone = await speak(chain, voice="Ada")
        assert (gone.status, error_of(gone)["code"]) == (400, "unknown_voice")
        assert (await listed(chain))["data"] == []


async def test_the_field_may_be_called_file_and_the_name_is_any_case(open_base):
    async with open_base() as chain:
        assert (await send(chain, name="Ada", file=CLIP)).status == 200
        for fields in ({"voice": "ADA"}, {"speaker": "ada"}):
            assert (await speak(chain, **fields)).status == 200


async def test_a_warm_voice_costs_no_call_to_the_encoder_in_either_mode(open_base):
    encoder = FakeReferenceEncoder()
    async with open_base(encoder) as chain:
        await upload(chain, "ada", ref_text="Good morning.")
        await spoken_with(chain, voice="ada")
        before = [name for name in chain.encoder_handles["base"].calls if name != "ready"]
        in_context = await spoken_with(chain, voice="ada")
        x_vector = await spoken_with(chain, voice="ada", x_vector_only_mode=True)
        assert [name for name in chain.encoder_handles["base"].calls if name != "ready"] == before
        assert encoder.stats().num_runs == 1
        assert in_context.codes
        assert not x_vector.codes
        assert in_context.x_vector == x_vector.x_vector
        assert in_context.key != x_vector.key


async def test_without_a_transcript_the_voice_alone_is_taken_unless_the_request_brings_one(open_base):
    async with open_base() as chain:
        await upload(chain, "ada", ref_text="  ")
        assert not (await spoken_with(chain, voice="ada")).codes
        assert (await spoken_with(chain, voice="ada", ref_text="Good morning.")).codes
        call = await speak(chain, voice="ada", x_vector_only_mode=False)
        assert (call.status, error_of(call)["param"]) == (400, "ref_text")


async def test_a_request_s_transcript_goes_before_the_voice_s_own(open_base):
    async with open_base() as chain:
        await upload(chain, "ada", ref_text="Good morning.")
        plans = []
        for fields in ({}, {"ref_text": "Good morning."}, {"ref_text": "Other words entirely."}):
            await spoken_with(chain, voice="ada", non_streaming_mode=True, **fields)
            plans.append(chain.talker_engine.requests[-1].plan)
        assert plans[0] == plans[1] != plans[2]


async def test_a_name_uploaded_again_speaks_with_the_new_clip(open_base):
    async with open_base() as chain:
        await upload(chain, "ada", CLIP)
        old = await spoken_with(chain, voice="ada")
        await upload(chain, "Ada", OTHER_CLIP)
        new = await spoken_with(chain, voice="ada")
        assert new.x_vector != old.x_vector
        assert [voice["id"] for voice in (await listed(chain))["data"]] == ["Ada"]


async def test_a_name_deleted_and_uploaded_again_speaks_with_the_new_clip(open_base):
    """known_faults row 12: what is kept goes by the clip and not by its name, in both modes."""
    async with open_base() as chain:
        heard = []
        for clip in (CLIP, OTHER_CLIP):
            await upload(chain, "ada", clip, ref_text="Good morning.")
            modes = [await spoken_with(chain, voice="ada", x_vector_only_mode=m) for m in (False, True)]
            by_clip = await spoken_with(chain, ref_audio=as_base64(clip), ref_text="Good morning.")
            assert modes[0] == by_clip
            heard.append(modes)
            await delete(chain, "ada")
        for old, new in zip(*heard, strict=True):
            assert old.x_vector != new.x_vector
            assert old.key != new.key


async def test_a_voice_is_there_at_once_on_every_replica_and_after_a_restart(open_base):
    async with open_base() as one, open_base() as other:
        await upload(one, "ada", CLIP, ref_text="Good morning.")
        assert (await spoken_with(other, voice="ada")) == (await spoken_with(one, voice="ada"))
        await delete(other, "ada")
        assert (await speak(one, voice="ada")).status == 400
        await upload(one, "ada", OTHER_CLIP)
    async with open_base() as restarted:
        assert [voice["id"] for voice in (await listed(restarted))["data"]] == ["ada"]
        assert (await speak(restarted, voice="ada")).status == 200


async def test_other_weights_encode_a_stored_clip_again_and_once(open_base):
    async with open_base() as chain:
        await upload(chain, "ada", ref_text="Good morning.")
    encoder = FakeReferenceEncoder("weights-2")
    async with open_base(encoder) as chain:
        voices = [await spoken_with(chain, voice="ada") for _ in range(3)]
        x_vector = await spoken_with(chain, voice="ada", x_vector_only_mode=True)
        by_clip = await spoken_with(chain, ref_audio=as_base64(CLIP), ref_text="Good morning.")
        assert all(voice == by_clip for voice in voices)
        assert voices[0].x_vector.startswith(b"weights-2 ")
        assert x_vector.x_vector == by_clip.x_vector
        assert chain.encoder_handles["base"].calls.count("encode") == 2  # the stored one, and by_clip's file
        lookups = chain.ingress._models.default.cloner._encoder.lookups()
        assert lookups == VoiceLookups(num_hits=3, num_joined=0, num_runs=2, stored_hits=0, stored_misses=4)
    async with open_base() as chain:
        await spoken_with(chain, voice="ada")
        lookups = chain.ingress._models.default.cloner._encoder.lookups()
        assert lookups == VoiceLookups(0, 0, 0, stored_hits=1, stored_misses=0)


async def test_a_voice_replaced_while_it_is_read_speaks_with_the_new_clip(open_base, monkeypatch):
    async with open_base() as chain:
        await upload(chain, "ada", CLIP)
    async with open_base(FakeReferenceEncoder("weights-2")) as chain:
        store = chain.ingress._voices.store
        get, replaced = store.get, threading.Event()

        def get_then_replace(name):
            stored = get(name)
            if not replaced.is_set():
                replaced.set()
                engine = FakeReferenceEncoder("weights-2")
                clip = store.clip(stored.record)
                other = type(clip)(clip.samples[::-1].copy())
                store.put("ada", other, engine.encode(other, True), 16, "weights-2")
            return stored

        monkeypatch.setattr(store, "get", get_then_replace)
        voice = await spoken_with(chain, voice="ada")
        monkeypatch.undo()
        assert voice.x_vector == (await spoken_with(chain, voice="ada")).x_vector


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"name": "ada"}, 400, "audio_sample"),
        ({"audio_sample": CLIP}, 400, "name"),
        ({"name": " ", "audio_sample": CLIP}, 400, "name"),
        ({"name": "ada", "audio_sample": "text"}, 400, "audio_sample"),
        ({"name": b"ada", "audio_sample": CLIP}, 400, "name"),
        ({"name": "ada", "audio_sample": CLIP, "file": CLIP}, 400, "audio_sample"),
        ({"name": "ada", "audio_sample": CLIP, "speed": "1"}, 400, "speed"),
        ({"name": "../ada", "audio_sample": CLIP}, 400, "name"),
        ({"name": "a/b", "audio_sample": CLIP}, 400, "name"),
        ({"name": ".ada", "audio_sample": CLIP}, 400, "name"),
        ({"name": "ada lovelace", "audio_sample": CLIP}, 400, "name"),
        ({"name": "adä", "audio_sample": CLIP}, 400, "name"),
        ({"name": "a" * 65, "audio_sample": CLIP}, 400, "name"),
        ({"name": "ada\x00", "audio_sample": CLIP}, 400, "name"),
        ({"name": "ada", "audio_sample": b""}, 400, "audio_sample"),
        ({"name": "ada", "audio_sample": b"not audio"}, 400, "audio_sample"),
        ({"name": "ada", "audio_sample": wav_clip(seconds=0.2)}, 400, "audio_sample"),
        ({"name": "ada", "audio_sample": CLIP, "ref_text": "x" * 5000}, 400, "ref_text"),
        ({"name": "ada", "audio_sample": CLIP, "ref_text": "\u200b\u2800"}, 400, "ref_text"),
        ({"name": "ada", "audio_sample": CLIP, "f" * 500: "1"}, 400, "f" * 60),
        ({"name": "ada", "audio_sample": CLIP, "ref_text": "x" * 100_000}, 400, "ref_text"),
    ],
)
async def test_a_bad_upload_is_refused_by_name_and_leaves_nothing(open_base, tmp_path, fields, status, param):
    async with open_base() as chain:
        call = await send(chain, **fields)
        assert (call.status, error_of(call)["param"]) == (status, param), call.body
        assert list((tmp_path / "voices").iterdir()) == []
        if param == "name":
            assert chain.encoder_handles["base"].calls.count("encode") == 0


async def test_a_form_in_another_charset_is_refused(open_base):
    body, content_type = form(name="ada", audio_sample=CLIP)
    async with open_base() as chain:
        call = await chain.call(
            "POST", VOICES, body, content_type=f"{content_type}; charset=latin-1"
        ).finish()
    assert call.status == 415
    assert "latin-1" in error_of(call)["message"]


@pytest.mark.parametrize("field", ["voice", "speaker"])
@pytest.mark.parametrize("name", ["nope", ""])
async def test_an_unknown_voice_is_refused_by_the_field_it_came_in(open_base, field, name):
    async with open_base() as chain:
        await upload(chain, "ada")
        call = await speak(chain, **{field: name})
    assert (call.status, error_of(call)["param"]) == (400, field)
    assert "ada" in error_of(call)["message"]


async def test_a_clip_too_large_is_413_before_it_is_read_whole(open_base):
    async with open_base(policy=FetchPolicy(max_bytes=50_000)) as chain:
        assert (await send(chain, name="ada", audio_sample=CLIP)).status == 413  # 96,044 bytes
        huge = await send(chain, name="ada", audio_sample=CLIP * 40)
        assert huge.status == 413
        assert "body is larger" in error_of(huge)["message"]
        assert chain.encoder_handles["base"].calls.count("encode") == 0


async def test_a_form_is_a_form(open_base):
    async with open_base() as chain:
        json_body = await chain.call("POST", VOICES, b"{}", content_type="application/json").finish()
        no_boundary = await chain.call("POST", VOICES, b"x", content_type="multipart/form-data").finish()
        assert [call.status for call in (json_body, no_boundary)] == [415, 400]
        body, content_type = form(name="ada", audio_sample=CLIP)
        for length in (0, 50, 200, len(body) - 10):
            cut = await chain.call("POST", VOICES, body[:length], content_type=content_type).finish()
            assert cut.status == 400
            assert "ends before" in error_of(cut)["message"]


async def test_no_more_voices_than_the_limit(open_base):
    async with open_base() as chain:
        for number in range(5):
            await upload(chain, f"voice-{number}")
        call = await send(chain, name="one-more", audio_sample=CLIP)
        assert (call.status, error_of(call)["param"]) == (400, "name")
        await upload(chain, "voice-0", OTHER_CLIP)


@pytest.mark.parametrize("name", ["vivian", "VIVIAN", "Serena"])
async def test_a_built_in_name_can_be_neither_taken_nor_deleted(open_chain, name):
    """known_faults row 16: in any case of letters."""
    models = {"tiny": TINY, "base": str(GOLDEN / "base")}
    async with open_chain(models=models, encoders={"base": FakeReferenceEncoder()}) as chain:
        taken = await send(chain, name=name, audio_sample=CLIP)
        assert (taken.status, error_of(taken)["code"]) == (409, "voice_name_taken")
        assert (await delete(chain, name)).status == 400


async def test_deleting_what_is_not_there_is_404_and_odd_names_400(open_base):
    async with open_base() as chain:
        await upload(chain, "ada")
        for name, status in {"nope": 404, "../voices": 400, "..": 400, "a/b": 400, "ada.json": 400}.items():
            call = await delete(chain, name)
            assert call.status == status, name
            assert error_of(call)["message"]
        assert (await delete(chain, "ADA")).status == 200
        assert (await delete(chain, "ada")).status == 404


async def test_an_odd_voice_in_a_request_is_unknown_and_reads_no_file(open_base):
    async with open_base() as chain:
        await upload(chain, "ada")
        for name in ("../ada", "ada.json", "/etc/passwd", "ada\0"):
            call = await speak(chain, voice=name)
            assert (call.status, error_of(call)["param"]) == (400, "voice")
            assert error_of(call)["message"].endswith("accepted: ada")


async def test_without_a_base_checkpoint_there_are_no_uploaded_voices(open_chain, tmp_path):
    async with open_chain() as chain:
        for call in (await send(chain, name="ada", audio_sample=CLIP), await delete(chain, "ada")):
            assert call.status == 400
            assert "Base" in error_of(call)["message"]
        assert not (tmp_path / "voices").exists()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.binary(max_size=300), st.integers(0, 200))
def test_any_bytes_for_a_form_are_refused_not_a_fault(open_base, noise, cut):
    async def run():
        async with open_base() as chain:
            body, content_type = form(name="ada", audio_sample=CLIP[:200])
            for damaged in (noise, body[:cut] + noise + body[cut:]):
                call = await chain.call("POST", VOICES, damaged, content_type=content_type).finish()
                assert call.status in (400, 409, 413)

    asyncio.run(run())
