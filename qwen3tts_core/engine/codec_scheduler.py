"""Which streams the next codec batch holds. Pure bookkeeping, no tensors and no threads.

    open ──> row taken ──> work, work, … ──> last audio out, or failed, or closed ──> row back

Work-conserving: whatever waits is taken, nothing is waited for. Urgent work goes first: streams
that nobody has heard yet (TTFA), and chunks whose playback deadline has passed. It also sets the
batch's width, so that a 1-frame first chunk isn't padded to the 25 frames of a chunk that has a
second in hand. The rest follows by deadline. A stream is in at most one batch, with at most one
piece, so its order is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from qwen3tts_core.errors import EngineFault, Overloaded, TTSError
from qwen3tts_core.types import FrameBatch, ReferenceVoice

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
    more will come out; the row is back.
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

    max_rows: for each frame bucket, rising, the rows that a batch padded to it may have.
    """

    def __init__(self, *, num_rows: int, max_rows: Mapping[int, int], seconds_per_frame: float) -> None:
        self._num_rows, self._max_rows, self._seconds_per_frame = num_rows, max_rows, seconds_per_frame
        self._frame_buckets = tuple(max_rows)
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

    @property
    def has_work(self) -> bool:
        return any(stream.work or not stream.is_started for stream in self._streams.values())

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

    def take_batch(self, now: float) -> list[Piece]:
        """The next batch, most urgent first; its streams are in flight until `landed`."""
        waiting = sorted((*self._urgency(stream, now), i, stream) for i, stream in enumerate(self._idle()))
        batch: list[Piece] = []
        width, has_urgent = 0, False
        for is_later, *_, stream in waiting:
            padded = max(width, self._width(stream))
            if len(batch) >= self._max_rows[padded] or (is_later and has_urgent and padded > width):
                continue
            width, has_urgent = padded, has_urgent or not is_later
            work = stream.work[0]
            end = work.num_decoded + self._frame_buckets[-1]
            batch.append(Piece(stream, work, work.codes[work.num_decoded : end]))
            stream.is_in_flight = True
        return batch

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

    def _urgency(self, stream: CodecStream, now: float) -> tuple[bool, float]:
        """(can wait, since or until when): sorts the most urgent first."""
        work = stream.work[0]
        due = self.deadline(stream, work.batch.first_frame) if work.batch is not None else None
        if due is None:
            return False, work.arrived_at
        return due > now, due

    def _width(self, stream: CodecStream) -> int:
        """The frame bucket of a stream's next piece."""
        num_frames = stream.work[0].num_left
        return next((size for size in self._frame_buckets if size >= num_frames), self._frame_buckets[-1])
