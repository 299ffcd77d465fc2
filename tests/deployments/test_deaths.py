"""Replicas that die under requests of every kind: nobody hears of it, unless nothing takes over in time."""

import base64
import json

import pytest

from tests.deployments.conftest import settled
from tests.fakes import AsgiSocket, Script, fake_codes, fake_pcm, mortal, until

pytestmark = pytest.mark.both_shapes

NUM_FRAMES = 60
CHUNKS = [1, 3, 8, 16, 25, 7]
LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9


@pytest.fixture(params=["talker", "codec"])
def kill(request):
    """kill(chain, *ends): the calls of one of its engines die after so many items each, when these are decoded."""

    def kill(chain, *ends):
        async def decoded():
            await settled()
            await until(lambda: chain.codec_engine.is_idle)
            await settled()

        name = "generate" if request.param == "talker" else "decode"
        deployment = getattr(chain, request.param)
        setattr(deployment, name, mortal(getattr(deployment, name), *ends, before=decoded))

    return kill


def speak(chain, path="/v1/audio/speech", **fields):
    body = {"input": "Hello there.", "seed": 3, "response_format": "pcm", **fields}
    return chain.call("POST", path, json.dumps(body).encode(), content_type="application/json")


def expected_pcm(num_pieces=1):
    return b"".join(fake_pcm(fake_codes(3, 0, NUM_FRAMES, piece), 1920) for piece in range(num_pieces))


def events_of(call):
    return [json.loads(block.split(b"data: ", 1)[1]) for block in call.body.strip().split(b"\n\n")]


# ---------------------------------------------------------------- with somebody to take over
@pytest.mark.parametrize("ends", [(0,), (1,), (5,), (1, 0, 2)])
async def test_raw_streams_have_every_sample_once_and_the_same_chunks(open_chain, kill, ends):
    async with open_chain(talker=Script(num_frames=NUM_FRAMES)) as chain:
        kill(chain, *ends)
        call = await speak(chain, stream=True).finish()
        assert call.is_complete
        assert call.body == expected_pcm()
        assert b"".join(part for _, part in call.parts) == expected_pcm()
        await until(lambda: chain.num_held == 0)


async def test_events_go_on_to_done(open_chain, kill):
    async with open_chain(talker=Script(num_frames=NUM_FRAMES)) as chain:
        kill(chain, 2)
        *deltas, done = events_of(await speak(chain, stream_format="sse").finish())
        assert {event["type"] for event in deltas} == {"speech.audio.delta"}
        assert b"".join(base64.b64decode(event["audio"]) for event in deltas) == expected_pcm()
        assert (done["type"], done["num_frames"]) == ("speech.audio.done", NUM_FRAMES)


async def test_a_whole_body_is_whole(open_chain, kill):
    async with open_chain(talker=Script(num_frames=NUM_FRAMES)) as chain:
        kill(chain, 4)
        call = await speak(chain).finish()
        assert (call.status, call.headers["x-num-frames"]) == (200, str(NUM_FRAMES))
        assert call.body == expected_pcm()


@pytest.mark.parametrize("audio_format", ["wav", "flac", "mp3", "opus", "aac"])
async def test_encoders_hear_nothing_of_it(open_chain, kill, audio_format):
    fields = {"response_format": audio_format, "stream": True, "sample_rate": 16000, "speed": 1.25}
    async with open_chain(talker=Script(num_frames=NUM_FRAMES)) as chain:
        undisturbed = await speak(chain, **fields).finish()
        if undisturbed.status == 400:
            pytest.skip(f"this machine's libraries write no {audio_format}")
        kill(chain, 3)
        assert (await speak(chain, **fields).finish()).body == undisturbed.body


async def test_every_piece_of_a_long_text_may_lose_its_engines(open_chain, kill):
    async with open_chain(talker=Script(num_frames=NUM_FRAMES)) as chain:
        undisturbed = await speak(chain, input=LONG, stream=True).finish()
        kill(chain, 3, 2, 0, 5, 1)
        call = await speak(chain, input=LONG, stream=True).finish()
        assert call.is_complete
        assert call.body == undisturbed.body
        assert len(call.body) > len(expected_pcm())


async def test_a_batch_fails_nowhere(open_chain, kill):
    async with open_chain(talker=Script(num_frames=NUM_FRAMES)) as chain:
        kill(chain, 0, 1, 4)
        items = [{"input": "One."}, {"input": "Two."}, {"input": "Three."}]
        body = json.dumps({"items": items, "seed": 3, "response_format": "pcm"}).encode()
        path = "/v1/audio/speech/batch"
        call = await chain.call("POST", path, body, content_type="application/json").finish()
        answer = json.loads(call.body)
        assert answer["num_failed"] == 0
        assert [base64.b64decode(item["audio"]) for item in answer["data"]] == [expected_pcm()] * 3


async def test_a_socket_goes_on_speaking(open_chain, kill):
    async with open_chain(talker=Script(num_frames=NUM_FRAMES)) as chain:
        kill(chain, 2)
        socket = AsgiSocket(chain.app, "/v1/audio/speech/stream")
        socket.send("session.config", response_format="pcm", seed=3)
        socket.send("input.text", text="Hello there.")
        socket.send("input.done")
        await socket.wait_for("session.done")
        socket.send("session.close")
        await socket.wait_until_over()
        assert socket.audio() == expected_pcm()
        assert not socket.told("error")


async def test_the_log_says_how_often(open_chain, kill, caplog):
    async with open_chain(talker=Script(num_frames=NUM_FRAMES)) as chain:
        kill(chain, 2, 1)
        await speak(chain, stream=True).finish()
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request {")]
    assert json.loads(line.removeprefix("request "))["resumes"] == 2


# ---------------------------------------------------------------- with nobody
FOREVER = [2, *[0] * 10_000]


async def test_without_anybody_in_time_a_raw_stream_is_cut(open_chain, kill):
    async with open_chain(talker=Script(num_frames=NUM_FRAMES), resume_timeout_s=0.1) as chain:
        kill(chain, *FOREVER)
        call = await speak(chain, stream=True).finish()
        assert call.status == 200
        assert not call.is_complete
        assert expected_pcm().startswith(call.body)
        assert (
            3840 <= len(call.body) <= 4 * 3840
        )  # of a dying talker's frames the last may not be decoded any more
        await until(lambda: chain.num_held == 0)


async def test_without_anybody_in_time_events_end_in_an_error(open_chain, kill):
    async with open_chain(talker=Script(num_frames=NUM_FRAMES), resume_timeout_s=0.1) as chain:
        kill(chain, *FOREVER)
        call = await speak(chain, stream_format="sse").finish()
        assert not call.is_complete
        *deltas, last = events_of(call)
        assert {event["type"] for event in deltas} == {"speech.audio.delta"}
        assert (last["type"], last["error"]["code"]) == ("speech.audio.error", "unavailable")


@pytest.mark.parametrize("ends", [FOREVER, [0] * 10_000])
async def test_without_anybody_in_time_a_whole_body_is_a_503(open_chain, kill, ends):
    async with open_chain(talker=Script(num_frames=NUM_FRAMES), resume_timeout_s=0.1) as chain:
        kill(chain, *ends)
        call = await speak(chain).finish()
        assert call.status == 503
        assert json.loads(call.body)["error"]["code"] == "unavailable"
        assert int(call.headers["retry-after"]) >= 1
        await until(lambda: chain.num_held == 0)
