"""From an engine's counts to metrics, once a second, so that a step of the engine pays for nothing of it.

An engine's thread bumps plain counters; `EnginePublisher` reads its `stats` and exports what has been
added since. A stat is found by its name in a table, and one that isn't there is nobody's metric.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from deployments.exported import (
    CACHE_LOOKUPS,
    CODEC_BATCH_ROWS,
    CODEC_BATCHES,
    CODEC_CHUNKS,
    CODEC_DECODED_ROWS,
    CODEC_FAULTS,
    CODEC_FRAMES,
    CODEC_PADDED_FRAMES,
    CODEC_PADDED_ROWS,
    CODEC_QUEUE_LENGTH,
    CODEC_ROWS,
    CODEC_ROWS_USED,
    CODEC_STEP_SECONDS,
    DECODE_PADDED_ROWS,
    DECODE_ROWS,
    DECODE_STEPS,
    EAGER_STEPS,
    GRAPH_REPLAYS,
    PAGES,
    PAGES_USED,
    PREFILL_TOKENS,
    QUEUE_LENGTH,
    SLOTS,
    SLOTS_USED,
    TALKER_CANCELLED,
    TALKER_FRAMES,
    TALKER_REQUESTS,
    TALKER_STEP_SECONDS,
    Metric,
    Sink,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PERIOD_S = 1.0


class Series(NamedTuple):
    """A metric with the labels that this stat has."""

    metric: Metric
    labels: Mapping[str, str] = {}


Table = Mapping[str, Series]


def _lookups(cache: str, result: str) -> Series:
    return Series(CACHE_LOOKUPS, {"cache": cache, "result": result})


def memory_table(cache: str) -> Table:
    """Of a `MemoStats`. joined: waited for another's computation of the same."""
    return {
        "num_hits": _lookups(cache, "hit"),
        "num_joined": _lookups(cache, "joined"),
        "num_runs": _lookups(cache, "miss"),
    }


VOICES_TABLE: Table = {
    **memory_table("ingress"),
    "stored_hits": _lookups("stored", "hit"),
    "stored_misses": _lookups("stored", "miss"),
}
"""By the fields of `VoiceLookups`."""

TALKER_TABLE: Table = {
    "num_running": Series(SLOTS_USED),
    "num_slots": Series(SLOTS),
    "num_used_pages": Series(PAGES_USED),
    "num_pages": Series(PAGES),
    "num_waiting": Series(QUEUE_LENGTH),
    "requests": Series(TALKER_REQUESTS),
    "cancelled": Series(TALKER_CANCELLED),
    "frames": Series(TALKER_FRAMES),
    "prefill_rows": Series(PREFILL_TOKENS),
    "steps_by_bucket": Series(DECODE_STEPS),
    "rows": Series(DECODE_ROWS),
    "padded_rows": Series(DECODE_PADDED_ROWS),
    "step_seconds": Series(TALKER_STEP_SECONDS),
    "graph_replays": Series(GRAPH_REPLAYS),
    "eager_steps": Series(EAGER_STEPS),
}
"""By the fields of `TalkerStats`."""

CODEC_TABLE: Table = {
    "num_rows_in_use": Series(CODEC_ROWS_USED),
    "num_rows": Series(CODEC_ROWS),
    "num_waiting": Series(CODEC_QUEUE_LENGTH),
    "chunks": Series(CODEC_CHUNKS),
    "frames": Series(CODEC_FRAMES),
    "batches": Series(CODEC_BATCHES),
    "rows": Series(CODEC_DECODED_ROWS),
    "batch_rows": Series(CODEC_BATCH_ROWS),
    "batch_seconds": Series(CODEC_STEP_SECONDS),
    "padded_rows": Series(CODEC_PADDED_ROWS),
    "padded_frames": Series(CODEC_PADDED_FRAMES),
    "faults": Series(CODEC_FAULTS),
    "graph_replays": Series(GRAPH_REPLAYS),
    "eager_steps": Series(EAGER_STEPS),
    "primed_hits": _lookups("codec", "hit"),
    "primed_misses": _lookups("codec", "miss"),
}
"""By the fields of `CodecStats`."""


class EnginePublisher:
    """read: the engine's stats. What a stat may hold: a number; {label: count}, for a counter with one
    label of its own; the counts of a `Tally` with the bounds of its histogram."""

    def __init__(self, read: Callable[[], DataclassInstance], table: Table, sink: Sink) -> None:
        self._read, self._table, self._sink = read, table, sink
        self._seen: dict[tuple[str, object], float] = {}

    def publish(self) -> None:
        stats = self._read()
        for field in dataclasses.fields(stats):
            series = self._table.get(field.name)
            if series is not None:
                self._publish(field.name, getattr(stats, field.name), *series)

    def _publish(self, stat: str, value: Any, metric: Metric, labels: Mapping[str, str]) -> None:
        if metric.kind == "gauge":
            self._sink.set(metric, value, labels)
        elif metric.kind == "histogram":
            for bound, count in self._added(stat, _by_bound(value, metric.buckets)):
                for _ in range(int(count)):
                    self._sink.observe(metric, bound, labels)
        elif isinstance(value, Mapping):
            (label,) = metric.labels
            for key, count in self._added(stat, value):
                self._sink.add(metric, count, {**labels, label: str(key)})
        else:
            for _, count in self._added(stat, {None: value}):
                self._sink.add(metric, count, labels)

    def _added(self, stat: str, counts: Mapping[Any, float]) -> Iterator[tuple[Any, float]]:
        """What came since the last time; the first time all of it, nothing included."""
        for key, count in counts.items():
            seen = self._seen.get((stat, key))
            self._seen[stat, key] = count
            if seen is None or count > seen:
                yield key, count - (seen or 0)


def _by_bound(counts: Sequence[int], bounds: Sequence[float]) -> dict[float, int]:
    """A value in each bucket, with the bucket's count: its bound, or beyond all bounds the last one doubled."""
    return dict(zip((*bounds, 2 * bounds[-1]), counts, strict=True))


def start_publishing(
    read: Callable[[], DataclassInstance], table: Table, sink: Sink, period_s: float = PERIOD_S
) -> None:
    """Now, and on the running loop again and again, as long as it runs."""
    publisher, loop = EnginePublisher(read, table, sink), asyncio.get_running_loop()

    def publish() -> None:
        loop.call_later(period_s, publish)
        publisher.publish()  # should it ever raise, the loop logs it, and the next second is another try

    publish()
