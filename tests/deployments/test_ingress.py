"""The HTTP API over the whole chain with fake engines: no Ray, no sockets, no model."""

import asyncio
import base64
import io
import json
import logging
import threading
import wave

import numpy as np
import pytest

from deployments.bodies import SMALL_BODY_BYTES
from deployments.reader_pace import PART_BYTES
from tests.fakes import Script, fake_codes, until

pytestmark = pytest.mark.both_shapes

SPEECH = "/v1/audio/speech"


def speak(chain, headers=None, **fields):
    body = json.dumps({"input": "Hello there.", "seed": 3, **fields}).encode()
    return chain.call("POST", SPEECH, body, **{"content_type": "application/json", **(headers or {})})


async def ask(chain, path, method="GET"):
    return await chain.call(method, path).finish()


def expected_pcm(num_frames, seed=3):
    return np.repeat(fake_codes(seed, 0, num_frames)[:, 0], 1920).astype("<i2").tobytes()


def events(body):
    blocks = body.decode().removesuffix("\n\n").split("\n\n")
    parsed = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]
    for event in parsed:
        assert json.loads(event["data"])["type"] == event["event"]
    return [json.loads(event["data"]) for event in parsed]


def sse_audio(body):
    return b"".join(base64.b64decode(e["audio"]) for e in events(body) if e["type"] == "speech.audio.delta")


def error_of(call):
    assert call.headers["content-type"] == "application/json"
    error = json.loads(call.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# ---------------------------------------------------------------- good answers
async def test_a_whole_wav_has_true_sizes_and_says_how_it_ended(open_chain):
    """known_faults row 43: each frame's samples once."""
    async with open_chain(talker=Script(num_frames=9)) as chain:
        call = await speak(chain).finish()
    assert (call.status, call.headers["content-type"]) == (200, "audio/wav")
    assert int(call.headers["content-length"]) == len(call.body)
    with wave.open(io.BytesIO(call.body)) as reader:
        assert reader.readframes(reader.getnframes()) == expected_pcm(9)
        assert reader.getnframes() == 9 * 1920
    headers = {
        name: call.headers[name] for name in ("x-finish-reason", "x-num-frames", "x-seed", "x-audio-seconds")
    }
    assert headers == {
        "x-finish-reason": "stop",
        "x-num-frames": "9",
        "x-seed": "3",
        "x-audio-seconds": "0.72",
    }
    assert len(call.parts) == 1


async def test_a_streamed_wav_has_one_header_and_unknown_sizes(open_chain):
    async with open_chain(talker=Script(num_frames=60)) as chain:
        call = await speak(chain, stream=True).finish()
    assert call.body.count(b"RIFF") == 1
    assert call.body[4:8] == call.body[40:44] == b"\xff" * 4
    assert call.body[44:] == expected_pcm(60)
    assert "content-length" not in call.headers
    assert call.is_complete
    whole, rest = PART_BYTES, 25 * 3840 - PART_BYTES  # of the largest chunk
    assert [len(part) for _, part in call.parts] == [
        44 + 3840,
        *(n * 3840 for n in (3, 8, 16)),
        whole,
        rest,
        7 * 3840,
    ]


@pytest.mark.parametrize("response_format", ["wav", "pcm"])
async def test_whole_streamed_and_sse_bodies_carry_the_same_bytes(open_chain, response_format):
    async with open_chain(talker=Script(num_frames=60)) as chain:
        whole, raw, sse = [
            (await speak(chain, response_format=response_format, **mode).finish()).body
            for mode in ({}, {"stream": True}, {"stream": True, "stream_format": "sse"})
        ]
    header = 44 if response_format == "wav" else 0
    assert raw[header:] == whole[header:] == expected_pcm(60)
    assert sse_audio(sse) == raw


async def test_sse_ends_with_usage_and_the_finish_reason(open_chain):
    async with open_chain(talker=Script(num_frames=9)) as chain:
        call = await speak(chain, stream_format="sse").finish()
    assert call.headers["content-type"].startswith("text/event-stream")
    kinds = [event["type"] for event in events(call.body)]
    assert kinds == ["speech.audio.delta"] * 3 + ["speech.audio.done"]
    done = events(call.body)[-1]
    assert (done["finish_reason"], done["num_frames"], done["seed"]) == ("stop", 9, 3)
    assert done["usage"]["output_tokens"] == 9
    assert done["usage"]["input_tokens"] > 0
    assert done["usage"]["total_tokens"] == done["usage"]["input_tokens"] + 9


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_max_new_tokens_is_the_number_of_frames_returned(open_chain, limit):
    """known_faults row 43: as many frames as there are."""
    async with open_chain(talker=Script(num_frames=60)) as chain:
        call = await speak(chain, response_format="pcm", max_new_tokens=limit).finish()
    assert call.body == expected_pcm(limit)
    assert call.headers["x-finish-reason"] == "length"


async def test_an_absent_seed_is_drawn_and_reported(open_chain):
    async with open_chain() as chain:
        calls = [await speak(chain, seed=None, response_format="pcm").finish() for _ in range(2)]
    seeds = [int(call.headers["x-seed"]) for call in calls]
    assert seeds[0] != seeds[1]
    assert [call.body for call in calls] == [expected_pcm(9, seed) for seed in seeds]


async def test_first_bytes_leave_before_the_last_frame_is_made(open_chain):
    """known_faults row 20: no pseudo-streaming."""
    script = Script(num_frames=60, permits=threading.Semaphore(1))
    async with open_chain(talker=script) as chain:
        call = speak(chain, stream=True)
        await call.wait_for_parts(1)
        assert len(call.parts) == 1
        script.permits.release(5)
        await call.finish()
    assert len(call.parts) == 7  # six chunks, one of them in two parts


async def test_many_at_once_get_their_own_audio(open_chain):
    async with open_chain(talker=Script(num_frames=20)) as chain:
        calls = [speak(chain, seed=seed, response_format="pcm", stream=bool(seed % 2)) for seed in range(32)]
        for seed, call in enumerate(calls):
            assert (await call.finish()).body == expected_pcm(20, seed)
        await until(lambda: chain.num_held == 0)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nope"}, 404, "model"),
        ({"voice": "nope"}, 400, "voice"),
        ({"speaker": "nope"}, 400, "speaker"),
        ({"model": ""}, 404, "model"),
        ({"voice": ""}, 400, "voice"),
        ({"language": ""}, 400, "language"),
        ({"input": "\u200b\u2800"}, 400, "input"),
        ({"language": "nope"}, 400, "language"),
        ({"response_format": "m4a"}, 400, "response_format"),
        ({"sample_rate": 44_100}, 400, "sample_rate"),
        ({"speed": 5}, 400, "speed"),
        ({"pitch": 2}, 400, "pitch"),
        ({"stream": "false"}, 400, "stream"),
        ({"seed": True}, 400, "seed"),
        ({"input": " \n"}, 400, "input"),
        ({"input": "word " * 5000}, 400, "input"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_input_is_refused_before_any_audio_header(open_chain, fields, status, param, stream):
    async with open_chain() as chain:
        call = await speak(chain, **{"stream": stream, **fields}).finish()
        assert call.status == status
        assert error_of(call)["param"] == param
        assert chain.talker_engine.requests == []


async def test_wrong_content_type_malformed_json_and_huge_bodies_are_refused(open_chain):
    async with open_chain() as chain:
        form = await chain.call(
            "POST", SPEECH, b"input=a", content_type="application/x-www-form-urlencoded"
        ).finish()
        broken = await chain.call(
            "POST", SPEECH, b"{", content_type="application/json; charset=utf-8"
        ).finish()
        huge = await chain.call(
            "POST", SPEECH, b" " * (SMALL_BODY_BYTES + 1), content_type="application/json"
        ).finish()
    assert [call.status for call in (form, broken, huge)] == [415, 400, 413]
    assert "application/json" in error_of(form)["message"]
    assert "not valid JSON" in error_of(broken)["message"]
    assert "limit" in error_of(huge)["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_type": "application/json; charset=UTF-8"}, 200),
        ({"content_type": 'application/json; charset="utf-8"'}, 200),
        ({"content_type": "application/json; charset=utf-16"}, 415),
        ({"content_type": "application/json;charset=latin-1"}, 415),
        ({"content_encoding": "gzip"}, 415),
        ({"content_encoding": "identity"}, 200),
    ],
)
@pytest.mark.parametrize("path", [SPEECH, f"{SPEECH}/batch"])
async def test_a_body_in_another_form_than_plain_utf8_is_refused(open_chain, path, headers, status):
    body = json.dumps({"items": [{"input": "Hi."}]} if path != SPEECH else {"input": "Hi."}).encode()
    async with open_chain() as chain:
        call = await chain.call(
            "POST", path, body, **{"content_type": "application/json", **headers}
        ).finish()
        assert call.status == status
        if status == 415:
            assert error_of(call)["code"] == "unsupported_media_type"


async def test_a_client_that_leaves_before_its_body_is_whole_is_no_fault_of_ours(open_chain, caplog):
    caplog.set_level(logging.INFO)
    async with open_chain() as chain:
        call = speak(chain, {"x_request_id": "gone"})
        call._request = [
            {"type": "http.disconnect"},
            {"type": "http.request", "body": b"{", "more_body": True},
        ]
        await call.finish()
    (line,) = [r.message for r in caplog.records if r.name == "deployments.metrics"]
    assert json.loads(line.removeprefix("request "))["outcome"] == "cancelled"
    assert not [
        r for r in caplog.records if r.levelno >= logging.WARNING and r.name.startswith("deployments.edge")
    ]


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/audio/voices?model=", "/"])
async def test_a_long_name_is_not_sent_back_whole(open_chain, path):
    async with open_chain() as chain:
        call = await ask(chain, path + "x" * 6_000)
    assert call.status == 404
    assert len(call.body) < 1_000


async def test_unknown_routes_and_methods_answer_with_error_objects(open_chain):
    async with open_chain() as chain:
        for method, path, status in [
            ("GET", "/nope", 404), ("POST", "/v1/audio/speech/", 404), ("GET", SPEECH, 405), ("POST", "/health", 405),
            ("GET", "/v1/models/nope", 404),
        ]:  # fmt: skip
            call = await ask(chain, path, method)
            assert call.status == status, (method, path)
            assert error_of(call)["message"]


@pytest.mark.parametrize("full", ["talker", "codec"])
@pytest.mark.parametrize("stream", [False, True])
async def test_overload_is_a_503_that_says_when_to_come_back(open_chain, full, stream):
    async with open_chain(**{full: Script(capacity=0)}) as chain:
        call = await speak(chain, stream=stream).finish()
        assert (call.status, call.headers["retry-after"]) == (503, "3")
        assert error_of(call)["code"] == "overloaded"
        await until(lambda: chain.num_held == 0)


# ---------------------------------------------------------------- failures
LATE_FAULT = Script(num_frames=60, fail_after_frames=12)


@pytest.mark.parametrize("broken", ["talker", "codec"])
@pytest.mark.parametrize("mode", [{}, {"stream": True}, {"stream_format": "sse"}])
async def test_a_fault_before_the_first_audio_is_a_500_without_details(open_chain, broken, mode):
    async with open_chain(**{broken: Script(fail_after_frames=0)}) as chain:
        call = await speak(chain, **mode).finish()
        assert call.status == 500
        assert "secret" not in call.body.decode()
        assert error_of(call)["code"] == "internal_error"
        await until(lambda: chain.num_held == 0)


@pytest.mark.parametrize("broken", ["talker", "codec"])
async def test_a_fault_after_the_header_leaves_the_body_unterminated(open_chain, broken):
    async with open_chain(**{"talker": Script(num_frames=60), broken: LATE_FAULT}) as chain:
        call = await speak(chain, stream=True).finish()
        assert call.status == 200
        assert call.error is not None
        assert not call.is_complete
        await until(lambda: chain.num_held == 0)


async def test_a_late_fault_in_sse_is_told_and_never_done(open_chain):
    async with open_chain(talker=LATE_FAULT) as chain:
        call = await speak(chain, stream_format="sse").finish()
    told = events(call.body)
    assert told[-1]["type"] == "speech.audio.error"
    assert "secret" not in call.body.decode()
    assert not any(event["type"] == "speech.audio.done" for event in told)
    assert not call.is_complete


async def test_a_late_fault_of_a_whole_body_is_a_status(open_chain):
    async with open_chain(talker=LATE_FAULT) as chain:
        call = await speak(chain).finish()
    assert call.status == 500


async def test_a_lost_item_is_a_fault_not_a_gap(open_chain):
    async with open_chain(talker=Script(num_frames=60)) as chain:
        decode = chain.codec.decode

        async def lossy(request):
            number = 0
            async for item in decode(request):
                number += 1
                if number != 3:
                    yield item

        chain.codec.decode = lossy
        call = await speak(chain, stream=True).finish()
    assert not call.is_complete
    assert call.error is not None


# ---------------------------------------------------------------- leaving
@pytest.mark.parametrize("mode", [{}, {"stream": True}, {"stream_format": "sse"}])
async def test_a_client_that_leaves_frees_slot_and_row_a_hundred_times(open_chain, mode):
    """known_faults row 29: nothing leaks, no orphan runs on."""
    seconds_per_item = 0.004 if mode else 0.3  # a whole body is left before it has anything
    async with open_chain(talker=Script(num_frames=20_000, seconds_per_item=seconds_per_item)) as chain:
        await until(lambda: not chain.ingress._readiness.problems())
        tasks_before = asyncio.all_tasks()
        for seed in range(100):
            call = speak(chain, seed=seed, max_new_tokens=4000, **mode)
            if mode:
                await call.wait_for_parts(3)
            else:
                await until(lambda: chain.num_held == 2)
            await call.leave()
            await until(lambda: chain.num_held == 0)
        num_questions = 2  # "ready?", always with Talker and Codec
        await until(lambda: len(asyncio.all_tasks()) <= len(tasks_before) + num_questions)


# ---------------------------------------------------------------- ids and logs
async def test_two_requests_may_share_a_clients_id(open_chain):
    async with open_chain(talker=Script(num_frames=60, seconds_per_item=0.005)) as chain:
        calls = [
            speak(chain, {"x_request_id": "same"}, seed=seed, response_format="pcm") for seed in range(2)
        ]
        for seed, call in enumerate(calls):
            assert (await call.finish()).body == expected_pcm(60, seed)


async def test_each_request_ends_in_one_line_of_the_log(open_chain, caplog):
    caplog.set_level(logging.INFO, "deployments.metrics")
    async with open_chain(talker=Script(num_frames=20_000, seconds_per_item=0.1)) as chain:
        await speak(chain, {"x_request_id": "good"}, max_new_tokens=9, stream=True).finish()
        await speak(chain, {"x_request_id": "bad"}, voice="nope").finish()
        left = speak(chain, {"x_request_id": "left"}, stream=True)
        await left.wait_for_parts(2)
        await left.leave()  # of the two seconds and more that a text as short may last
    lines = [
        json.loads(r.message.removeprefix("request "))
        for r in caplog.records
        if r.name == "deployments.metrics"
    ]
    told = {line["request_id"]: line for line in lines}
    assert len(lines) == 3
    good = told["good"]
    assert (good["outcome"], good["finish"], good["frames"], good["chunks"]) == ("ok", "length", 9, 3)
    assert 0 < good["ttfa_s"] < 60
    assert good["rtf"] > 0
    assert (told["bad"]["outcome"], told["bad"]["status"]) == ("rejected", 400)
    assert told["left"]["outcome"] == "cancelled"
    assert told["left"]["frames"] >= 4


# ---------------------------------------------------------------- the other routes
async def test_health_is_ready_once_every_deployment_has_answered(open_chain):
    async with open_chain() as chain:
        first = await ask(chain, "/health")
        assert (first.status, error_of(first)["code"]) == (503, "not_ready")
        await until(lambda: not chain.ingress._readiness.problems())
        assert (await ask(chain, "/health")).status == 200
        chain.talker_engine.stop()
        await until(lambda: chain.ingress._readiness.problems())
        broken = await ask(chain, "/health")
        assert broken.status == 503
        assert "Talker" in error_of(broken)["message"]
        assert "secret" not in broken.body.decode()


async def test_voices_and_models_list_what_the_speech_route_takes(open_chain):
    async with open_chain() as chain:
        voices = json.loads((await ask(chain, "/v1/audio/voices")).body)
        models = json.loads((await ask(chain, "/v1/models")).body)
        for voice in voices["voices"]:
            assert (await speak(chain, voice=voice).finish()).status == 200
        for language in voices["languages"]:
            assert (await speak(chain, language=language).finish()).status == 200
        for model in models["data"]:
            assert (await speak(chain, model=model["id"]).finish()).status == 200
            assert (await ask(chain, f"/v1/models/{model['id']}")).status == 200
    assert voices["default"] in voices["voices"]
    assert [voice["id"] for voice in voices["data"]] == voices["voices"]
