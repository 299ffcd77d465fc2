"""One trace from HTTP to PCM, as Serve's own exporter wrote it. The fixtures' Serve samples only who asks for it."""

import json
import secrets
import time
from pathlib import Path

import pytest
import ray

SPEECH = "v1/audio/speech"
TEXT = "Not one word of this in any span."
ARRIVE_WITHIN_S = 120


def read_spans():
    """Every span so far, of every replica: {span id: span}."""
    folder = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs" / "serve" / "spans"
    spans, decoder = {}, json.JSONDecoder()
    for file in folder.glob("*"):
        text = file.read_text(encoding="utf-8").strip()
        while text:
            try:
                span, end = decoder.raw_decode(text)
            except json.JSONDecodeError:
                break  # still being written
            spans[span["context"]["span_id"]] = span
            text = text[end:].lstrip()
    return spans


class Trace:
    """What a client begins: its id, and what has become of it. Ids as the exporter writes them."""

    def __init__(self):
        self.id, self.root = secrets.token_hex(16), secrets.token_hex(8)
        self.headers = {"traceparent": f"00-{self.id}-{self.root}-01"}

    def spans(self):
        return {k: span for k, span in read_spans().items() if span["context"]["trace_id"] == f"0x{self.id}"}

    def wait_for(self, *names):
        deadline = time.monotonic() + ARRIVE_WITHIN_S
        while True:
            spans = self.spans()
            found = [span["name"] for span in spans.values()]
            if set(names) <= set(found):
                return spans
            assert time.monotonic() < deadline, found
            time.sleep(0.2)


def attributes_of(spans, name):
    (span,) = [span for span in spans.values() if span["name"] == name]
    found = {key.removeprefix("qwen3tts."): value for key, value in span["attributes"].items()}
    return span, found


def ancestors(spans, span):
    """Names of the spans above, the nearest first, then the id of whoever is outside."""
    names, parent = [], span["parent_id"]
    while parent in spans:
        names.append(spans[parent]["name"])
        parent = spans[parent]["parent_id"]
    return [*names, parent]


@pytest.mark.parametrize("of", ["app", "deterministic"])  # both links, by value and by reference
def test_one_trace_leads_from_the_request_to_its_frames(request, of):
    app, trace = request.getfixturevalue(of), Trace()
    body = {"input": TEXT, "seed": 5, "max_new_tokens": 9, "stream": True, "response_format": "pcm"}
    response = app.client.post(SPEECH, json=body, headers={**trace.headers, "x-request-id": "r-1"})
    assert response.status_code == 200
    spans = trace.wait_for("speech", "codec.decode", "talker.generate")

    talker, made = attributes_of(spans, "talker.generate")
    codec, decoded = attributes_of(spans, "codec.decode")
    speech, sent = attributes_of(spans, "speech")
    above = ancestors(spans, talker)
    assert above.index("codec.decode") < above.index("speech")
    assert above[-1] == f"0x{trace.root}"
    assert "replica_handle_request Talker generate" in above
    assert "replica_handle_request Codec decode" in ancestors(spans, codec)

    num_frames = len(response.content) // 3840
    assert made["frames"] == decoded["frames"] == sent["frames"] == num_frames
    assert made["finish"] == decoded["finish"] == sent["finish"]
    assert made["engine_request_id"] == decoded["engine_request_id"]
    assert (sent["request_id"], sent["outcome"], sent["streamed"]) == ("r-1", "ok", True)
    assert 0 < made["first_item_s"] < decoded["first_item_s"] < sent["ttfa_s"]
    assert speech["start_time"] < codec["start_time"] < talker["start_time"]
    assert "Not one word" not in json.dumps(spans)


def test_a_refusal_is_told_without_its_words(app):
    trace = Trace()
    body = {"input": TEXT, "voice": "a secret voice"}
    assert app.client.post(SPEECH, json=body, headers=trace.headers).status_code == 400
    spans = trace.wait_for("speech")
    span, told = attributes_of(spans, "speech")
    assert (told["outcome"], told["reason"], told["error.type"]) == (
        "rejected",
        "unknown_voice",
        "UnknownVoice",
    )
    assert span["status"]["status_code"] == "UNSET"  # the caller's fault is no error of ours
    assert "secret" not in json.dumps(spans)
    assert "Not one word" not in json.dumps(spans)


def test_who_asks_for_no_trace_leaves_no_span(app):
    known = {span["context"]["trace_id"] for span in read_spans().values()}  # which may still get more spans
    app.speak(max_new_tokens=5)
    asked = Trace()
    app.client.post(SPEECH, json={"input": TEXT, "max_new_tokens": 5}, headers=asked.headers)
    asked.wait_for("speech", "codec.decode", "talker.generate")
    new = {span["context"]["trace_id"] for span in read_spans().values()} - known
    assert new == {f"0x{asked.id}"}
