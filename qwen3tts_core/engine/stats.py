"""What engines count, as snapshots that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TalkerStats:
    """A snapshot. From `requests` on, counts since the start, frames stepped through again included, but for the
    slots and pages. rows: streams advanced, over all steps. step_seconds: a `Tally` over STEP_SECONDS."""

    num_running: int
    num_waiting: int
    num_free_slots: int
    num_free_pages: int
    requests: int
    frames: int
    steps: int
    padded_rows: int
    prefill_rows: int
    num_slots: int
    num_pages: int
    num_used_pages: int
    cancelled: int
    rows: int
    graph_replays: int
    eager_steps: int
    steps_by_bucket: dict[int, int]
    step_seconds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CodecStats:
    """A snapshot; from `chunks` on, counts since the start, but for num_rows. padded_*: decoded only to fill a
    bucket. rows: streams continued, over all batches. batch_*: `Tally`s over BATCH_ROWS and STEP_SECONDS."""

    num_rows_in_use: int
    num_free_rows: int
    num_waiting: int
    chunks: int
    frames: int
    batches: int
    padded_rows: int
    padded_frames: int
    faults: int
    num_rows: int
    rows: int
    graph_replays: int
    eager_steps: int
    primed_hits: int
    primed_misses: int
    batch_rows: tuple[int, ...]
    batch_seconds: tuple[int, ...]
