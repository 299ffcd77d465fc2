"""Many texts in one request, over fake engines: each result is its item's own, good or bad."""

import asyncio
import base64
import json

import numpy as np
import pytest

from deployments import batch
from deployments.batch import MAX_ITEMS, parse_batch_body
from deployments.bodies import SMALL_BODY_BYTES
from qwen3tts_core.errors import InvalidRequest
from tests.clips import as_base64, wav_clip
from tests.fakes import Script, fake_codes, until

SPEECH, BATCH = "/v1/audio/speech", "/v1/audio/speech/batch"


def start(chain, items, **defaults):
    body = json.dumps({"items": items, **defaults}).encode()
    return chain.call("POST", BATCH, body, content_type="application/json", x_request_id="mine")


async def speak(chain, items, **defaults):
    call = await start(chain, items, **defaults).finish()
    assert call.status == 200, call.body
    return json.loads(call.body)


def texts(count, **fields):
    return [{"input": "Hello there.", "seed": seed, **fields} for seed in range(count)]


def expected_pcm(num_frames, seed):
    return np.repeat(fake_codes(seed, 0, num_frames)[:, 0], 1920).astype("<i2").tobytes()


# ---------------------------------------------------------------- good items
async def test_32_items_are_each_what_they_are_alone(open_chain):
    async with open_chain(talker=Script(num_frames=9)) as chain:
        told = await speak(chain, texts(MAX_ITEMS), response_format="pcm")
        body = json.dumps({**texts(5)[4], "response_format": "pcm"}).encode()
        alone = await chain.call("POST", SPEECH, body, content_type="application/json").finish()
        await until(lambda: chain.num_held == 0)
    assert [result["index"] for result in told["data"]] == list(range(MAX_ITEMS))
    for result in told["data"]:
        assert base64.b64decode(result["audio"]) == expected_pcm(9, result["index"])
        assert (result["status"], result["content_type"]) == (200, "audio/pcm")
        assert (result["finish_reason"], result["num_frames"], result["seed"]) == ("stop", 9, result["index"])
        assert result["audio_seconds"] == pytest.approx(0.72)
        assert result["request_id"] == f"mine-{result['index']}"
        assert result["usage"]["total_tokens"] == result["usage"]["input_tokens"] + 9
    assert base64.b64decode(told["data"][4]["audio"]) == alone.body
    assert told["num_failed"] == 0
    assert told["usage"]["output_tokens"] == 9 * MAX_ITEMS
    assert told["usage"]["input_tokens"] == sum(r["usage"]["input_tokens"] for r in told["data"])


async def test_items_override_the_defaults_field_by_field(open_chain):
    async with open_chain(talker=Script(num_frames=9)) as chain:
        items = [{"seed": 1}, {"seed": 2, "response_format": "pcm"}, {"seed": 3, "voice": None}]
        items += [{"seed": 4, "speaker": "vivian"}, {"seed": 5, "input": "Other words."}]
        told = await speak(chain, items, input="Hello there.", voice="serena", response_format="wav")
        by_seed = {request.seed: request.plan for request in chain.talker_engine.requests}
    assert [result["status"] for result in told["data"]] == [200] * 5
    assert [result["content_type"] for result in told["data"]] == [
        "audio/wav", "audio/pcm", "audio/wav", "audio/wav", "audio/wav",
    ]  # fmt: skip
    assert by_seed[1] == by_seed[2] == by_seed[3]
    assert by_seed[4] != by_seed[1] != by_seed[5]


# ---------------------------------------------------------------- bad ones
async def test_a_bad_item_is_told_in_its_place_and_the_others_speak(open_chain):
    bad = [{"voice": "nope"}, {"seed": "x"}, {"nope": 1}, {"stream": True}, {"model": "nope"}, {"input": " "}]
    async with open_chain(talker=Script(num_frames=5)) as chain:
        told = await speak(chain, [*texts(1), *({**texts(1)[0], **fields} for fields in bad), {}])
    assert [result["status"] for result in told["data"]] == [200, 400, 400, 400, 400, 404, 400, 400]
    params = [result["error"]["param"] for result in told["data"][1:]]
    assert params == ["voice", "seed", "nope", "stream", "model", "input", "input"]
    for result in told["data"][1:]:
        assert set(result["error"]) == {"message", "type", "param", "code"}
        assert "audio" not in result
    assert told["num_failed"] == 7


async def test_a_fault_is_its_items_own_and_told_without_details(open_chain):
    async with open_chain(talker=Script(num_frames=9, fail_after_frames=1)) as chain:
        told = await speak(chain, [*texts(1), *texts(1, max_new_tokens=1)])
        await until(lambda: chain.num_held == 0)
    assert [result["status"] for result in told["data"]] == [500, 200]
    assert "secret" not in json.dumps(told)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"{}", "items"),
        (b'{"items": []}', "items"),
        (b'{"items": {}}', "items"),
        (b'{"items": ["Hello."]}', "items"),
        (json.dumps({"items": [{"input": "Hi."}] * (MAX_ITEMS + 1)}).encode(), "items"),
        (b'{"items": [{"input": "Hi."}], "nope": 1}', "nope"),
        (b'{"items": [{"input": "Hi."}], "seed": "x"}', "seed"),
        (b'{"items": [{"input": "Hi."}], "voice": ""}', "voice"),
        (b'{"items": [{"input": "Hi."}], "stream": true}', "stream"),
        (b'{"items": [{"input": "Hi."}], "stream_format": "sse"}', "stream"),
    ],
)
async def test_a_body_that_is_no_batch_is_refused_as_a_whole(open_chain, body, param):
    async with open_chain() as chain:
        call = await chain.call("POST", BATCH, body, content_type="application/json").finish()
        assert (call.status, json.loads(call.body)["error"]["param"]) == (400, param)
        assert chain.talker_engine.requests == []


async def test_content_type_and_size_are_as_for_one(open_chain):
    async with open_chain() as chain:
        huge = b" " * (4 * SMALL_BODY_BYTES + 1)
        calls = [
            await chain.call("POST", BATCH, body, content_type=content_type).finish()
            for body, content_type in ((b"{}", "text/plain"), (huge, "application/json"))
        ]
    assert [call.status for call in calls] == [415, 413]


def test_a_deeply_nested_body_is_refused():
    with pytest.raises(InvalidRequest):
        parse_batch_body(b'{"items": ' + b"[" * 5000)


async def test_audio_beyond_the_answers_limit_is_an_error_of_its_item(open_chain, monkeypatch):
    monkeypatch.setattr(batch, "MAX_AUDIO_BYTES", 3 * (44 + 5 * 3840))
    async with open_chain(talker=Script(num_frames=5)) as chain:
        told = await speak(chain, texts(5))
    assert sorted(result["status"] for result in told["data"]) == [200, 200, 200, 400, 400]


async def test_clips_come_with_items(open_base):
    clone = {"ref_audio": as_base64(wav_clip()), "x_vector_only_mode": True}
    async with open_base() as chain:
        told = await speak(chain, [clone, {**clone, "ref_audio": "!"}, {}], input="Hello there.")
        assert chain.ingress._bodies.num_held_bytes == 0
    assert [result["status"] for result in told["data"]] == [200, 400, 400]


# ---------------------------------------------------------------- room
async def test_a_batch_holds_few_places_and_waits_for_room(open_chain):
    """Another client's requests find room beside it, and it finishes in a server that is full for a while."""
    slow = Script(num_frames=20, seconds_per_item=0.01, capacity=9)
    async with open_chain(talker=slow) as chain:
        call = await start(chain, texts(MAX_ITEMS, response_format="pcm")).finish()
        assert json.loads(call.body)["num_failed"] == 0
        assert 1 < chain.talker_engine.most_active <= 8


async def test_a_refused_item_is_tried_again_until_there_is_room(open_chain):
    async with open_chain(talker=Script(num_frames=300, seconds_per_item=0.05, capacity=1)) as chain:
        body = json.dumps({"input": "Hello.", "max_new_tokens": 300, "stream": True}).encode()
        other = chain.call("POST", SPEECH, body, content_type="application/json")
        await other.wait_for_parts(1)
        call = start(chain, texts(1, max_new_tokens=3))
        await other.finish()
        told = json.loads((await call.finish()).body)
    assert told["data"][0]["status"] == 200


async def test_an_item_that_finds_no_room_is_a_503_in_its_place(open_chain, monkeypatch):
    monkeypatch.setattr(batch, "TRY_AGAIN_FOR_S", 0.5)
    async with open_chain(talker=Script(capacity=0)) as chain:
        told = await speak(chain, texts(3))
    assert [(r["status"], r["error"]["code"]) for r in told["data"]] == [(503, "overloaded")] * 3


async def test_leaving_cancels_every_item(open_chain):
    async with open_chain(talker=Script(num_frames=20_000, seconds_per_item=0.002)) as chain:
        await until(lambda: not chain.ingress._readiness.problems())
        tasks_before = asyncio.all_tasks()
        for _ in range(10):
            call = start(chain, texts(MAX_ITEMS, max_new_tokens=4000))
            await until(lambda: chain.talker_engine.stats().num_active >= 2)
            await call.leave()
            await until(lambda: chain.num_held == 0)
            num_started = len(chain.talker_engine.requests)
        await asyncio.sleep(0.1)
        assert len(chain.talker_engine.requests) == num_started
        num_questions = 2  # "ready?", always with Talker and Codec
        await until(lambda: len(asyncio.all_tasks()) <= len(tasks_before) + num_questions)
        assert chain.ingress._bodies.num_held_bytes == 0


@pytest.mark.parametrize("name", ["model", "voice", "speaker", "language"])
def test_an_empty_name_for_all_is_refused_for_all(name):
    with pytest.raises(InvalidRequest, match="GET /v1/") as caught:
        parse_batch_body(json.dumps({"items": [{"input": "Hi."}], name: ""}).encode())
    assert caught.value.param == name


@pytest.mark.parametrize(
    "raw", [b'{"items": [{"input": "a", "input": "b"}]}', b'{"items": [], "items": [{"input": "a"}]}']
)
def test_a_key_that_is_there_twice_is_refused_wherever_it_is(raw):
    with pytest.raises(InvalidRequest, match="twice"):
        parse_batch_body(raw)
