"""What a client sees when a replica dies under its stream: a cut, never a clean end."""

import json
import os
import signal
import time

import httpx
import pytest

SPEECH = "v1/audio/speech"
BODY = {"input": "Hello there.", "stream": True, "seed": 1, "max_new_tokens": 400, "response_format": "pcm"}


@pytest.fixture(autouse=True)
def _whole_again(deterministic):
    yield
    deterministic.wait_until_ready()


def read_to_the_end(parts, received):
    for part in parts:
        received += part


@pytest.mark.parametrize(("victim", "stream_format"), [("Talker", "audio"), ("Codec", "sse")])
def test_a_stream_whose_replica_dies_is_cut_and_the_service_comes_back(deterministic, victim, stream_format):
    pid = deterministic.stats(victim)["pid"]
    received = bytearray()
    body = {**BODY, "stream_format": stream_format}
    with deterministic.client.stream("POST", SPEECH, json=body) as response:
        assert response.status_code == 200
        parts = response.iter_raw()
        received += next(parts)
        os.kill(pid, signal.SIGKILL)  # one replica of this run's own, by its id
        with pytest.raises(httpx.RemoteProtocolError):
            read_to_the_end(parts, received)
    if stream_format == "sse":
        kinds = [
            json.loads(block.split(b"data: ", 1)[1])["type"] for block in received.strip().split(b"\n\n")
        ]
        assert kinds[-1] == "speech.audio.error"
        assert "speech.audio.done" not in kinds
    deadline = time.monotonic() + 60
    while deterministic.client.post(SPEECH, json={**BODY, "max_new_tokens": 5}).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert deterministic.stats(victim)["pid"] != pid
