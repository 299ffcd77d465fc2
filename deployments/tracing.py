"""One request as spans, from HTTP to PCM, where Serve's tracing is on and the trace is sampled.

    POST /v1/audio/speech ─ speech ─ … Codec decode ─ codec.decode ─ … Talker generate ─ talker.generate

Serve makes the spans between, and carries the trace from replica to replica. Ours are made only inside a
trace: without one, opening them costs a microsecond. Attributes are counts, times and names of the
server's making; never a text, and never an error's message, which may quote one.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import INVALID_SPAN, Span, Status, StatusCode

from deployments.handles import root_cause
from deployments.http_errors import describe
from deployments.metrics import RequestRecord
from qwen3tts_core.types import ItemHeader, SpeechRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_PREFIX = "qwen3tts."
_tracer = trace.get_tracer("qwen3tts")


@contextmanager
def traced_request(record: RequestRecord) -> Iterator[RequestRecord]:
    """Open the record, inside a span that ends with what the record says of the request."""
    with _span("speech") as span, trace.use_span(span, record_exception=False, set_status_on_exception=False):
        try:
            with record:
                yield record
        finally:
            _annotate(
                span,
                request_id=record.request_id,
                model=record.model,
                streamed=record.is_streamed,
                outcome=record.outcome,
                reason=record.reason,
                finish=record.finish,
                frames=record.num_frames,
                chunks=record.num_chunks,
                audio_s=record.audio_s,
                ttfa_s=record.ttfa_s,
                rtf=record.rtf,
            )


class StreamSpan:
    """A span of one stream, told of each item that leaves."""

    def __init__(self, span: Span, clock: Callable[[], float]) -> None:
        self._span, self._clock, self._began_at = span, clock, clock()
        self._num_frames = self._num_items = 0
        self._first_s: float | None = None
        self._finish: str | None = None

    def sent(self, item: ItemHeader) -> None:
        if self._first_s is None:
            self._first_s = self._clock() - self._began_at
        self._num_frames += item.num_frames
        self._num_items += 1
        self._finish = item.finish

    @property
    def context(self) -> contextvars.Context:
        """This context, in which the span is the parent of what is called. For a task of its own: a generator's
        caller may end it in another context, so that the generator can't change its own."""
        context = contextvars.copy_context()
        if self._span is not INVALID_SPAN:
            context.run(otel_context.attach, trace.set_span_in_context(self._span))
        return context

    def end(self) -> None:
        _annotate(
            self._span,
            frames=self._num_frames,
            items=self._num_items,
            first_item_s=self._first_s,
            finish=self._finish,
        )


@contextmanager
def traced_stream(
    name: str, request: SpeechRequest, clock: Callable[[], float] = time.perf_counter
) -> Iterator[StreamSpan]:
    """A request's stage on an engine."""
    with _span(name) as span:
        stream = StreamSpan(span, clock)
        _annotate(
            span,
            engine_request_id=request.request_id,
            model=request.model,
            piece=request.piece,
            prompt_rows=request.plan.num_rows,
            max_frames=request.max_frames,
        )
        try:
            yield stream
        finally:
            stream.end()


def export_otlp() -> list[SpanProcessor]:
    """For Serve's `exporter_import_path`: spans to where OTEL_EXPORTER_OTLP_ENDPOINT says. Needs the extra `tracing`."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [BatchSpanProcessor(OTLPSpanExporter())]


@contextmanager
def _span(name: str) -> Iterator[Span]:
    """A child of the current span, ended with the block; the invalid one where no trace is recorded.

    Serve opens no span for a trace that it doesn't sample: a span of ours would begin another trace then.
    """
    if not trace.get_current_span().is_recording():
        yield INVALID_SPAN
        return
    span = _tracer.start_span(name)
    try:
        yield span
    except BaseException as error:
        kind = type(root_cause(error)).__name__
        span.set_attribute("error.type", kind)
        if (
            isinstance(error, Exception) and describe(error).status >= 500
        ):  # not the caller's, nor a caller who leaves
            span.set_status(Status(StatusCode.ERROR, kind))
        raise
    finally:
        span.end()


def _annotate(span: Span, **attributes: str | float | None) -> None:
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(_PREFIX + name, value)
