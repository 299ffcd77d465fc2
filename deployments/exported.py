"""Every metric that we export, by name, unit and labels, and how Ray takes it.

    Ingress ── each request's end ──┐
    Talker, Codec, ReferenceEncoder ┴─> Ray's metrics agent of the node ──> Prometheus, or GET /metrics
             └─ counts, once a second

Ray puts `ray_` before a name and `_total` behind a counter's, and adds who it was: `application`,
`deployment`, `replica`. Our own labels take few values, all of the server's making: never a text, a
voice, or a request's id. Histograms are for quantiles: Ray's agent keeps their buckets and takes a
bucket's middle for each value, so that a `_sum` is an estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from ray.serve import metrics as ray_metrics

from qwen3tts_core.engine.tally import BATCH_ROWS, STEP_SECONDS

_LATENCY_S = (
    0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0
)  # fmt: skip
_RTF = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0)
_GAP_S = (0.01, 0.02, 0.05, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """name: as Ray is told. buckets: upper bounds, of a histogram."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        """As Prometheus knows it; a histogram's series add `_bucket`, `_count`, `_sum`."""
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


def _counter(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(f"qwen3tts_{name}", "counter", help_text, labels)


def _gauge(name: str, help_text: str) -> Metric:
    return Metric(f"qwen3tts_{name}", "gauge", help_text)


def _histogram(name: str, help_text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(f"qwen3tts_{name}", "histogram", help_text, labels, buckets)


# ---------------------------------------------------------------- what clients get; the ingress counts it
REQUESTS = _counter("requests", "speech requests by how they ended", "model", "outcome", "reason")
TTFA = _histogram("ttfa_seconds", "accepted to first audio byte written", _LATENCY_S, "model", "streamed")
RTF = _histogram("rtf", "seconds from accepted to the end, per second of audio", _RTF, "model", "streamed")
CHUNK_GAP = _histogram("chunk_gap_seconds", "between two writes of a stream", _GAP_S, "model")
STREAMS = _counter("streams", "streamed answers that had audio", "model")
UNDERRUNS = _counter("underruns", "streams whose player waits over 100 ms in all", "model")
UNDERRUN_SECONDS = _counter("underrun_seconds", "how long the players of all streams wait", "model")
AUDIO_FRAMES = _counter("audio_frames", "frames of 80 ms sent", "model")
AUDIO_SECONDS = _counter("audio_seconds", "audio sent", "model")
RESUMES = _counter("resumes", "streams taken up again after an engine was lost", "model")

# ---------------------------------------------------------------- the Talker
SLOTS_USED = _gauge("slots_used", "streams that run")
SLOTS = _gauge("slots", "streams that can run at once")
PAGES_USED = _gauge("pages_used", "KV pages that streams hold")
PAGES = _gauge("pages", "KV pages")
QUEUE_LENGTH = _gauge("queue_length", "requests that wait for a slot")
TALKER_REQUESTS = _counter("talker_requests", "requests taken in")
TALKER_CANCELLED = _counter("talker_cancelled", "of them, those whose consumer left")
TALKER_FRAMES = _counter("talker_frames", "frames made")
PREFILL_TOKENS = _counter("prefill_tokens", "prompt rows put into the KV cache")
DECODE_STEPS = _counter("decode_steps", "decode steps, by the rows of their bucket", "bucket")
DECODE_ROWS = _counter("decode_rows", "streams advanced, summed over the steps")
DECODE_PADDED_ROWS = _counter("decode_padded_rows", "rows that only filled a bucket")
TALKER_STEP_SECONDS = _histogram(
    "talker_step_seconds", "one turn of the loop with a decode step", STEP_SECONDS
)

# ---------------------------------------------------------------- the Codec
CODEC_ROWS_USED = _gauge("codec_rows_used", "streams with a row")
CODEC_ROWS = _gauge("codec_rows", "streams that can be decoded at once")
CODEC_QUEUE_LENGTH = _gauge("codec_queue_length", "chunks that wait for their decoding, or are in it")
CODEC_CHUNKS = _counter("codec_chunks", "chunks handed out")
CODEC_FRAMES = _counter("codec_frames", "frames handed out as audio")
CODEC_BATCHES = _counter("codec_batches", "batches decoded")
CODEC_DECODED_ROWS = _counter("codec_decoded_rows", "streams continued, summed over the batches")
CODEC_BATCH_ROWS = _histogram("codec_batch_rows", "streams in a batch", BATCH_ROWS)
CODEC_STEP_SECONDS = _histogram(
    "codec_step_seconds", "one batch, from its choice to its samples", STEP_SECONDS
)
CODEC_PADDED_ROWS = _counter("codec_padded_rows", "rows that only filled a bucket")
CODEC_PADDED_FRAMES = _counter("codec_padded_frames", "frames decoded only to fill a bucket")
CODEC_FAULTS = _counter("codec_faults", "streams that ended with an error")

# ---------------------------------------------------------------- several of them
GRAPH_REPLAYS = _counter("graph_replays", "steps that replayed a captured graph")
EAGER_STEPS = _counter("eager_steps", "steps that didn't: 0 on a GPU, every step on CPU")
CACHE_LOOKUPS = _counter("cache_lookups", "voices asked of a memory", "cache", "result")

METRICS: tuple[Metric, ...] = tuple(value for value in globals().values() if isinstance(value, Metric))


class Sink(Protocol):
    """Where values go: Ray, or a test's memory. labels: one for each of the metric's own."""

    def add(self, counter: Metric, value: float, labels: Mapping[str, str]) -> None: ...

    def set(self, gauge: Metric, value: float, labels: Mapping[str, str]) -> None: ...

    def observe(self, histogram: Metric, value: float, labels: Mapping[str, str]) -> None: ...


class RaySink:
    """To Ray's agent on this node, some seconds later; a call takes about 2 us. One for each replica."""

    def __init__(self) -> None:
        self._made = {metric.name: _make(metric) for metric in METRICS}

    def add(self, counter: Metric, value: float, labels: Mapping[str, str]) -> None:
        """value: 0 makes the series exist."""
        # Counter.inc refuses 0; without it a rate over a first increment would be lost.
        self._made[counter.name]._record(value, dict(labels))

    def set(self, gauge: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._made[gauge.name].set(value, dict(labels))

    def observe(self, histogram: Metric, value: float, labels: Mapping[str, str]) -> None:
        self._made[histogram.name].observe(value, dict(labels))


def _make(metric: Metric) -> ray_metrics.Counter | ray_metrics.Gauge | ray_metrics.Histogram:
    if metric.kind == "counter":
        return ray_metrics.Counter(metric.name, metric.help, metric.labels)
    if metric.kind == "gauge":
        return ray_metrics.Gauge(metric.name, metric.help, metric.labels)
    return ray_metrics.Histogram(metric.name, metric.help, list(metric.buckets), metric.labels)
