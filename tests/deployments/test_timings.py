"""What a client learns of its request beside the audio: its id, how it ended, and when what was reached."""

import json
import re
from contextlib import asynccontextmanager

import pytest

from deployments.metrics import RequestRecord
from tests.deployments.conftest import settled
from tests.fakes import Script

SPEECH = "/v1/audio/speech"


def speak(chain, **fields):
    body = json.dumps({"input": "Hello there.", "seed": 3, **fields}).encode()
    return chain.call("POST", SPEECH, body, content_type="application/json", x_request_id="mine-7").finish()


def server_timing(call):
    parts = [re.fullmatch(r"(\w+);dur=([0-9.]+)", part) for part in call.headers["server-timing"].split(", ")]
    return {part[1]: float(part[2]) / 1000 for part in parts}


@pytest.fixture
def open_paced(open_chain, monkeypatch):
    """A chain of 60 frames, six items; a request's clock goes on by 0.1 s with each, when what came before has gone its
    way, and stands still otherwise."""
    now = 100.0
    monkeypatch.setattr(RequestRecord.__init__, "__defaults__", (lambda: now, None))

    @asynccontextmanager
    async def opened():
        async with open_chain(talker=Script(num_frames=60)) as chain:
            decode = chain.codec.decode

            async def paced(request):
                nonlocal now
                async for item in decode(request):
                    await settled()
                    now += 0.1
                    yield item

            chain.codec.decode = paced
            yield chain

    return opened


async def test_a_whole_body_tells_all_its_times_in_order(open_paced):
    async with open_paced() as chain:
        call = await speak(chain)
    timing = server_timing(call)
    assert list(timing) == ["prepared", "first_audio", "total"]
    assert list(timing.values()) == pytest.approx([0.0, 0.1, 0.6])


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_a_streams_header_tells_what_is_known_by_then(open_paced, stream_format):
    async with open_paced() as chain:
        call = await speak(chain, stream=True, stream_format=stream_format)
    assert server_timing(call)["total"] == pytest.approx(0.1)
    assert "x-finish-reason" not in call.headers


async def test_a_stream_of_one_item_knows_its_finish_reason_in_the_header(open_chain):
    async with open_chain(talker=Script(num_frames=60)) as chain:
        call = await speak(chain, stream=True, max_new_tokens=1)
    assert call.headers["x-finish-reason"] == "length"


async def test_the_last_event_has_id_finish_reason_and_times(open_paced):
    """known_faults row 41: what ran into its limit says so, in the last event too."""
    async with open_paced() as chain:
        call = await speak(chain, stream_format="sse", max_new_tokens=40)
    done = json.loads(call.body.decode().strip().split("\n\n")[-1].split("data: ")[1])
    assert (done["type"], done["request_id"], done["finish_reason"]) == (
        "speech.audio.done",
        "mine-7",
        "length",
    )
    assert list(done["timings"]) == ["prepared_s", "first_audio_s", "total_s"]
    assert list(done["timings"].values()) == pytest.approx([0.0, 0.1, 0.5])
