"""Who is in the next codec batch, and where the rows are."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qwen3tts_core.engine.codec_batching import BatchShapes
from qwen3tts_core.engine.codec_scheduler import CodecScheduler, Work
from qwen3tts_core.errors import EngineFault, InvalidCodes, Overloaded
from qwen3tts_core.types import FrameBatch

FRAME_S = 0.08


def make_scheduler(num_rows=8, frame_buckets=(1, 4, 16), max_batch=4, batch_wait_s=0.0):
    max_rows = dict.fromkeys(frame_buckets, max_batch)
    batch_buckets = [1 << i for i in range(max_batch.bit_length())]
    return CodecScheduler(
        num_rows=num_rows,
        shapes=BatchShapes(max_rows, batch_buckets),
        seconds_per_frame=FRAME_S,
        batch_wait_s=batch_wait_s,
    )


def work(num_frames, first=0, at=0.0, **others):
    codes = np.full((num_frames, 2), first, np.int16)
    return Work(codes, at, batch=FrameBatch(first, num_frames, 2, codes.tobytes()), **others)


def started(scheduler, *ids):
    streams = [scheduler.open(request_id, None) for request_id in ids]
    for stream in scheduler.take_new():
        scheduler.landed(stream)
    return streams


def ids(batch):
    return [piece.stream.request_id for piece in batch]


def land(scheduler, batch):
    for piece in batch:
        if scheduler.landed(piece.stream):
            piece.work.num_decoded += len(piece.codes)
            if not piece.work.num_left:
                piece.stream.work.popleft()


# ---------------------------------------------------------------- order
def test_first_chunks_go_before_chunks_that_can_wait():
    scheduler = make_scheduler()
    playing, fresh, fresher = started(scheduler, "playing", "fresh", "fresher")
    scheduler.heard(playing, 0, now=10.0)
    playing.work.append(work(16, first=28, at=10.0))
    fresher.work.append(work(1, at=10.3))
    fresh.work.append(work(1, at=10.2))
    batch = scheduler.take_batch(now=10.4)
    assert ids(batch) == ["fresh", "fresher"], "a first chunk isn't padded to 16 frames"
    assert ids(scheduler.take_batch(now=10.4)) == ["playing"], "and nothing waits while work is there"


def test_a_chunk_that_fits_the_first_chunks_bucket_rides_along():
    scheduler = make_scheduler()
    playing, fresh = started(scheduler, "playing", "fresh")
    scheduler.heard(playing, 0, now=10.0)
    playing.work.append(work(3, first=28, at=10.0))
    fresh.work.append(work(2, at=10.2))
    assert ids(scheduler.take_batch(now=10.3)) == ["fresh", "playing"]


def test_the_earliest_playback_deadline_goes_first():
    scheduler = make_scheduler(max_batch=2)
    a, b, c = started(scheduler, "a", "b", "c")
    for stream, began, first in ((a, 10.0, 28), (b, 10.5, 4), (c, 9.0, 28)):
        scheduler.heard(stream, 0, now=began)
        stream.work.append(work(8, first=first, at=10.6))
    # due: a 12.24, b 10.82, c 11.24
    assert ids(scheduler.take_batch(now=10.6)) == ["b", "c"]
    assert ids(scheduler.take_batch(now=10.6)) == ["a"]


def test_a_chunk_whose_deadline_has_passed_is_as_urgent_as_a_first_chunk():
    scheduler = make_scheduler()
    late, fresh = started(scheduler, "late", "fresh")
    scheduler.heard(late, 0, now=0.0)
    late.work.append(work(16, first=4, at=0.1))
    fresh.work.append(work(1, at=5.0))
    assert ids(scheduler.take_batch(now=5.0)) == ["late", "fresh"]


def test_streams_at_any_point_of_the_ramp_share_a_batch():
    scheduler = make_scheduler()
    streams = started(scheduler, *"abcd")
    for stream, num_frames in zip(streams, (1, 3, 8, 16), strict=True):
        scheduler.heard(stream, 0, now=0.0)
        stream.work.append(work(num_frames, first=num_frames))
    batch = scheduler.take_batch(now=0.0)
    assert sorted(len(piece.codes) for piece in batch) == [1, 3, 8, 16]


def test_a_resumed_stream_plays_from_its_first_audio():
    scheduler = make_scheduler()
    (stream,) = started(scheduler, "resumed")
    scheduler.heard(stream, 100, now=50.0)
    scheduler.heard(stream, 125, now=50.1)
    assert scheduler.deadline(stream, 125) == pytest.approx(52.0)


def test_long_work_is_taken_in_pieces_of_the_largest_bucket():
    scheduler = make_scheduler()
    (stream,) = started(scheduler, "long")
    stream.work.append(work(40))
    sizes = []
    while batch := scheduler.take_batch(now=0.0):
        sizes += [(len(piece.codes), piece.ends_work) for piece in batch]
        land(scheduler, batch)
    assert sizes == [(16, False), (16, False), (8, True)]


@pytest.mark.parametrize("replay", [[160], [16] * 10])
def test_first_chunks_take_turns_with_a_long_replay(replay):
    """Of a clone's reference or of a stream that goes on here: many pieces, and each of them came first."""
    scheduler = make_scheduler(max_batch=8)
    replayed, *fresh = started(scheduler, "replayed", *"abcd")
    for num_frames in replay:
        replayed.work.append(Work(np.zeros((num_frames, 2), np.int16), 10.0))
    land(scheduler, scheduler.take_batch(now=10.0))
    for stream in fresh:
        stream.work.append(work(1, at=10.1))
    batches = []
    for now in (10.2, 10.3, 10.4):
        batches.append(scheduler.take_batch(now))
        land(scheduler, batches[-1])
    assert not any(stream.work for stream in fresh)
    assert ["replayed" in ids(batch) for batch in batches] == [True, False, True], "it goes on, too"


def test_what_needs_no_decoding_is_handed_out_in_its_turn():
    scheduler = make_scheduler()
    (stream,) = started(scheduler, "ends")
    stream.work.extend([work(1), work(0, first=1)])
    assert scheduler.undecodable() == []
    land(scheduler, scheduler.take_batch(now=0.0))
    assert scheduler.undecodable() == [stream]
    stream.work[0] = Work(np.zeros((0, 2), np.int16), 0.0, error=InvalidCodes("bad"))
    assert scheduler.undecodable() == [stream]


def test_a_batch_has_no_more_rows_than_its_width_allows():
    """Wide pieces in small batches; narrow ones fill up what is left."""
    shapes = BatchShapes({1: 8, 16: 2}, (1, 2, 4, 8))
    scheduler = CodecScheduler(num_rows=8, shapes=shapes, seconds_per_frame=FRAME_S)
    wide = started(scheduler, *"abc")
    narrow = started(scheduler, *"defg")
    for number, stream in enumerate([*wide, *narrow]):
        stream.work.append(work(16 if stream in wide else 1, at=float(number)))
    assert ids(scheduler.take_batch(now=9.0)) == ["a", "b"]
    assert ids(scheduler.take_batch(now=9.0)) == ["c", "d"]
    assert ids(scheduler.take_batch(now=9.0)) == ["e", "f", "g"]


# ---------------------------------------------------------------- waiting for others
def crowded(num_frames=16, num_open=65, first=28, batch_wait_s=0.02, **others):
    """A scheduler with many streams open, one of which has a chunk that arrived at 10.0 and is due at 12.24."""
    scheduler = make_scheduler(num_rows=num_open, max_batch=16, batch_wait_s=batch_wait_s, **others)
    streams = started(scheduler, *(f"s{i}" for i in range(num_open)))
    for stream in streams:
        scheduler.heard(stream, 0, now=10.0)
    streams[0].work.append(work(num_frames, first=first, at=10.0))
    return scheduler, streams


def test_a_chunk_that_isn_t_needed_yet_waits_for_others():
    scheduler, streams = crowded()
    assert scheduler.take_batch(now=10.0) == []
    assert scheduler.ready_at(now=10.0) == pytest.approx(10.02)
    streams[1].work.append(work(16, first=28, at=10.01))
    assert scheduler.take_batch(now=10.019) == []
    assert sorted(ids(scheduler.take_batch(now=10.021))) == ["s0", "s1"]
    assert math.isinf(scheduler.ready_at(now=10.021))


def test_a_full_batch_waits_no_longer():
    scheduler, streams = crowded()
    for stream in streams[1:13]:
        stream.work.append(work(16, first=28, at=10.0))
    assert scheduler.ready_at(now=10.0) == 10.0
    assert len(scheduler.take_batch(now=10.0)) == 8, "the rest waits: they'd pad eight rows to sixteen"
    assert scheduler.take_batch(now=10.0) == []
    assert len(scheduler.take_batch(now=10.03)) == 4


def test_a_stream_alone_waits_for_nobody_and_few_wait_little():
    scheduler, _ = crowded(num_open=1)
    assert ids(scheduler.take_batch(now=10.0)) == ["s0"]
    scheduler, _ = crowded(num_open=17)
    assert scheduler.ready_at(now=10.0) == pytest.approx(10.005)


def test_nobody_waits_for_longer_than_a_quarter_of_what_is_left():
    scheduler, _ = crowded(batch_wait_s=1.0, first=1)
    assert scheduler.ready_at(now=10.0) == pytest.approx(10.02)
    scheduler, streams = crowded(batch_wait_s=1.0, first=1)
    streams[0].work[0].arrived_at = 11.0
    assert ids(scheduler.take_batch(now=11.0)) == ["s0"], "it is late already"


def test_an_end_that_comes_alone_waits_for_nobody():
    """There is nothing to decode, so nothing to gain."""
    scheduler, streams = crowded()
    streams[1].work.append(work(0, first=28, at=10.001))
    assert scheduler.ready_at(now=10.001) == 10.001
    assert scheduler.undecodable() == [streams[1]]


def test_first_chunks_never_wait_and_aren_t_held_up_by_those_that_do():
    scheduler, _ = crowded()
    scheduler.close("s64")
    (new,) = started(scheduler, "new")
    new.work.append(work(1, at=10.001))
    assert scheduler.ready_at(now=10.001) == 10.001
    assert ids(scheduler.take_batch(now=10.001)) == ["new"]
    assert scheduler.take_batch(now=10.001) == []


def may_wait_until(scheduler, stream, batch_wait_s):
    """What `batch_wait_s` promises for the stream's first work, however many are open."""
    first, due = stream.work[0], scheduler.deadline(stream, stream.work[0].batch.first_frame)
    return first.arrived_at + (0 if due is None else max(0, min(batch_wait_s, (due - first.arrived_at) / 4)))


@given(
    max_rows=st.sampled_from([{1: 8, 4: 4, 16: 2}, {1: 1, 4: 1, 16: 1}, {4: 2, 16: 8}, {16: 8}]),
    arrivals=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([1, 3, 16, 40]), st.sampled_from([0.0, 0.02, 0.3])),
        min_size=1, max_size=30,
    ),
    num_heard=st.sampled_from([2, 9, 10]),
    batch_wait_s=st.sampled_from([0.0, 0.04, 1.0]),
)  # fmt: skip
@example(  # rows that rise with the width, as where memory was too short for the last shapes: two short ones are full
    max_rows={4: 2, 16: 8},
    arrivals=[(0, 16, 0.0), (1, 3, 0.0), (2, 3, 0.0)],
    num_heard=10,
    batch_wait_s=1.0,
)
def test_what_waits_goes_exactly_when_it_was_said_to(max_rows, arrivals, num_heard, batch_wait_s):
    """The loop sleeps until `ready_at`: too early and it turns in vain, too late and a chunk waits for too long."""
    shapes = BatchShapes(max_rows, (1, 2, 4, 8))
    scheduler = CodecScheduler(
        num_rows=65, shapes=shapes, seconds_per_frame=FRAME_S, batch_wait_s=batch_wait_s
    )
    streams, now, first = started(scheduler, *(f"s{i}" for i in range(65))), 10.0, [0] * 10
    for stream in streams[:num_heard]:
        scheduler.heard(stream, 0, now + 1.0)
    for number, num_frames, gap in [*arrivals, (None, 0, math.inf)]:
        arrives_at = now + gap
        while True:
            ready_at = scheduler.ready_at(now)
            if ready_at > now:
                assert scheduler.take_batch(now) == []
            if ready_at >= arrives_at:
                break
            waiting = [stream for stream in streams if stream.work]
            assert ready_at <= max(now, min(may_wait_until(scheduler, s, batch_wait_s) for s in waiting))
            now = max(now, ready_at)
            batch = scheduler.take_batch(now)
            assert batch
            land(scheduler, batch)
        now = min(arrives_at, 1e6)
        if number is not None:
            streams[number].work.append(work(num_frames, first=first[number], at=now))
            first[number] += num_frames
    assert scheduler.num_waiting == 0


# ---------------------------------------------------------------- rows
def test_a_row_too_many_is_refused_and_comes_free_by_closing():
    scheduler = make_scheduler(num_rows=1)
    scheduler.open("a", None)
    with pytest.raises(Overloaded):
        scheduler.open("b", None)
    scheduler.close("a")
    scheduler.open("b", None)


def test_an_id_is_open_once_and_unknown_ids_are_named():
    scheduler = make_scheduler()
    scheduler.open("a", None)
    with pytest.raises(EngineFault, match="'a' is open already"):
        scheduler.open("a", None)
    with pytest.raises(EngineFault, match="'b' isn't open"):
        scheduler.find("b")
    scheduler.close("b")
    assert scheduler.num_free_rows == 7


def test_a_row_in_a_batch_isn_t_handed_on_before_the_batch_is_done():
    scheduler = make_scheduler(num_rows=1)
    (stream,) = started(scheduler, "a")
    stream.work.append(work(1))
    scheduler.take_batch(now=0.0)
    scheduler.close("a")
    with pytest.raises(Overloaded):
        scheduler.open("b", None)
    assert not scheduler.landed(stream)
    assert scheduler.open("b", None).row == stream.row


def test_a_stream_is_decoded_only_after_its_row_is_ready():
    scheduler = make_scheduler()
    stream = scheduler.open("a", None)
    stream.work.append(work(1))
    assert scheduler.ready_at(now=0.0) == 0.0
    assert scheduler.take_batch(now=0.0) == []
    assert scheduler.take_new() == [stream]
    assert scheduler.take_batch(now=0.0) == [], "its row is still being made ready"
    scheduler.landed(stream)
    assert ids(scheduler.take_batch(now=0.0)) == ["a"]


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=40),
    heard=st.lists(st.floats(0, 5), min_size=6, max_size=6),
    gap=st.floats(0.001, 2),
)
def test_everything_is_decoded_in_order_and_nobody_starves(arrivals, heard, gap):
    """Random work for six streams; each batch holds a stream once."""
    scheduler, order, now = make_scheduler(max_batch=3), {}, 5.0
    streams = started(scheduler, *"abcdef")
    first = [0] * 6
    for number, num_frames in arrivals:
        streams[number].work.append(work(num_frames, first=first[number], at=now))
        first[number] += num_frames
    for stream, began in zip(streams, heard, strict=True):
        if began > 2.5:
            scheduler.heard(stream, 0, now=began)
    turns = 0
    while not math.isinf(scheduler.ready_at(now)):
        batch = scheduler.take_batch(now)
        assert 0 < len(batch) <= 3
        assert len(set(ids(batch))) == len(batch)
        for piece in batch:
            order.setdefault(piece.stream.request_id, []).extend(piece.codes[:, 0].tolist())
        land(scheduler, batch)
        now += gap
        turns += 1
    assert turns <= sum(-(-num_frames // 16) for _, num_frames in arrivals)
    for name, stream in zip("abcdef", range(6), strict=True):
        mine = [num_frames for number, num_frames in arrivals if number == stream]
        starts = np.cumsum([0, *mine])[:-1]
        assert order.get(name, []) == [int(s) for s, n in zip(starts, mine, strict=True) for _ in range(n)]
