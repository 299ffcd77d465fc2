"""Which streams the next codec batch holds. Pure bookkeeping, no tensors and no threads.

    open ──> row taken ──> work, work, … ──> last audio out, or failed, or closed ──> row back

Urgent work goes first and at once: streams that nobody has heard yet (TTFA), and chunks whose playback
deadline has passed. The rest may wait a little for others of its kind, since a few large batches cost the
GPU half of what many small ones do: at most `batch_wait_s`, at most a quarter of the time to its deadline, and
hardly at all while few streams are open. Which lengths share a batch: `codec_batching`. A stream is in at
most one batch, with at most one piece, so its order is kept.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qwen3tts_core.engine.codec_batching import BatchShapes
from qwen3tts_core.errors import EngineFault, Overloaded, TTSError
from qwen3tts_core.types import FrameBatch, ReferenceVoice

_CROWD = 64
"""Open streams beside a chunk's own from which on it waits as long as it may; a stream alone waits for nobody."""

Codes = NDArray[np.int16]  # [F, G], group 0 first


@dataclass(slots=True, eq=False)
class Work:
    """Frames to decode for one purpose, in pieces of at most the largest frame bucket.

    batch: leaves as this one's audio; None if only the state after it matters. error: comes out in
    place of audio. primes: the voice key to keep the state under once all frames are through.
    """

    codes: Codes
    arrived_at: float
    batch: FrameBatch | None = None
    error: TTSError | None = None
    primes: str | None = None
    num_decoded: int = 0
    parts: list[bytes] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return len(self.codes) - self.num_decoded


@dataclass(slots=True, eq=False)
class CodecStream:
    """One request's place in the engine.

    next_frame: the frame that the next submitted batch must start with. plays_from: when frame 0
    is heard (clock of the engine), None until the first audio is out. has_last: the batch with the
    finish was submitted. has_failed: an error is on its way out or out already. is_over: nothing
    more will come out; the row is back. taken_at: when its last piece was: one with many, as a long
    replay, takes turns with whoever comes in the meantime.
    """

    request_id: str
    row: int
    reference: ReferenceVoice | None = None
    work: deque[Work] = field(default_factory=deque)
    next_frame: int = 0
    plays_from: float | None = None
    has_last: bool = False
    has_failed: bool = False
    is_started: bool = False
    is_in_flight: bool = False
    is_closed: bool = False
    is_over: bool = False
    taken_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Piece:
    """One stream's part of a batch: the next frames of its first work."""

    stream: CodecStream
    work: Work
    codes: Codes

    @property
    def ends_work(self) -> bool:
        return len(self.codes) == self.work.num_left


class CodecScheduler:
    """Rows, streams and their waiting work.

    batch_wait_s: how long a chunk that isn't urgent may wait for others.
    """

    def __init__(
        self, *, num_rows: int, shapes: BatchShapes, seconds_per_frame: float, batch_wait_s: float = 0.0
    ) -> None:
        self._num_rows, self._shapes, self._seconds_per_frame = num_rows, shapes, seconds_per_frame
        self._batch_wait_s = batch_wait_s
        self._free_rows = list(reversed(range(num_rows)))
        self._streams: dict[str, CodecStream] = {}

    # ------------------------------------------------------------ streams and rows
    def open(self, request_id: str, reference: ReferenceVoice | None) -> CodecStream:
        """Raises Overloaded when every row is taken, EngineFault for an id that is open."""
        if request_id in self._streams:
            raise EngineFault(f"request {request_id!r} is open already")
        if not self._free_rows:
            raise Overloaded(f"all {self._num_rows} codec rows are taken")
        stream = CodecStream(request_id, self._free_rows.pop(), reference)
        self._streams[request_id] = stream
        return stream

    def find(self, request_id: str) -> CodecStream:
        """Raises EngineFault for an id that isn't open."""
        try:
            return self._streams[request_id]
        except KeyError:
            raise EngineFault(f"request {request_id!r} isn't open") from None

    def close(self, request_id: str) -> None:
        """Forget a stream; a row in use goes back with `landed`. Unknown ids are fine."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.is_closed = True
            if not stream.is_in_flight:
                self.end(stream)

    def end(self, stream: CodecStream) -> None:
        """Nothing more will come out of this stream: take its row back."""
        assert not stream.is_in_flight, "a row in a batch isn't free"
        stream.work.clear()
        if not stream.is_over:
            stream.is_over = True
            self._free_rows.append(stream.row)

    def landed(self, stream: CodecStream) -> bool:
        """The batch with this stream is done. False if the stream was closed meanwhile."""
        stream.is_in_flight = False
        if stream.is_closed:
            self.end(stream)
        return not stream.is_closed

    def streams(self) -> list[CodecStream]:
        return list(self._streams.values())

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_waiting(self) -> int:
        """Works waiting, those in a batch included."""
        return sum(len(stream.work) for stream in self._streams.values())

    # ------------------------------------------------------------ what runs next
    def take_new(self) -> list[CodecStream]:
        """Streams whose row must be made ready; in flight until `landed`."""
        new = [stream for stream in self._streams.values() if not stream.is_started]
        for stream in new:
            stream.is_started = stream.is_in_flight = True
        return new

    def undecodable(self) -> list[CodecStream]:
        """Streams whose first work needs no decoding: an empty last batch, or an error."""
        return [stream for stream in self._idle() if not stream.work[0].num_left]

    def ready_at(self, now: float) -> float:
        """When there is something to do, if nothing arrives until then: now, or later, or never (infinity)."""
        if any(not stream.is_started for stream in self._streams.values()):
            return now
        waiting = self._idle()
        if not waiting:
            return math.inf
        earliest = min(map(self._waits_until, waiting))
        if earliest <= now or any(not stream.work[0].num_left for stream in waiting):
            return now
        if not self._shapes.may_be_full(len(waiting), max(map(self._width, waiting))):
            return earliest
        parts = self._divided(waiting)
        return now if any(self._shapes.is_full(len(part), width) for width, part in parts) else earliest

    def take_batch(self, now: float) -> list[Piece]:
        """The next batch, most urgent first; its streams are in flight until `landed`. Empty: see `ready_at`."""
        urgency = {stream: self._urgency(stream, now) for stream in self._idle()}
        waiting = sorted(urgency, key=lambda stream: urgency[stream])
        urgent = [stream for stream in waiting if not urgency[stream][0]]
        for width, part in self._divided(urgent or waiting):
            has_waited = min(map(self._waits_until, part)) <= now
            if urgent or has_waited or self._shapes.is_full(len(part), width):
                chosen = self._batch(part, width, waiting, is_urgent=bool(urgent))
                return [self._piece(stream, now) for stream in chosen]
        return []

    def _divided(self, waiting: Sequence[CodecStream]) -> list[tuple[int, list[CodecStream]]]:
        """Which streams share a batch, and its width; in the order of their first ones."""
        widths = self._shapes.divide(Counter(map(self._width, waiting)))
        parts: dict[int, list[CodecStream]] = {}
        for stream in waiting:
            parts.setdefault(widths[bisect_left(widths, self._width(stream))], []).append(stream)
        return list(parts.items())

    def _batch(
        self, part: Sequence[CodecStream], width: int, waiting: Sequence[CodecStream], *, is_urgent: bool
    ) -> list[CodecStream]:
        """The first of a part, and whoever else costs less here than in a batch of their own."""
        shapes = self._shapes
        num_rows = min(len(part), shapes.max_rows[width])
        chosen = list(part[: num_rows if is_urgent else shapes.without_padding(num_rows, width)])
        for stream in waiting:
            if not shapes.may_join(len(chosen), width):
                break
            if stream not in chosen and self._width(stream) <= width:
                chosen.append(stream)
        return chosen

    def _piece(self, stream: CodecStream, now: float) -> Piece:
        stream.is_in_flight, stream.taken_at = True, now
        work = stream.work[0]
        end = work.num_decoded + self._shapes.widths[-1]
        return Piece(stream, work, work.codes[work.num_decoded : end])

    def deadline(self, stream: CodecStream, first_frame: int) -> float | None:
        """When a player that started with the first audio needs that frame."""
        if stream.plays_from is None:
            return None
        return stream.plays_from + first_frame * self._seconds_per_frame

    def heard(self, stream: CodecStream, first_frame: int, now: float) -> None:
        """Audio from `first_frame` on just left; the first time, a player starts."""
        if stream.plays_from is None:
            stream.plays_from = now - first_frame * self._seconds_per_frame

    def _idle(self) -> list[CodecStream]:
        idle = (s for s in self._streams.values() if s.is_started and not s.is_in_flight)
        return [stream for stream in idle if stream.work]

    def _due(self, stream: CodecStream) -> float | None:
        """The deadline of a stream's first work; None for what nobody plays, or hasn't begun to."""
        batch = stream.work[0].batch
        return None if batch is None else self.deadline(stream, batch.first_frame)

    def _urgency(self, stream: CodecStream, now: float) -> tuple[bool, float]:
        """(can wait, since or until when): sorts the most urgent first."""
        due = self._due(stream)
        if due is None:
            return False, max(stream.work[0].arrived_at, stream.taken_at)
        return due > now, due

    def _waits_until(self, stream: CodecStream) -> float:
        """When a stream's first work has waited long enough for others."""
        due, arrived_at = self._due(stream), stream.work[0].arrived_at
        if due is None:
            return arrived_at
        crowd = min(1.0, (len(self._streams) - 1) / _CROWD)
        return arrived_at + max(0.0, min(self._batch_wait_s * crowd, (due - arrived_at) / 4))

    def _width(self, stream: CodecStream) -> int:
        """The frame bucket of a stream's next piece."""
        return self._shapes.width(stream.work[0].num_left)
