"""The codec engine as its callers see it: what goes in comes out once, in order, and the rows return."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qwen3tts_core.config import CheckpointConfig, CodecEngineConfig
from qwen3tts_core.engine import threads
from qwen3tts_core.engine.codec_engine import CodecEngine
from qwen3tts_core.engine.codec_rows import Seams
from qwen3tts_core.engine.outbox import AsyncOutbox
from qwen3tts_core.engine.tally import BATCH_ROWS, STEP_SECONDS, Tally
from qwen3tts_core.errors import EngineFault, InvalidCodes, Overloaded
from qwen3tts_core.model.codec_decoder import open_codec_decoder
from qwen3tts_core.ops.reference import HostTransfer, run_eagerly
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.streaming.codec_window import exact_left_context
from qwen3tts_core.streaming.pcm import FULL_SCALE
from qwen3tts_core.types import FrameBatch
from tests.qwen3tts_core.codec_kit import (
    MINI,
    ListOutbox,
    batch_of,
    mini_decoder,
    random_codes,
    reference,
    whole_pcm,
)

SPF = MINI.samples_per_frame
EXACT = exact_left_context(MINI)
ONE_STEP = 1  # of PCM16: float32 sums in another order, next to a rounding edge
MODES = ["incremental", "window"]
DECODER = mini_decoder()
TINY = Path(__file__).parents[3] / "checkpoints/tiny"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def tiny():
    return open_codec_decoder(TINY, CheckpointConfig.from_checkpoint(TINY).codec)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class TickingClock(Clock):
    def __call__(self):
        self.now += 0.001
        return self.now


def make_engine(outbox=None, clock=None, decoder=DECODER, **config):
    """A small engine, not started: the tests turn its loop by `run`. Windows are wide enough to be exact."""
    config = {"num_rows": 4, "frame_buckets": (1, 4, 9), "left_context_frames": EXACT} | config
    return CodecEngine(
        decoder,
        CodecEngineConfig(**config),
        ListOutbox() if outbox is None else outbox,
        Seams(run_eagerly, HostTransfer()),
        clock=clock or Clock(),
    )


def run(engine):
    """Turn the loop until nothing waits."""
    engine.step()
    while engine.stats().num_waiting:
        engine.step()


def submit_all(engine, request_id, codes, cuts, finish="stop"):
    first = 0
    for num_frames in cuts:
        first += num_frames
        last = finish if first == len(codes) else None
        engine.submit(request_id, batch_of(codes, first - num_frames, num_frames, last))


def assert_sounds_like(samples, expected):
    """Samples against float PCM, within one step."""
    assert len(samples) == len(expected)
    np.testing.assert_allclose(samples, np.round(expected * FULL_SCALE), atol=ONE_STEP)


# ---------------------------------------------------------------- audio
@pytest.mark.parametrize("mode", MODES)
def test_chunks_of_every_ramp_point_share_batches_and_keep_their_own_samples(mode):
    """known_faults row 6: each its own samples, frames x samples per frame."""
    engine = make_engine(mode=mode)
    outbox, streams = engine._outbox, {}
    for number, cuts in enumerate([[1, 3, 9, 9], [9, 9, 1], [3, 1, 1, 1], [30]]):
        codes = streams[f"r{number}"] = random_codes(sum(cuts), seed=number)
        engine.open(f"r{number}")
        submit_all(engine, f"r{number}", codes, cuts)
    run(engine)
    for request_id, codes in streams.items():
        chunks = outbox.items[request_id]
        assert all(len(chunk.pcm) == 2 * SPF * chunk.num_frames for chunk in chunks)
        assert b"".join(chunk.codes for chunk in chunks) == codes.tobytes()
        assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
        assert_sounds_like(outbox.pcm(request_id), whole_pcm(DECODER, codes))
    assert engine.stats().batches <= 5, "they didn't share batches"
    assert engine.stats().num_free_rows == 4, "rows go back with the finish"


@pytest.mark.parametrize("context", [0, 5])
def test_window_mode_equals_separate_windows_at_the_same_cuts(context):
    engine, codes = make_engine(mode="window", left_context_frames=context), random_codes(31, seed=3)
    engine.open("r")
    submit_all(engine, "r", codes, [9, 9, 9, 4])
    run(engine)
    expected = []
    for first in range(0, 31, 9):
        start = max(0, first - context)
        expected.append(whole_pcm(DECODER, codes[start : first + 9])[(first - start) * SPF :])
    assert_sounds_like(engine._outbox.pcm("r"), np.concatenate(expected))


def test_an_end_that_comes_alone_passes_through_in_its_turn():
    engine, codes = make_engine(), random_codes(4)
    engine.open("r")
    engine.submit("r", batch_of(codes, 0, 4))
    engine.submit("r", FrameBatch(4, 0, 0, b"", "length"))  # groups aren't known where no frame is
    run(engine)
    first, last = engine._outbox.items["r"]
    assert (first.num_frames, first.finish) == (4, None)
    assert (last.first_frame, last.num_frames, last.pcm, last.codes, last.finish) == (
        4,
        0,
        b"",
        b"",
        "length",
    )


def test_a_stream_of_no_frames_ends():
    engine = make_engine()
    engine.open("r")
    engine.submit("r", FrameBatch(0, 0, 0, b"", "stop"))
    run(engine)
    assert [chunk.finish for chunk in engine._outbox.items["r"]] == ["stop"]


@pytest.mark.parametrize("mode", MODES)
def test_deterministic_bytes_are_the_same_alone_and_among_seven(tiny, mode):
    """One bucket for all, so neither neighbours nor the place in the batch can round differently."""
    codes, cuts = random_codes(29, seed=1, config=tiny.config), [1, 3, 9, 9, 7]
    config = {"mode": mode, "num_rows": 8, "left_context_frames": 5, "deterministic": True}
    alone = make_engine(decoder=tiny, **config)
    assert len(alone._rows.steps.buckets) == 1
    alone.open("mine")
    submit_all(alone, "mine", codes, cuts)
    run(alone)

    crowded = make_engine(decoder=tiny, **config)
    for number in range(7):
        crowded.open(f"other{number}")
        if number == 4:
            crowded.open("mine")
        other = random_codes(20, seed=50 + number, config=tiny.config)
        submit_all(crowded, f"other{number}", other, [number + 1, 9, 10 - number])
    first = 0
    for num_frames in cuts:  # not all at once: the neighbours change under way
        crowded.submit("mine", batch_of(codes, first, num_frames))
        first += num_frames
        crowded.step()
    run(crowded)
    assert [c.num_frames for c in crowded._outbox.items["mine"]] == cuts
    assert crowded._outbox.pcm("mine").tobytes() == alone._outbox.pcm("mine").tobytes()
    assert crowded.stats().padded_frames > 0


# ---------------------------------------------------------------- references and replay
@pytest.mark.parametrize("mode", MODES)
def test_a_clone_goes_on_from_its_reference_whose_audio_is_never_heard(mode):
    """known_faults row 8: the reference's state is carried on through every chunk."""
    engine, voice, codes = make_engine(mode=mode), random_codes(23, seed=5), random_codes(12, seed=6)
    expected = whole_pcm(DECODER, np.concatenate([voice, codes]))[23 * SPF :]
    for request_id in ("first", "again"):
        engine.open(request_id, reference("voice", voice))
        submit_all(engine, request_id, codes, [1, 3, 8])
        run(engine)
        assert [chunk.first_frame for chunk in engine._outbox.items[request_id]] == [0, 1, 4]
        assert_sounds_like(engine._outbox.pcm(request_id), expected)
    plain = np.round(whole_pcm(DECODER, codes) * FULL_SCALE)
    assert np.abs(engine._outbox.pcm("first")[: 3 * SPF] - plain[: 3 * SPF]).max() > 5, "not primed at all"


def test_a_voice_is_primed_once_and_the_oldest_is_forgotten():
    engine = make_engine(max_primed_voices=2)
    voices = {key: reference(key, random_codes(9, seed=ord(key))) for key in "abc"}

    def batches_to_start(key):
        before = engine.stats().batches
        engine.open("r", voices[key])
        run(engine)
        engine.close("r")
        return engine.stats().batches - before

    assert [batches_to_start(key) for key in "aabba"] == [1, 0, 1, 0, 0]
    assert [batches_to_start(key) for key in "cab"] == [1, 0, 1], "b was the longest unused"
    engine.open("no voice")
    run(engine)
    assert (engine.stats().primed_hits, engine.stats().primed_misses) == (4, 4)


def test_voices_with_different_keys_are_never_mixed_up():
    """known_faults row 10: no other request's voice at the onset."""
    engine, codes = make_engine(), random_codes(4)
    engine.open("r1", reference("key 1", random_codes(9, seed=1)))
    run(engine)
    engine.open("r2", reference("key 2", random_codes(9, seed=2)))
    submit_all(engine, "r2", codes, [4])
    run(engine)
    expected = whole_pcm(DECODER, np.concatenate([random_codes(9, seed=2), codes]))[9 * SPF :]
    assert_sounds_like(engine._outbox.pcm("r2"), expected)


def test_an_x_vector_reference_has_no_frames_to_prime_with():
    engine, codes = make_engine(), random_codes(4)
    engine.open("r", reference("x-vector only", codes[:0]))
    submit_all(engine, "r", codes, [4])
    run(engine)
    assert_sounds_like(engine._outbox.pcm("r"), whole_pcm(DECODER, codes))


@pytest.mark.parametrize("mode", MODES)
def test_a_replayed_stream_goes_on_where_the_lost_one_stopped(mode):
    engine, voice, codes = make_engine(mode=mode), random_codes(11, seed=7), random_codes(40, seed=8)
    expected = whole_pcm(DECODER, np.concatenate([voice, codes]))[11 * SPF :]
    engine.open("r", reference("voice", voice))
    engine.replay("r", codes[:28].tobytes())
    engine.submit("r", batch_of(codes, 28, 12, "stop"))
    run(engine)
    (chunk,) = engine._outbox.items["r"]
    assert (chunk.first_frame, chunk.finish) == (28, "stop")
    assert_sounds_like(engine._outbox.pcm("r"), expected[28 * SPF :])


def test_a_deterministic_replay_at_the_same_cuts_goes_on_with_the_same_bytes():
    codes, cuts = random_codes(38, seed=9), [1, 3, 8, 9, 9, 8]
    whole, resumed = make_engine(deterministic=True), make_engine(deterministic=True)
    whole.open("r")
    submit_all(whole, "r", codes, cuts)
    run(whole)
    resumed.open("r")
    resumed.replay("r", codes[:21].tobytes(), cuts=[1, 3, 8, 9])
    for first, num_frames in ((21, 9), (30, 8)):
        resumed.submit("r", batch_of(codes, first, num_frames))
    run(resumed)
    assert resumed._outbox.pcm("r").tobytes() == whole._outbox.pcm("r")[21 * SPF :].tobytes()


def test_replay_is_refused_where_it_can_t_be_right():
    engine, codes = make_engine(), random_codes(6)
    engine.open("r")
    with pytest.raises(InvalidCodes, match="cuts of 5 frames"):
        engine.replay("r", codes.tobytes(), cuts=[2, 3])
    engine.submit("r", batch_of(codes, 0, 6))
    with pytest.raises(EngineFault, match="before any frames"):
        engine.replay("r", codes.tobytes())


# ---------------------------------------------------------------- refusals and faults
def bad(**changes):
    return batch_of(random_codes(4), 0, 4)._replace(**changes)


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        (bad(first_frame=1), "expected frame 5, got 1"),
        (bad(first_frame=6), "expected frame 5, got 6"),
        (bad(first_frame=5, num_groups=2), "expected 3 code groups, got 2"),
        (bad(first_frame=5, num_frames=3), "3 frames announced, 4 sent"),
        (bad(first_frame=5, codes=b"123"), "whole frames"),
        (bad(first_frame=5, codes=np.full((4, 3), 16, "<i2").tobytes()), r"must be in \[0, 16\), got 16"),
        (bad(first_frame=5, codes=np.full((4, 3), -1, "<i2").tobytes()), r"must be in \[0, 16\), got -1"),
    ],
)
def test_undecodable_frames_end_their_own_stream_after_the_audio_before_them(frames, says):
    engine, codes = make_engine(), random_codes(9, seed=2)
    for request_id in ("bad", "good"):
        engine.open(request_id)
        engine.submit(request_id, batch_of(codes, 0, 5))
    engine.submit("bad", frames)
    engine.submit("bad", batch_of(codes, 5, 4))
    engine.submit("good", batch_of(codes, 5, 4, "stop"))
    run(engine)
    engine.submit("bad", batch_of(codes, 5, 4))  # after the error: taken, and nothing comes of it
    run(engine)
    audio, error = engine._outbox.items["bad"]
    assert audio.num_frames == 5
    assert isinstance(error, InvalidCodes)
    with pytest.raises(InvalidCodes, match=says):
        raise error
    assert_sounds_like(engine._outbox.pcm("good"), whole_pcm(DECODER, codes))
    assert engine.stats().num_free_rows == 4


def test_a_reference_that_can_t_be_decoded_takes_no_row():
    engine = make_engine()
    with pytest.raises(InvalidCodes, match=r"\[0, 16\)"):
        engine.open("r", reference("voice", np.full((4, 3), 99, np.int16)))
    assert engine.stats().num_free_rows == 4


def test_frames_after_the_finish_are_refused():
    engine = make_engine()
    engine.open("r")
    engine.submit("r", batch_of(random_codes(4), 0, 4, "stop"))
    with pytest.raises(InvalidCodes, match="after the finish"):
        engine.submit("r", bad(first_frame=4))


def test_more_streams_than_rows_are_refused_at_once():
    engine = make_engine(num_rows=2)
    engine.open("a")
    engine.open("b")
    with pytest.raises(Overloaded, match="all 2 codec rows"):
        engine.open("c")
    engine.close("a")
    engine.open("c")
    with pytest.raises(EngineFault, match="isn't open"):
        engine.submit("a", bad())


def test_a_fault_in_a_batch_ends_its_streams_and_the_engine_lives_on(monkeypatch, caplog):
    engine, codes = make_engine(num_rows=3), random_codes(5, seed=4)
    engine.open("idle")
    for request_id in ("one", "two"):
        engine.open(request_id)
        engine.submit(request_id, batch_of(codes, 0, 5))
    with monkeypatch.context() as broken:
        broken.setattr(engine._rows, "decode", lambda pieces: 1 / 0)
        engine.step()
    for request_id in ("one", "two"):
        (error,) = engine._outbox.items[request_id]
        assert isinstance(error, EngineFault)
        assert "ZeroDivisionError" in str(error)
    assert "one, two" in caplog.text
    assert engine.stats().num_free_rows == 2
    engine.close("one")
    engine.open("next")
    for request_id in ("next", "idle"):
        engine.submit(request_id, batch_of(codes, 0, 5, "stop"))
    run(engine)
    for request_id in ("next", "idle"):
        assert_sounds_like(engine._outbox.pcm(request_id), whole_pcm(DECODER, codes))
    engine.check_health()


def test_nan_ends_the_stream_it_is_in_and_isn_t_played():
    engine, codes = make_engine(), random_codes(8, seed=4)
    for request_id in ("sick", "well"):
        engine.open(request_id)
        engine.submit(request_id, batch_of(codes, 0, 4))
    run(engine)
    engine._rows.state.values[engine._scheduler.find("sick").row] = float("nan")
    for request_id in ("sick", "well"):
        engine.submit(request_id, batch_of(codes, 4, 4, "stop"))
    run(engine)
    assert "NaN" in str(engine._outbox.items["sick"][-1])
    assert_sounds_like(engine._outbox.pcm("well"), whole_pcm(DECODER, codes))
    engine.close("sick")
    for number in range(4):  # the sick row among them
        engine.open(f"next{number}")
        engine.submit(f"next{number}", batch_of(codes, 0, 8, "stop"))
    run(engine)
    for number in range(4):
        assert_sounds_like(engine._outbox.pcm(f"next{number}"), whole_pcm(DECODER, codes))


def test_a_row_that_can_t_be_made_ready_ends_its_stream_alone(monkeypatch):
    engine, codes = make_engine(), random_codes(4)
    engine.open("sick")
    monkeypatch.setattr(engine._rows, "start", lambda *_: 1 / 0)
    engine.step()
    monkeypatch.undo()
    engine.replay("sick", codes.tobytes())
    engine.submit("sick", batch_of(codes, 0, 4, "stop"))
    engine.open("well")  # in the same row
    engine.submit("well", batch_of(codes, 0, 4, "stop"))
    run(engine)
    assert len(engine._outbox.items["sick"]) == 1
    assert isinstance(engine._outbox.items["sick"][0], EngineFault)
    assert_sounds_like(engine._outbox.pcm("well"), whole_pcm(DECODER, codes))


def test_an_engine_that_fails_every_batch_says_so(monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine._rows, "decode", lambda pieces: 1 / 0)
    for number in range(3):
        engine.check_health()
        engine.open(f"r{number}")
        engine.submit(f"r{number}", bad())
        engine.step()
    with pytest.raises(EngineFault, match="last 3 batches failed"):
        engine.check_health()
    monkeypatch.undo()
    engine.open("works")
    engine.submit("works", bad())
    engine.step()
    engine.check_health()


def test_a_batch_that_hangs_does_not_keep_stop_from_returning(monkeypatch, caplog):
    engine, entered, leave = make_engine(), threading.Event(), threading.Event()
    decode = engine._rows.decode

    def hang(pieces):
        entered.set()
        assert leave.wait(60)
        return decode(pieces)

    monkeypatch.setattr(engine._rows, "decode", hang)
    monkeypatch.setattr(threads, "STOP_WITHIN_S", 0.05)
    engine.start()
    engine.open("r")
    engine.submit("r", batch_of(random_codes(5), 0, 5))
    assert entered.wait(60)
    stopping = threading.Thread(target=engine.stop, daemon=True)
    stopping.start()
    try:
        stopping.join(60)
        assert not stopping.is_alive()
        assert "codec-engine didn't end within 0.05 s" in caplog.text
    finally:
        leave.set()


def test_a_batch_that_never_ends_is_noticed(monkeypatch):
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.open("r")
    engine.submit("r", bad())
    decode = engine._rows.decode

    def slow_decode(pieces):
        engine.check_health()
        clock.now += 121
        with pytest.raises(EngineFault, match="in one turn for 121 s"):
            engine.check_health()
        return decode(pieces)

    monkeypatch.setattr(engine._rows, "decode", slow_decode)
    engine.step()
    engine.check_health()
    assert len(engine._outbox.items["r"]) == 1


def test_a_row_that_is_never_made_ready_is_noticed_too(monkeypatch):
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.open("r")

    def slow_start(*_):
        clock.now += 121
        with pytest.raises(EngineFault, match="in one turn for 121 s"):
            engine.check_health()
        raise ZeroDivisionError

    monkeypatch.setattr(engine._rows, "start", slow_start)
    engine.step()
    clock.now += 1000
    engine.check_health()  # idle, however long


def test_batches_are_counted_by_their_streams_and_their_time(monkeypatch):
    clock = Clock()
    engine = make_engine(clock=clock)
    decode = engine._rows.decode

    def slow_decode(pieces):
        clock.now += 0.04
        return decode(pieces)

    monkeypatch.setattr(engine._rows, "decode", slow_decode)
    for streams in (1, 3):
        for number in range(streams):
            engine.open(f"{streams}-{number}")
            engine.submit(f"{streams}-{number}", bad())
        engine.step()
    stats = engine.stats()
    assert (stats.batches, stats.rows, stats.num_rows) == (2, 4, stats.num_rows_in_use + stats.num_free_rows)
    expected_rows, expected_seconds = Tally(BATCH_ROWS), Tally(STEP_SECONDS)
    for rows in (1, 3):
        expected_rows.add(rows)
        expected_seconds.add(0.04)
    assert (stats.batch_rows, stats.batch_seconds) == (expected_rows.counts(), expected_seconds.counts())
    assert (stats.eager_steps, stats.graph_replays) == (2, 0)  # on CPU nothing is captured


# ---------------------------------------------------------------- leaving
def test_closing_during_a_batch_keeps_the_row_until_it_is_done(monkeypatch):
    engine, codes = make_engine(num_rows=1), random_codes(8, seed=4)
    engine.open("gone")
    engine.submit("gone", batch_of(codes, 0, 4))
    engine.submit("gone", batch_of(codes, 4, 4))
    decode = engine._rows.decode

    def decode_while_the_client_leaves(pieces):
        engine.close("gone")
        with pytest.raises(Overloaded):
            engine.open("next")
        return decode(pieces)

    with monkeypatch.context() as leaving:
        leaving.setattr(engine._rows, "decode", decode_while_the_client_leaves)
        engine.step()
    assert engine._outbox.items["gone"] == []
    assert engine.stats().num_waiting == 0
    engine.open("next")
    engine.submit("next", batch_of(codes, 0, 8, "stop"))
    run(engine)
    assert_sounds_like(engine._outbox.pcm("next"), whole_pcm(DECODER, codes))


def test_closing_while_its_row_is_made_ready_gives_the_row_back_after(monkeypatch):
    engine = make_engine(num_rows=1)
    start = engine._rows.start

    def start_while_the_client_leaves(*arguments):
        engine.close("gone")
        with pytest.raises(Overloaded):
            engine.open("next")
        return start(*arguments)

    engine.open("gone", reference("voice", random_codes(9)))
    monkeypatch.setattr(engine._rows, "start", start_while_the_client_leaves)
    engine.step()
    assert engine.stats().num_free_rows == 1
    assert engine.stats().num_waiting == 0
    assert engine.stats().batches == 0
    assert not engine._outbox.items


def test_closing_twice_or_after_the_end_frees_a_row_once():
    engine = make_engine(num_rows=2)
    engine.open("r")
    engine.submit("r", batch_of(random_codes(4), 0, 4, "stop"))
    run(engine)
    for _ in range(2):
        engine.close("r")
    engine.close("never there")
    assert engine.stats().num_free_rows == 2


# ---------------------------------------------------------------- the thread
@pytest.fixture
def running():
    """Engines that are stopped whatever happens."""
    engines = []

    def start(**config):
        engine = make_engine(**config)
        engines.append(engine)
        engine.start()
        return engine

    yield start
    for engine in engines:
        engine.stop()


class WaitingOutbox(ListOutbox):
    def __init__(self):
        super().__init__()
        self.changed = threading.Condition()

    def flush(self):
        with self.changed:
            super().flush()
            self.changed.notify_all()

    def wait_for(self, request_id, num_items):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.items[request_id]) >= num_items, timeout=120)


def test_audio_reaches_an_event_loop_while_the_next_frames_are_still_to_come(running):
    codes = random_codes(53, seed=12)

    async def speak(engine, outbox, request_id):
        sizes, chunks, first = ChunkRamp((1, 3, 8, 16), 25).sizes(), [], 0
        with outbox.stream(request_id) as audio:
            engine.open(request_id)
            while first < len(codes):
                num_frames = next(sizes)
                last = first + num_frames >= len(codes)
                engine.submit(request_id, batch_of(codes, first, num_frames, "stop" if last else None))
                first += num_frames
                chunks.append(await audio.get())  # one out for one in, before more goes in
            engine.close(request_id)
        return chunks

    async def main():
        outbox = AsyncOutbox(asyncio.get_running_loop())
        engine = running(outbox=outbox)
        return await asyncio.gather(*(speak(engine, outbox, f"r{number}") for number in range(4)))

    for chunks in asyncio.run(main()):
        assert [chunk.num_frames for chunk in chunks] == [1, 3, 8, 16, 25]
        pcm = np.frombuffer(b"".join(chunk.pcm for chunk in chunks), "<i2")
        assert_sounds_like(pcm, whole_pcm(DECODER, codes))


def submit_in_a_crowd(engine, outbox, codes, num_heard):
    """As "r0" among 66 streams: the first frames, which are heard, then the rest, which may wait for others."""
    for number in range(66):
        engine.open(f"r{number}")
    engine.submit("r0", batch_of(codes, 0, num_heard))
    outbox.wait_for("r0", 1)
    engine.submit("r0", batch_of(codes, num_heard, len(codes) - num_heard, "stop"))


def test_chunks_that_wait_for_others_go_when_nobody_comes(running):
    """The loop sleeps until a chunk's patience ends, and wakes by itself."""
    outbox = WaitingOutbox()
    engine = running(outbox=outbox, clock=time.monotonic, num_rows=66, batch_wait_s=1.0)
    codes = random_codes(10, seed=5)
    submit_in_a_crowd(engine, outbox, codes, num_heard=1)
    outbox.wait_for("r0", 2)
    assert_sounds_like(outbox.pcm("r0"), whole_pcm(DECODER, codes))


def test_a_chunk_left_alone_stops_waiting_when_the_others_leave(running, monkeypatch):
    """Time stands still here, and the loop's sleep ends by a word alone."""
    outbox = WaitingOutbox()
    engine = running(outbox=outbox, num_rows=66, batch_wait_s=1.0)
    waits_for_others, sleep = threading.Event(), engine._wake.wait

    def sleep_until_notified(timeout):
        if timeout is not None:
            waits_for_others.set()
        sleep()

    monkeypatch.setattr(engine._wake, "wait", sleep_until_notified)
    submit_in_a_crowd(engine, outbox, random_codes(59, seed=5), num_heard=50)
    assert waits_for_others.wait(120)
    assert len(outbox.items["r0"]) == 1
    for number in range(1, 66):
        engine.close(f"r{number}")
    outbox.wait_for("r0", 2)


def test_many_threads_may_open_submit_and_close(running):
    """known_faults row 38: calls from several threads, all of them right."""
    outbox = WaitingOutbox()
    engine = running(outbox=outbox, num_rows=6)

    def client(number):
        for turn in range(5):
            request_id, codes = f"{number}/{turn}", random_codes(10, seed=number)
            engine.open(request_id)
            submit_all(engine, request_id, codes, [1, 3, 6])
            if turn % 2:
                outbox.wait_for(request_id, 3)
                assert_sounds_like(outbox.pcm(request_id), whole_pcm(DECODER, codes))
            engine.close(request_id)
            while engine.stats().num_free_rows == 0:  # a closed row may still be in a batch
                pass

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(client, number) for number in range(3)]:
            done.result(timeout=240)
    engine.stop()
    assert engine.stats().num_free_rows == 6


def test_a_stopped_engine_tells_its_streams_and_takes_nothing(running):
    outbox = WaitingOutbox()
    engine = running(outbox=outbox)
    engine.open("r")
    engine.check_health()
    engine.stop()
    assert isinstance(outbox.items["r"][-1], EngineFault)
    for use in (engine.check_health, lambda: engine.open("s"), lambda: engine.submit("r", bad())):
        with pytest.raises(EngineFault, match="stopped"):
            use()
    engine.close("r")


def test_a_dead_loop_is_unhealthy_and_its_streams_hear_of_it(running, monkeypatch):
    outbox = WaitingOutbox()
    engine = running(outbox=outbox)
    monkeypatch.setattr(engine._scheduler, "take_batch", lambda now: 1 / 0)
    engine.open("r")
    outbox.wait_for("r", 1)
    assert isinstance(outbox.items["r"][0], EngineFault)
    engine._thread.join(60)
    with pytest.raises(EngineFault, match="died: ZeroDivisionError"):
        engine.check_health()
    with pytest.raises(EngineFault, match="died"):
        engine.open("s")


# ---------------------------------------------------------------- anything, in any order
class AnyOrder(RuleBasedStateMachine):
    """Random opens, submits, closes and turns: every chunk comes out once, in order; rows return."""

    NUM_ROWS = 3
    VOICES = {"none": random_codes(0), "short": random_codes(3, seed=70), "long": random_codes(22, seed=71)}  # noqa: RUF012

    @initialize(
        mode=st.sampled_from(MODES), deterministic=st.booleans(), batch_wait_s=st.sampled_from([0.0, 1.0])
    )
    def build(self, mode, deterministic, batch_wait_s):
        self.mode = mode
        self.engine = make_engine(
            clock=TickingClock(),
            batch_wait_s=batch_wait_s,
            num_rows=self.NUM_ROWS,
            mode=mode,
            deterministic=deterministic,
            max_primed_voices=1,
            frame_buckets=(1, 5),
        )
        self.outbox = self.engine._outbox
        self.open, self.ended, self.num_opened = {}, {}, 0

    @rule(voice=st.sampled_from(sorted(VOICES)))
    def open_stream(self, voice):
        self.num_opened += 1
        request_id, voice_codes = f"r{self.num_opened}", self.VOICES[voice]
        try:
            self.engine.open(request_id, reference(voice, voice_codes) if len(voice_codes) else None)
        except Overloaded:
            assert self.engine.stats().num_free_rows == 0
            return
        self.open[request_id] = {
            "codes": random_codes(200, seed=self.num_opened), "sent": [], "finish": None, "fault": None,
            "voice": voice_codes,
        }  # fmt: skip

    @precondition(lambda self: self.open)
    @rule(
        data=st.data(),
        num_frames=st.integers(0, 12),
        finish=st.sampled_from([None, None, None, "stop", "length"]),
    )
    def submit(self, data, num_frames, finish):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        stream = self.open[request_id]
        if stream["finish"] is not None:
            return
        first = sum(stream["sent"])
        self.engine.submit(request_id, batch_of(stream["codes"], first, num_frames, finish))
        if stream["fault"] is None:
            stream["sent"].append(num_frames)
            stream["finish"] = finish

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def submit_nonsense(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        stream = self.open[request_id]
        if stream["finish"] is None and stream["fault"] is None:
            first = sum(stream["sent"])
            self.engine.submit(request_id, FrameBatch(first + 1, 1, 3, bytes(6)))
            stream["fault"] = InvalidCodes

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.engine.close(request_id)
        self.ended[request_id] = self.open.pop(request_id)

    @rule()
    def turn(self):
        self.engine.step()

    @invariant()
    def rows_are_never_lost_or_doubled(self):
        stats = self.engine.stats()
        assert stats.num_rows_in_use + stats.num_free_rows == self.NUM_ROWS
        assert stats.num_rows_in_use <= len(self.open)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        run(self.engine)
        for request_id, stream in self.open.items():
            self.check(request_id, stream, len(stream["sent"]))
        for request_id, stream in self.ended.items():
            self.check(request_id, stream, None)
        for request_id in list(self.open):
            self.engine.close(request_id)
        assert self.engine.stats().num_free_rows == self.NUM_ROWS
        if self.mode == "incremental":
            assert self.engine._rows.state.positions[-1] == 0, "padding has advanced the spare row"

    def check(self, request_id, stream, num_chunks):
        items = list(self.outbox.items[request_id])
        if num_chunks is not None and stream["fault"] is not None:
            assert isinstance(items.pop(), stream["fault"])
        chunks = [item for item in items if not isinstance(item, Exception)]
        assert num_chunks is None or len(chunks) == num_chunks
        assert [chunk.num_frames for chunk in chunks] == stream["sent"][: len(chunks)]
        assert [len(chunk.pcm) for chunk in chunks] == [2 * SPF * chunk.num_frames for chunk in chunks]
        num_frames = sum(chunk.num_frames for chunk in chunks)
        if num_frames:
            heard = np.concatenate([stream["voice"], stream["codes"][:num_frames]])
            expected = whole_pcm(DECODER, heard)[len(stream["voice"]) * SPF :]
            pcm = np.frombuffer(b"".join(chunk.pcm for chunk in chunks), "<i2")
            assert_sounds_like(pcm, expected)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
