"""What a client sees when a replica dies: its stream is cut, never cleanly ended, and `/health` says so."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

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


HEALTH_TELLS_WITHIN_S = 3.0


@pytest.mark.parametrize("victim", ["Talker", "Codec"])
def test_health_tells_of_a_dead_replica_within_seconds_and_of_its_successor(deterministic, victim):
    pid = deterministic.stats(victim)["pid"]
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    while (answer := deterministic.client.get("health")).status_code == 200:
        assert time.monotonic() < killed_at + HEALTH_TELLS_WITHIN_S
        time.sleep(0.05)
    assert answer.status_code == 503
    assert victim in answer.json()["error"]["message"]
    deterministic.wait_until_ready(60)
    assert deterministic.stats(victim)["pid"] != pid


def test_health_of_a_busy_server_does_not_flap(app):
    body = {**BODY, "stream": False, "max_new_tokens": 60}
    with ThreadPoolExecutor(32) as pool:
        speaking = [pool.submit(app.client.post, SPEECH, json={**body, "seed": seed}) for seed in range(32)]
        told = []
        while not all(call.done() for call in speaking):
            told.append(app.client.get("health").status_code)
            time.sleep(0.05)
    assert {call.result().status_code for call in speaking} == {200}
    assert set(told) == {200}
    assert len(told) > 10
