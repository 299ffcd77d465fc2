"""`ingress: codec` in the real app: the same bytes as `separate`, the same ends, and what it gives up."""

import base64
import json
import os
import signal
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from deployments.client import Client, StreamCut
from load_tests.drills.processes import descendants, name_of
from tests.e2e.conftest import DEADLINE_S
from tests.e2e.test_metrics import scrape_when
from tests.e2e.test_tracing import Trace, ancestors, attributes_of

SPEECH = "v1/audio/speech"
ATTEMPTS = 5
FIELDS = {"response_format": "pcm", "seed": 1, "max_new_tokens": 20}
BODY = {"input": "Hello there.", **FIELDS}
LASTS = {**BODY, "stream": True, "max_new_tokens": 150}  # this seed draws no end before that
ENDLESS = {**BODY, "stream": True, "max_new_tokens": 400}


@pytest.fixture(scope="module")
def codec_ingress(server, deterministic):
    application = server.config_of(deterministic)
    application["name"], application["route_prefix"] = "codec_ingress", "/codec_ingress"
    application["args"]["ingress"] = "codec"
    application["deployments"] = [d for d in application["deployments"] if d["name"] != "Ingress"]
    app = server.add(application)
    server.start(app)
    yield app
    server.stop(app)


def sse_audio(content):
    events = [json.loads(block.split(b"data: ", 1)[1]) for block in content.strip().split(b"\n\n")]
    assert events[-1]["type"] == "speech.audio.done"
    return b"".join(base64.b64decode(event["audio"]) for event in events[:-1])


def answers(app):
    """What each transport says to one request: the bytes of the audio."""
    with Client(app.url) as client, client.session(**FIELDS) as session:
        spoken = b"".join(session.speak("Hello there. How are you?"))
    streamed = {"stream": True}
    return {
        "wav": app.speak(**BODY | {"response_format": "wav"}).content,
        "streamed wav": app.speak(**BODY | streamed | {"response_format": "wav"}).content,
        "pcm": app.speak(**BODY).content,
        "streamed pcm": app.speak(**BODY | streamed).content,
        "sse": sse_audio(app.speak(**BODY | {"stream_format": "sse"}).content),
        "session": spoken,
    }


def test_every_transport_says_the_same_bytes_as_with_an_ingress_apart(codec_ingress, deterministic):
    own = answers(codec_ingress)
    assert own == answers(deterministic)
    assert own["streamed pcm"] == own["sse"] == own["pcm"]
    assert len(own["pcm"]) == 20 * 3840
    owned = [name_of(p.pid) for p in descendants(os.getpid()) if ":codec_ingress:" in name_of(p.pid)]
    assert len(owned) == 2, "a Talker, and the Codec that is the ingress"


def test_who_leaves_frees_row_and_slot(codec_ingress):
    codec_ingress.wait_until_free()
    made_before = codec_ingress.stats("Talker")["frames"]
    for fields in ({}, {"stream_format": "sse"}, {}):
        with codec_ingress.client.stream("POST", SPEECH, json=ENDLESS | fields) as response:
            next(response.iter_raw())
        codec_ingress.wait_until_free()
    with Client(codec_ingress.url) as client, client.session(**FIELDS | {"max_new_tokens": 400}) as session:
        next(session.speak("Hello there. How are you?"))
        session._connection.socket.close()  # no goodbye
    codec_ingress.wait_until_free()
    assert codec_ingress.stats("Talker")["frames"] - made_before < 4 * 400
    assert codec_ingress.stats("Talker")["reaped"] == codec_ingress.stats("Codec")["reaped"] == 0


def test_one_trace_and_one_page_of_metrics_have_both_halves(codec_ingress):
    trace = Trace()
    response = codec_ingress.client.post(SPEECH, json=BODY, headers=trace.headers)
    assert response.status_code == 200
    spans = trace.wait_for("speech", "codec.decode", "talker.generate")
    talker, _ = attributes_of(spans, "talker.generate")
    above = ancestors(spans, talker)
    assert above.index("codec.decode") < above.index("speech")
    assert "replica_handle_request Codec decode" not in above, "no call through Serve between them"
    assert above[-1] == f"0x{trace.root}"

    def has_both(scrape):
        return scrape.total("requests_total", deployment="Codec") and scrape.total(
            "codec_frames_total", deployment="Codec"
        )

    scrape = scrape_when(codec_ingress, has_both)
    assert scrape.total("codec_rows", deployment="Codec") == 8


def test_a_talker_that_dies_costs_a_pause_and_health_names_it(codec_ingress):
    expected = codec_ingress.speak(**LASTS | {"stream": False}).content
    pid, received, told = codec_ingress.stats("Talker")["pid"], bytearray(), []
    with codec_ingress.client.stream("POST", SPEECH, json=LASTS) as response:
        parts = response.iter_raw()
        received += next(parts)
        os.kill(pid, signal.SIGKILL)  # ours, by its id
        deadline = time.monotonic() + DEADLINE_S
        while not told and time.monotonic() < deadline:
            answer = httpx.get(codec_ingress.url + "health", timeout=DEADLINE_S)
            told += [answer.json()["error"]["message"]] if answer.status_code == 503 else []
        for part in parts:
            received += part
    assert received == expected
    assert told
    assert "Talker" in told[0]
    codec_ingress.wait_until_ready()
    codec_ingress.stats_of_a_successor("Talker", pid)
    codec_ingress.wait_until_free()


def dies_under_streams(app, pid):
    """False, and nothing has died, where the first of them, all as long, was over before the last had begun."""
    app.wait_until_free()
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(httpx.post, app.url + SPEECH, json=ENDLESS | {"stream": False}, timeout=300)
        deadline = time.monotonic() + DEADLINE_S
        while not whole.done() and app.stats("Talker")["num_running"] < 1:
            assert time.monotonic() < deadline
        with (
            app.client.stream("POST", SPEECH, json=ENDLESS) as raw,
            app.client.stream("POST", SPEECH, json=ENDLESS | {"stream_format": "sse"}) as sse,
            Client(app.url) as client,
            client.session(**FIELDS | {"max_new_tokens": 400}) as session,
        ):
            parts, more, speech = raw.iter_raw(), sse.iter_raw(), session.speak("Hello there. How are you?")
            next(parts)
            events = bytearray(next(more))
            next(speech)
            if whole.done():
                return False
            os.kill(pid, signal.SIGKILL)  # ours, by its id
            for rest in (parts, map(events.extend, more)):
                with pytest.raises(httpx.TransportError):
                    deque(rest, 0)
            with pytest.raises(StreamCut):
                deque(speech, 0)
        assert whole.result().status_code == 500  # of Serve's proxy, which has lost its replica
    assert b"speech.audio.done" not in events
    return True


def test_its_own_death_cuts_its_connections_and_never_ends_them(codec_ingress):
    """What only `separate` survives. Raw, events, a session, and a whole body."""
    pid = codec_ingress.stats("Codec")["pid"]
    assert any(dies_under_streams(codec_ingress, pid) for _ in range(ATTEMPTS))
    codec_ingress.wait_until_ready()
    codec_ingress.stats_of_a_successor("Codec", pid)
    codec_ingress.wait_until_free()
