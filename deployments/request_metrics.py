"""One request's end as metrics: what its client got, whatever the end was."""

from __future__ import annotations

from collections.abc import Iterable

from deployments.exported import (
    AUDIO_FRAMES,
    AUDIO_SECONDS,
    CHUNK_GAP,
    REQUESTS,
    RESUMES,
    RTF,
    STREAMS,
    TTFA,
    UNDERRUN_SECONDS,
    UNDERRUNS,
    Sink,
)
from deployments.metrics import RequestRecord

_FROM_THE_START = (STREAMS, UNDERRUNS, UNDERRUN_SECONDS, AUDIO_FRAMES, AUDIO_SECONDS, RESUMES)
NO_MODEL = "none"
"""The model of a request that ended before it was known."""


class RequestMetrics:
    """models: by name, so that their counts are there before their first request."""

    def __init__(self, sink: Sink, models: Iterable[str]) -> None:
        self._sink = sink
        for model in models:
            for counter in _FROM_THE_START:
                sink.add(counter, 0, {"model": model})

    def ended(self, record: RequestRecord) -> None:
        """Call once, when the record is closed."""
        sink, model = self._sink, {"model": record.model or NO_MODEL}
        sink.add(REQUESTS, 1, {**model, "outcome": record.outcome, "reason": record.reason})
        if record.num_resumes:
            sink.add(RESUMES, record.num_resumes, model)
        if record.ttfa_s is None:  # no audio was sent
            return
        sink.add(AUDIO_FRAMES, record.num_frames, model)
        sink.add(AUDIO_SECONDS, record.audio_s, model)
        delivery = {**model, "streamed": "true" if record.is_streamed else "false"}
        sink.observe(TTFA, record.ttfa_s, delivery)
        if record.outcome == "ok" and record.rtf is not None:
            sink.observe(RTF, record.rtf, delivery)
        if record.is_streamed:
            self._streamed(record, model)

    def _streamed(self, record: RequestRecord, model: dict[str, str]) -> None:
        self._sink.add(STREAMS, 1, model)
        self._sink.add(UNDERRUN_SECONDS, record.player.waited_s, model)
        if record.player.has_underrun:
            self._sink.add(UNDERRUNS, 1, model)
        for gap_s in record.player.gaps_s:
            self._sink.observe(CHUNK_GAP, gap_s, model)
