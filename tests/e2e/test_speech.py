"""The real app speaks: real replicas, real engines on the tiny checkpoint, a real HTTP client."""

import asyncio
import base64
import io
import json
import statistics
import time
import wave
from pathlib import Path

import httpx
import numpy as np
import pytest

from qwen3tts_core.audio.encoding import MEDIA_TYPES
from tests.e2e.conftest import LASTING_SEED
from tests.outside_decoder import decode

GOLDEN = Path(__file__).parents[1] / "parity" / "golden" / "seed0" / "custom_voice.npz"
SPEECH = "v1/audio/speech"
BYTES_PER_FRAME = 1920 * 2
ENDLESS = {"seed": LASTING_SEED, "max_new_tokens": 2000}


def samples(pcm):
    return np.frombuffer(pcm, "<i2").astype(np.int32)


def assert_same_codes(pcm, other):
    """Same codes decode to the same audio but for rounding; other codes to something else entirely."""
    assert len(pcm) == len(other)
    assert np.abs(samples(pcm) - samples(other)).max() <= 1


def events(text):
    return [json.loads(block.split("data: ", 1)[1]) for block in text.strip().split("\n\n")]


def sse_audio(text):
    return b"".join(base64.b64decode(e["audio"]) for e in events(text) if e["type"] == "speech.audio.delta")


async def speak_all(app, bodies, timeout_s=240):
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=app.url, timeout=timeout_s, limits=limits) as client:
        return await asyncio.gather(
            *[client.post(SPEECH, json={"input": "Hello there.", **b}) for b in bodies]
        )


# ---------------------------------------------------------------- what comes out
@pytest.mark.parametrize("num_frames", [1, 2, 5, 30])
def test_every_response_has_exactly_its_frames(app, num_frames):
    """known_faults row 43: on the real thing."""
    response = app.speak(seed=1, max_new_tokens=num_frames)
    assert response.headers["x-num-frames"] == str(num_frames)
    assert response.headers["x-finish-reason"] == "length"
    assert (
        int(response.headers["content-length"]) == len(response.content) == 44 + num_frames * BYTES_PER_FRAME
    )
    with wave.open(io.BytesIO(response.content)) as reader:
        assert (reader.getframerate(), reader.getnframes()) == (24000, num_frames * 1920)


@pytest.mark.parametrize("name", ["app", "deterministic"])
def test_whole_streamed_and_sse_are_the_same_bytes(name, request):
    """known_faults row 18: one seed, one PCM."""
    app = request.getfixturevalue(name)
    body = {"seed": 5, "max_new_tokens": 60, "response_format": "pcm"}
    whole = app.speak(**body)
    raw = app.speak(**body, stream=True)
    sse = app.speak(**body, stream=True, stream_format="sse")
    assert raw.content == whole.content
    assert sse_audio(sse.text) == whole.content
    done = events(sse.text)[-1]
    assert done["type"] == "speech.audio.done"
    assert done["num_frames"] * BYTES_PER_FRAME == len(whole.content)
    assert done["finish_reason"] == whole.headers["x-finish-reason"]


def test_a_streamed_wav_has_one_header_of_unknown_size(app):
    content = app.speak(seed=1, max_new_tokens=40, stream=True).content
    assert content.count(b"RIFF") == 1
    assert content[4:8] == content[40:44] == b"\xff" * 4
    assert len(content) == 44 + 40 * BYTES_PER_FRAME


@pytest.mark.parametrize("num_others", [0, 4])
def test_the_golden_sentence_stops_at_its_frame_and_sounds_like_the_reference(app, num_others):
    golden = np.load(GOLDEN)["wrapper/plain_auto_stream_wav"]
    body = {
        "input": "Hello there, how are you today?",
        "voice": "vivian",
        "language": "Auto",
        "non_streaming_mode": False,
        "temperature": 0,
        "subtalker_temperature": 0,
        "response_format": "pcm",
    }
    others = [{"seed": seed, "max_new_tokens": 30} for seed in range(num_others)]  # 5 rows, padded to 8
    response, *rest = asyncio.run(speak_all(app, [body, *others]))
    assert [r.status_code for r in (response, *rest)] == [200] * (num_others + 1)
    assert response.headers["x-finish-reason"] == "stop"
    assert response.headers["x-num-frames"] == "9"
    error = np.abs(samples(response.content) / 32767 - golden).max()
    assert error <= 1e-4 + 0.5 / 32767  # the reference's tolerance, and the rounding to 16 bits


@pytest.mark.parametrize(("audio_format", "stream"), [("mp3", True), ("opus", False)])
def test_row_23_encoded_audio_is_whole(app, tmp_path, audio_format, stream):
    response = app.speak(seed=1, max_new_tokens=40, response_format=audio_format, speed=2, stream=stream)
    assert response.headers["content-type"] == MEDIA_TYPES[audio_format]
    samples, rate_hz = decode(response.content, tmp_path)
    assert 0 <= len(samples) / rate_hz - 40 * 0.08 / 2 <= 576 / 24_000


# ---------------------------------------------------------------- when it comes
@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_first_bytes_arrive_before_the_last_frame_is_made(app, stream_format):
    """known_faults row 20: on the real thing."""
    app.wait_until_free()
    body = {"input": "Hello there.", "stream": True, "stream_format": stream_format, **ENDLESS}
    with app.client.stream("POST", SPEECH, json=body) as response:
        parts = response.iter_raw()
        for _ in range(5):
            next(parts)
        assert app.stats("Talker")["num_running"] == 1


# ---------------------------------------------------------------- seeds
async def test_a_seed_means_the_same_codes_alone_and_among_others(app):
    """known_faults row 19: on the real thing."""
    body = {"seed": 42, "max_new_tokens": 40, "response_format": "pcm"}
    others = [{"seed": seed, "max_new_tokens": 20 + 5 * seed, "stream": True} for seed in range(7)]
    (alone,) = await speak_all(app, [body])
    among, *_ = await speak_all(app, [body, *others])
    assert_same_codes(alone.content, among.content)
    (other_seed,) = await speak_all(app, [{**body, "seed": 43}])
    assert other_seed.content != alone.content


def test_deterministic_means_the_same_bytes_among_others_and_after_a_restart(server, deterministic):
    body = {"seed": 42, "max_new_tokens": 40, "response_format": "pcm"}
    others = [{"seed": seed, "max_new_tokens": 20 + 5 * seed} for seed in range(7)]
    alone = deterministic.speak(**body).content
    among, *_ = asyncio.run(speak_all(deterministic, [body, *others]))
    assert among.content == alone
    pid = deterministic.stats("Talker")["pid"]
    server.restart(deterministic)
    assert deterministic.stats("Talker")["pid"] != pid
    assert deterministic.speak(**body).content == alone


# ---------------------------------------------------------------- many
async def test_32_at_once_are_all_served_whole_while_health_stays_quick(app):
    bodies = [{"seed": seed, "max_new_tokens": 20, "stream": bool(seed % 2)} for seed in range(32)]
    speaking = asyncio.create_task(speak_all(app, bodies))
    times_s = []
    async with httpx.AsyncClient(base_url=app.url, timeout=30) as client:
        while not speaking.done():
            began = time.perf_counter()
            assert (await client.get("health")).status_code == 200
            times_s.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)
    responses = await speaking
    assert [response.status_code for response in responses] == [200] * 32
    for response in responses:
        assert (len(response.content) - 44) % BYTES_PER_FRAME == 0
        assert 2 <= (len(response.content) - 44) // BYTES_PER_FRAME <= 20
    print(
        f"/health: {len(times_s)} answers, median {statistics.median(times_s):.3f} s, max {max(times_s):.3f} s"
    )
    assert statistics.median(times_s) < 2.0  # a liveness bound: two cores run every replica and this client
    assert len(times_s) > 5, "it waits for the speech"


async def test_more_than_the_queue_holds_is_refused_at_once_and_the_rest_is_served(app):
    for num_frames in (60, 240, 960):  # more where 80 requests don't come faster than they are served
        bodies = [
            {"seed": seed, "max_new_tokens": num_frames} for seed in range(80)
        ]  # 8 slots, a queue of 32
        responses = await speak_all(app, bodies)
        statuses = [response.status_code for response in responses]
        if 503 in statuses:
            break
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 40
    for response in responses:
        if response.status_code == 503:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "overloaded"
    assert app.speak(max_new_tokens=5).status_code == 200


# ---------------------------------------------------------------- leaving
def test_a_client_that_leaves_after_three_chunks_frees_slot_and_row_100_times(app):
    app.wait_until_free()
    num_free_pages = app.stats("Talker")["num_free_pages"]
    three_chunks = 44 + (1 + 3 + 8) * BYTES_PER_FRAME
    body = {"input": "Hello there.", "stream": True, **ENDLESS}
    for _ in range(100):
        received = 0
        with (
            app.freed_before(ENDLESS["max_new_tokens"]),
            app.client.stream("POST", SPEECH, json=body) as response,
        ):
            for part in response.iter_raw():
                received += len(part)
                if received >= three_chunks:
                    break
        assert received >= three_chunks
    talker, codec = app.stats("Talker"), app.stats("Codec")
    assert talker["num_free_slots"] == 8
    assert talker["num_free_pages"] == num_free_pages
    assert codec["num_free_rows"] == 40


def test_a_client_that_leaves_a_whole_body_frees_slot_and_row(app):
    with app.freed_before(ENDLESS["max_new_tokens"]):
        app.leave_while_it_speaks(SPEECH, {"input": "Hello there.", **ENDLESS})


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nope"}, 404, "model"),
        ({"voice": "nope"}, 400, "voice"),
        ({"language": "nope"}, 400, "language"),
        ({"response_format": "m4a"}, 400, "response_format"),
        ({"speed": 5}, 400, "speed"),
        ({"stream": "false"}, 400, "stream"),
        ({"seed": True}, 400, "seed"),
        ({"input": ""}, 400, "input"),
        ({"input": " \n"}, 400, "input"),
        ({"input": "word " * 5000}, 400, "input"),
    ],
)
def test_bad_input_is_refused_by_name_before_any_audio(app, fields, status, param):
    response = app.client.post(SPEECH, json={"input": "Hello there.", "stream": True, **fields})
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["param"] == param


def test_everything_else_that_is_wrong_has_an_error_object_too(app):
    client = app.client
    answers = {
        415: client.post(SPEECH, data={"input": "Hello there."}),
        400: client.post(SPEECH, content=b"{", headers={"content-type": "application/json"}),
        404: client.get("v1/nope"),
        405: client.get(SPEECH),
    }
    for status, response in answers.items():
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_every_answer_has_one_request_id_the_clients_own_if_it_sent_one(app):
    for path in ("health", "v1/models", "v1/nope"):
        assert len(app.client.get(path).headers.get_list("x-request-id")) == 1
    response = app.client.post(
        SPEECH, json={"input": "Hello there.", "max_new_tokens": 2}, headers={"x-request-id": "mine-7"}
    )
    assert response.headers.get_list("x-request-id") == ["mine-7"]
