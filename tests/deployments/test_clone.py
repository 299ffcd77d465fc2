"""Voice clone through the HTTP API, over fake engines: which fields, which voice, and how much work."""

import asyncio
import json
import threading

import pytest

from deployments.bodies import SMALL_BODY_BYTES
from deployments.reference_fetch import FetchPolicy
from tests.clips import as_base64, wav_clip
from tests.fakes import FakeReferenceEncoder, until

SPEECH = "/v1/audio/speech"
CLIP = as_base64(wav_clip())
OTHER_CLIP = as_base64(wav_clip(pitch_hz=330.0))
IN_CONTEXT = {"ref_audio": CLIP, "ref_text": "Good morning."}
X_VECTOR = {"ref_audio": CLIP, "x_vector_only_mode": True}


def speak(chain, **fields):
    body = json.dumps({"input": "Hello there.", "seed": 3, "max_new_tokens": 5, **fields}).encode()
    return chain.call("POST", SPEECH, body, content_type="application/json")


def error_of(call):
    return json.loads(call.body)["error"]


def num_encode_calls(chain):
    return chain.encoder_handles["base"].calls.count("encode")


# ---------------------------------------------------------------- what reaches the engines
async def test_in_context_the_talker_gets_the_clips_codes_in_its_prompt_and_the_codec_primes_with_them(
    open_base,
):
    async with open_base() as chain:
        call = await speak(chain, **IN_CONTEXT).finish()
        assert call.status == 200, call.body
        (request,) = chain.talker_engine.requests
        assert len(request.reference.codes) == FakeReferenceEncoder.num_frames * 16 * 2
        assert request.plan.reference_row is not None
        assert request.plan.speaker_row is not None
        assert chain.codec_engine.references == [request.reference]


async def test_x_vector_only_takes_the_voice_and_no_codes(open_base):
    async with open_base() as chain:
        assert (await speak(chain, **X_VECTOR, ref_text="ignored").finish()).status == 200
        (request,) = chain.talker_engine.requests
        assert request.reference.codes == b""
        assert request.reference.x_vector
        assert request.plan.reference_row is None
        assert request.plan.speaker_row is not None


async def test_a_clone_follows_the_text_by_default_and_may_have_it_whole(open_base):
    async with open_base() as chain:
        for mode in (None, False, True):
            assert (await speak(chain, **X_VECTOR, non_streaming_mode=mode).finish()).status == 200
        default, streaming, full = (request.plan for request in chain.talker_engine.requests)
        assert default == streaming != full
        assert len(full.trailing_ids) == 1


# ---------------------------------------------------------------- how much work
class HeldEncoder(FakeReferenceEncoder):
    """Encodes nothing before it is released."""

    def __init__(self):
        super().__init__()
        self.num_begun, self.released = 0, threading.Event()

    def _run(self, clip, key, in_context):
        self.num_begun += 1
        assert self.released.wait(60)
        return super()._run(clip, key, in_context)


@pytest.mark.parametrize("mode", [IN_CONTEXT, X_VECTOR])
async def test_twenty_requests_with_one_clip_are_one_encode(open_base, mode):
    encoder = FakeReferenceEncoder(seconds=0.05)
    async with open_base(encoder) as chain:
        calls = [speak(chain, **mode, seed=seed) for seed in range(20)]
        assert [(await call.finish()).status for call in calls] == [200] * 20
        assert encoder.stats().num_runs == 1
        assert num_encode_calls(chain) == 1


async def test_alternating_modes_are_two_encodes_and_neither_is_served_for_the_other(open_base):
    """known_faults row 14: the mode is in the key."""
    encoder = FakeReferenceEncoder()
    async with open_base(encoder) as chain:
        for mode in (IN_CONTEXT, X_VECTOR) * 10:
            assert (await speak(chain, **mode).finish()).status == 200
        assert encoder.stats().num_runs == 2
        requests = chain.talker_engine.requests
        assert [bool(request.reference.codes) for request in requests] == [True, False] * 10
        assert len({request.reference.key for request in requests}) == 2


async def test_two_clips_at_once_are_two_voices(open_base):
    async with open_base(FakeReferenceEncoder(seconds=0.02)) as chain:
        calls = [speak(chain, ref_audio=c, x_vector_only_mode=True) for c in (CLIP, OTHER_CLIP) * 3]
        for call in calls:
            assert (await call.finish()).status == 200
        voices = {request.reference.x_vector for request in chain.talker_engine.requests}
        assert len(voices) == 2
        assert num_encode_calls(chain) == 2


async def test_a_warm_clip_costs_no_call(open_base):
    async with open_base() as chain:
        await speak(chain, **IN_CONTEXT).finish()
        before = list(chain.encoder_handles["base"].calls)
        await speak(chain, **{**IN_CONTEXT, "ref_text": "Other words."}, input="Another text.").finish()
        after = [name for name in chain.encoder_handles["base"].calls if name != "ready"]
        assert after == [name for name in before if name != "ready"]


async def test_a_clip_travels_by_object_reference(open_base):
    async with open_base() as chain:
        await speak(chain, **X_VECTOR).finish()
        assert {"_by_reference": True} in chain.encoder_handles["base"].options_seen


async def test_a_client_that_leaves_while_its_clip_is_encoded_holds_up_nobody(open_base):
    encoder = HeldEncoder()
    async with open_base(encoder) as chain:
        leaving, staying = (speak(chain, **IN_CONTEXT) for _ in range(2))
        await until(lambda: encoder.num_begun == 1)
        await leaving.leave()
        encoder.released.set()
        assert (await staying.finish()).status == 200
        assert len(chain.talker_engine.requests) == 1
        assert num_encode_calls(chain) == 1
        await until(lambda: chain.num_held == 0)


async def test_health_answers_while_clips_are_encoded(open_base):
    encoder = HeldEncoder()
    async with open_base(encoder) as chain:
        await until(lambda: not chain.ingress._readiness.problems())
        calls = [speak(chain, ref_audio=clip, x_vector_only_mode=True) for clip in (CLIP, OTHER_CLIP)]
        await until(lambda: encoder.num_begun == 2)
        assert (await chain.call("GET", "/health").finish()).status == 200
        encoder.released.set()
        for call in calls:
            assert (await call.finish()).status == 200


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "ref_audio", "send ref_audio"),
        ({"ref_text": "Hi."}, "ref_audio", "send ref_audio"),
        ({"ref_audio": CLIP}, "ref_text", "x_vector_only_mode true"),
        ({"ref_audio": CLIP, "ref_text": ""}, "ref_text", "x_vector_only_mode true"),
        ({"ref_audio": CLIP, "x_vector_only_mode": False}, "ref_text", "x_vector_only_mode true"),
        ({"ref_audio": CLIP, "ref_text": " \n"}, "ref_text", "whitespace"),
        ({"ref_audio": CLIP, "ref_text": "x" * 5000}, "ref_text", "4096"),
        ({**X_VECTOR, "voice": "vivian"}, "voice", "both"),
        ({"voice": "vivian"}, "voice", "unknown voice 'vivian'"),
        ({**X_VECTOR, "task_type": "CustomVoice"}, "task_type", "base is a Base checkpoint"),
        ({**X_VECTOR, "task_type": "base"}, "task_type", '"Base"'),
        ({**X_VECTOR, "instructions": "Whisper."}, "instructions", "takes no instructions"),
        ({"ref_audio": "", "x_vector_only_mode": True}, "ref_audio", "empty"),
        ({"ref_audio": "?!", "x_vector_only_mode": True}, "ref_audio", "neither a URL nor base64"),
        ({"ref_audio": "file:///etc/passwd", "x_vector_only_mode": True}, "ref_audio", "file: URLs"),
        ({"ref_audio": "https://127.0.0.1/a.wav", "x_vector_only_mode": True}, "ref_audio", "public"),
        ({"ref_audio": "aGVsbG8=", "x_vector_only_mode": True}, "ref_audio", "can't be decoded"),
        ({"ref_audio": 5}, "ref_audio", "a string"),
        ({**X_VECTOR, "x_vector_only_mode": "true"}, "x_vector_only_mode", "true or false"),
        ({**X_VECTOR, "input": ""}, "input", "must hold text"),
        ({**X_VECTOR, "language": "klingon"}, "language", "unknown language"),
    ],
)
async def test_a_refusal_names_the_field_and_starts_nothing(open_base, fields, param, words):
    """known_faults rows 44 and 45: a clip without its text, files and private addresses are 400."""
    async with open_base() as chain:
        call = await speak(chain, **fields).finish()
        assert (call.status, error_of(call)["param"]) == (400, param)
        assert words in error_of(call)["message"]
        assert chain.talker_engine.requests == []


async def test_what_can_be_refused_without_the_clip_costs_no_encode(open_base):
    async with open_base() as chain:
        for fields in ({"input": " "}, {"language": "nope"}, {"instructions": "Sing."}, {"ref_text": " "}):
            assert (await speak(chain, **{**IN_CONTEXT, **fields}).finish()).status == 400
        assert num_encode_calls(chain) == 0


@pytest.mark.parametrize("field", ["ref_audio", "ref_text", "x_vector_only_mode"])
async def test_other_checkpoints_take_no_clip(open_chain, field):
    async with open_chain() as chain:
        call = await speak(chain, **{field: {**IN_CONTEXT, "x_vector_only_mode": False}[field]}).finish()
        assert (call.status, error_of(call)["param"]) == (400, field)
        assert "CustomVoice" in error_of(call)["message"]


@pytest.mark.parametrize("task_type", ["Base", "VoiceDesign"])
async def test_a_task_that_is_not_the_models_is_refused_by_its_name(open_chain, task_type):
    async with open_chain() as chain:
        call = await speak(chain, task_type=task_type).finish()
        assert (call.status, error_of(call)["param"]) == (400, "task_type")
        assert (await speak(chain, task_type="CustomVoice").finish()).status == 200


# ---------------------------------------------------------------- sizes
async def test_a_body_may_hold_a_whole_clip_and_not_more(open_base, open_chain):
    policy = FetchPolicy(max_bytes=1 << 20)
    big = as_base64(wav_clip(seconds=20))  # 960,044 bytes
    async with open_base(policy=policy) as chain:
        assert len(big) > SMALL_BODY_BYTES
        assert (await speak(chain, ref_audio=big, x_vector_only_mode=True).finish()).status == 200
        too_long = await speak(chain, ref_audio="A" * (1_500_000), x_vector_only_mode=True).finish()
        assert (too_long.status, error_of(too_long)["param"]) == (400, "ref_audio")
        huge = await speak(chain, ref_audio="A" * (2 << 20), x_vector_only_mode=True).finish()
        assert huge.status == 413
    async with open_chain() as chain:
        assert (await speak(chain, ref_audio=big).finish()).status == 413


async def test_large_bodies_are_bounded_together_and_given_back(open_base):
    big = as_base64(wav_clip(seconds=20))
    encoder = HeldEncoder()
    async with open_base(encoder) as chain:
        chain.ingress._bodies._max_held_bytes = 1_500_000
        first = speak(chain, ref_audio=big, x_vector_only_mode=True)
        await until(lambda: encoder.num_begun == 1)
        second = await speak(chain, ref_audio=big, x_vector_only_mode=True).finish()
        small = speak(chain, **X_VECTOR)
        await until(lambda: encoder.num_begun == 2)
        assert (second.status, second.headers["retry-after"]) == (503, "1")
        encoder.released.set()
        assert (await small.finish()).status == 200
        assert (await first.finish()).status == 200
        assert chain.ingress._bodies.num_held_bytes == 0
        assert (await speak(chain, ref_audio=big, x_vector_only_mode=True).finish()).status == 200


async def test_a_long_text_beside_a_clip_is_still_bounded(open_base):
    async with open_base() as chain:
        call = await speak(chain, **X_VECTOR, input="word " * 100_000).finish()
        assert (call.status, error_of(call)["param"]) == (400, "input")


async def test_a_client_that_leaves_before_its_body_is_read_is_no_fault(open_base, caplog):
    async with open_base() as chain:
        call = speak(chain, **X_VECTOR)
        call._request[:] = [{"type": "http.disconnect"}]
        await call.finish()
        assert chain.talker_engine.requests == []
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
    await asyncio.sleep(0)
