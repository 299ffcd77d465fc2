import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from ray.serve.schema import ServeDeploySchema, TracingConfig

from deployments import tracing
from deployments.metrics import RequestRecord
from deployments.tracing import export_otlp, traced_request, traced_stream
from qwen3tts_core.errors import EngineFault, InvalidRequest
from qwen3tts_core.types import AudioChunk, FrameBatch
from tests.qwen3tts_core.request_kit import make_request


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter, monkeypatch):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("tests")
    monkeypatch.setattr(tracing, "_tracer", tracer)
    return tracer


def spans_of(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


def test_outside_a_trace_there_are_no_spans_and_everything_works(exporter, tracer):
    with (
        traced_request(RequestRecord("abc", 24000)) as record,
        traced_stream("codec.decode", make_request("r")) as span,
    ):
        span.sent(FrameBatch(0, 1, 16, b"\0" * 32, "stop"))
        assert not trace.get_current_span().get_span_context().is_valid
        record.add(AudioChunk(0, 1, 16, b"\0" * 3840, b"", "stop"))
    assert not exporter.get_finished_spans()


def test_inside_one_a_request_is_a_child_with_what_it_cost_and_the_parent_of_what_it_calls(exporter, tracer):
    with tracer.start_as_current_span("serve") as outer:
        with traced_request(RequestRecord("abc", 24000)) as record:
            record.note(model="tiny", streamed=True)
            record.add(AudioChunk(0, 4, 16, b"\0" * 15360, b"", "stop"))
            record.wrote_audio()
            with tracer.start_as_current_span("called"):
                pass
        assert trace.get_current_span() is outer
    spans = spans_of(exporter)
    assert spans["speech"].parent.span_id == spans["serve"].context.span_id
    assert spans["called"].parent.span_id == spans["speech"].context.span_id
    told = {key.removeprefix("qwen3tts."): value for key, value in spans["speech"].attributes.items()}
    assert told.pop("ttfa_s") >= 0
    assert told.pop("rtf") >= 0
    assert told == {
        "request_id": "abc", "model": "tiny", "streamed": True, "outcome": "ok", "reason": "stop", "finish": "stop",
        "frames": 4, "chunks": 1, "audio_s": pytest.approx(0.32),
    }  # fmt: skip


def test_a_stream_is_the_parent_in_a_context_of_its_own_and_changes_nobody_elses(exporter, tracer):
    def call():
        with tracer.start_as_current_span("called"):
            pass

    with (
        tracer.start_as_current_span("serve") as outer,
        traced_stream("codec.decode", make_request("r")) as span,
    ):
        span.context.run(call)
        assert trace.get_current_span() is outer
    spans = spans_of(exporter)
    assert spans["called"].parent.span_id == spans["codec.decode"].context.span_id
    assert spans["codec.decode"].parent.span_id == spans["serve"].context.span_id


def test_a_stream_tells_its_frames_and_when_the_first_came(exporter, tracer):
    now = [10.0]
    with (
        tracer.start_as_current_span("serve"),
        traced_stream("talker.generate", make_request("r"), lambda: now[0]) as span,
    ):
        for first, frames, finish in ((0, 1, None), (1, 3, None), (4, 0, "stop")):
            now[0] += 0.5
            span.sent(FrameBatch(first, frames, 16, b"", finish))
    told = spans_of(exporter)["talker.generate"].attributes
    wanted = {"frames": 4, "items": 3, "first_item_s": 0.5, "finish": "stop"}
    assert {name: told[f"qwen3tts.{name}"] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineFault("secret words"), "ERROR"),
        (InvalidRequest("secret words"), "UNSET"),
        (GeneratorExit(), "UNSET"),
    ],
)
def test_an_error_is_named_and_never_quoted(exporter, tracer, error, status):
    with (
        tracer.start_as_current_span("serve"),
        pytest.raises(type(error)),
        traced_stream("codec.decode", make_request("r")),
    ):
        raise error
    span = spans_of(exporter)["codec.decode"]
    assert (span.status.status_code.name, span.attributes["error.type"]) == (status, type(error).__name__)
    assert "secret" not in span.to_json()
    assert not span.events


def test_tracing_is_off_unless_a_config_turns_it_on():
    assert not TracingConfig().enabled
    assert ServeDeploySchema(applications=[]).tracing_config is None


def test_spans_reach_a_collector_by_otlp(monkeypatch):
    received, arrived = [], threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()
            arrived.set()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        provider = TracerProvider()
        (processor,) = export_otlp()
        provider.add_span_processor(processor)
        with provider.get_tracer("tests").start_as_current_span("a-span-of-ours"):
            pass
        provider.shutdown()
        server.shutdown()
    assert arrived.is_set()
    (path, content), *_ = received
    assert path == "/v1/traces"
    assert b"a-span-of-ours" in content
