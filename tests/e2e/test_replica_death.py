"""What clients notice when a replica, or its engine alone, dies under their streams: nothing but a pause; `/health` tells it.

Without a replica that takes over in time a stream is cut (test_models.py, whose app waits for none).
"""

import base64
import json
import os
import signal
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import numpy as np
import pytest

from load_tests.drills.processes import descendants, name_of
from tests.e2e.conftest import DEADLINE_S, LASTING_SEED

SPEECH, BATCH = "v1/audio/speech", "v1/audio/speech/batch"
NUM_FRAMES = 150
ATTEMPTS = 5
BODY = {
    "input": "Hello there.",
    "stream": True,
    "seed": 1,
    "max_new_tokens": NUM_FRAMES,
    "response_format": "pcm",
}
LONG = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9  # 657 characters


@pytest.fixture(autouse=True)
def _whole_again(deterministic):
    yield
    deterministic.wait_until_ready()


def events_of(content):
    return [json.loads(block.split(b"data: ", 1)[1]) for block in content.strip().split(b"\n\n")]


def audio_of_events(content):
    """Joined, of server-sent events that ended as they should."""
    *deltas, done = events_of(content)
    assert done["type"] == "speech.audio.done"
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    return b"".join(base64.b64decode(event["audio"]) for event in deltas), done["finish_reason"]


def results_of(app, kill=lambda: None):
    """One request of every kind at once, to their ends. kill: called when each of the streams has had audio.

    Where one is over before the last has begun, as on a busy machine, nothing was killed: again.
    """
    for _ in range(ATTEMPTS):
        clients = Clients(app, kill)
        if clients.num_over == 0:
            return clients.results
    raise AssertionError("all of them were to be disturbed, and one was over before another began")


class Clients:
    """num_over: how many had ended when each of the streams had audio; `kill` is for the others, or for none."""

    def __init__(self, app, kill):
        self._client, self._heard = app.client, set()
        streams = {
            "raw": {**BODY},
            "wav": {**BODY, "response_format": "wav", "seed": 2},
            "flac": {**BODY, "response_format": "flac", "seed": 3},
            "sse": {**BODY, "stream_format": "sse", "seed": 4},
            "long": {**BODY, "input": LONG, "seed": 5},
        }
        with ThreadPoolExecutor(len(streams) + 2) as pool:
            calls = {name: pool.submit(self._stream, name, body) for name, body in streams.items()}
            calls["whole"] = pool.submit(self._whole)
            calls["batch"] = pool.submit(self._batch)
            while self._heard != set(streams) and not any(call.done() for call in calls.values()):
                time.sleep(0.01)
            self.num_over = sum(call.done() for call in calls.values())
            if self.num_over == 0:
                kill()
        self.results = {name: call.result() for name, call in calls.items()}

    def _stream(self, name, body):
        received = bytearray()
        with self._client.stream("POST", SPEECH, json=body) as response:
            assert response.status_code == 200, response.read()
            for part in response.iter_raw():
                received += part
                self._heard.add(name)
        return audio_of_events(received) if body.get("stream_format") else bytes(received)

    def _whole(self):
        response = self._client.post(SPEECH, json={**BODY, "stream": False, "seed": 6})
        assert response.status_code == 200, response.text
        assert int(response.headers["x-num-frames"]) * 3840 == len(response.content)
        return response.headers["x-finish-reason"], response.content

    def _batch(self):
        items = [{"input": "One.", "seed": 7}, {"input": "And two.", "seed": 8}]
        body = {"response_format": "pcm", "max_new_tokens": NUM_FRAMES, "items": items}
        answer = self._client.post(BATCH, json=body).json()
        assert answer["num_failed"] == 0, answer
        return [(item["audio"], item["finish_reason"], item["usage"]) for item in answer["data"]]


@pytest.fixture(scope="module")
def undisturbed(deterministic):
    deterministic.wait_until_ready()
    return results_of(deterministic)


@pytest.mark.parametrize(("victim", "process"), [("Talker", "pid"), ("Codec", "engine_pid")])
def test_every_kind_of_answer_is_the_same_to_the_byte_when_a_replica_or_its_engine_dies(
    deterministic, undisturbed, victim, process
):
    """In deterministic mode: raw and encoded streams, events, long texts, whole bodies, batches."""
    before = deterministic.stats(victim)
    assert before["pid"] != before["engine_pid"]
    kill = partial(os.kill, before[process], signal.SIGKILL)  # ours, by its id
    results = results_of(deterministic, kill)
    assert {name for name, result in results.items() if result != undisturbed[name]} == set()
    deterministic.wait_until_ready()
    deterministic.stats_of_a_successor(victim, before["pid"], before["engine_pid"])
    assert not {one.pid for one in descendants(os.getpid())} & {before["engine_pid"]}
    deterministic.wait_until_free()


@pytest.mark.parametrize("victim", ["Codec", "Talker"])
def test_by_default_no_sample_is_lost_or_said_twice(app, victim):
    expected = np.frombuffer(app.speak(**{**BODY, "stream": False}).content, "<i2")
    pid, received = app.stats(victim)["pid"], bytearray()
    with app.client.stream("POST", SPEECH, json=BODY) as response:
        parts = response.iter_raw()
        received += next(parts)
        os.kill(pid, signal.SIGKILL)
        num_before = len(received)
        for part in parts:
            received += part
    assert received[:num_before] == expected.tobytes()[:num_before]
    assert len(received) == 2 * len(expected)
    # The same codes: what was heard, and the noise, are the same. The rest of the rounding is not.
    assert np.abs(np.frombuffer(received, "<i2").astype(int) - expected).max() <= 1
    app.wait_until_ready()
    app.wait_until_free()


HEALTH_TELLS_WITHIN_S = 30.0
"""A second or two; on a busy machine more. What isn't told while nobody is there is never told."""


@pytest.mark.parametrize(("victim", "process"), [("Talker", "engine_pid"), ("Codec", "pid")])
def test_health_tells_of_a_death_within_seconds_and_of_the_successor(deterministic, victim, process):
    pid = deterministic.stats(victim)[process]
    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    while (answer := deterministic.client.get("health")).status_code == 200:
        assert time.monotonic() < killed_at + HEALTH_TELLS_WITHIN_S
        time.sleep(0.05)
    assert answer.status_code == 503
    assert victim in answer.json()["error"]["message"]
    deterministic.wait_until_ready()
    deterministic.stats_of_a_successor(victim, pid)


def test_health_of_a_busy_server_does_not_flap(app):
    body = {**BODY, "stream": False, "max_new_tokens": 60}
    told, has_told_enough = [], threading.Event()

    def speak(seed):
        answers = set()
        while not answers or not has_told_enough.is_set():
            answers.add(app.client.post(SPEECH, json={**body, "seed": seed}).status_code)
        return answers

    with ThreadPoolExecutor(32) as pool:
        speaking = [pool.submit(speak, seed) for seed in range(32)]
        try:
            while not all(call.done() for call in speaking):
                told.append(app.client.get("health").status_code)
                if len(told) > 10:
                    has_told_enough.set()
                time.sleep(0.05)
        finally:
            has_told_enough.set()
    assert set.union(*(call.result() for call in speaking)) == {200}
    assert set(told) == {200}


def test_a_dead_ingress_cuts_its_streams_and_never_ends_them(app):
    (pid,) = [p.pid for p in descendants(os.getpid()) if f":{app.name}:Ingress" in name_of(p.pid)]
    events = bytearray()
    with (
        app.client.stream("POST", SPEECH, json={**BODY, "max_new_tokens": 2000}) as raw,
        app.client.stream(
            "POST", SPEECH, json={**BODY, "max_new_tokens": 2000, "stream_format": "sse"}
        ) as sse,
    ):
        parts, more = raw.iter_raw(), sse.iter_raw()
        next(parts)
        events += next(more)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            deque(parts, 0)
        with pytest.raises(httpx.TransportError):
            deque(map(events.extend, more), 0)
    assert b"speech.audio.done" not in events
    app.wait_until_ready()
    app.wait_until_free()  # in more than a lease, should nobody have told the engines


def test_a_talker_whose_codec_has_died_is_freed_long_before_its_stream_would_end(app):
    """Ray cancels nothing when the caller of an actor's method is killed: the ingress tells the talker."""
    long_body, pid = {**BODY, "seed": LASTING_SEED, "max_new_tokens": 2000}, app.stats("Codec")["pid"]
    with app.client.stream("POST", SPEECH, json=long_body) as response:
        next(response.iter_raw())
        frames_before = app.stats("Talker")["frames"]
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        while (talker := app.stats("Talker"))["num_running"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert talker["frames"] - frames_before < 1500
        assert talker["reaped"] == 0  # it was told; no lease had to run out
    app.wait_until_ready()
    app.wait_until_free()  # who left now is waited for by nobody, wherever their stream was then
