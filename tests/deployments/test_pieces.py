"""Joining the pieces of a long text, over scripted streams."""

import asyncio
import gc
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.exceptions import BackPressureError

from deployments import utterance
from deployments.pieces import join_pieces
from deployments.utterance import Chains
from qwen3tts_core.errors import EngineFault, Overloaded
from qwen3tts_core.types import AudioChunk, PrefillPlan, Sampling, SpeechRequest
from tests.fakes import NUM_GROUPS, FakeStream, fake_codes, fake_pcm, until

SAMPLES = 4
SIZES = (1, 3, 8, 5)  # frames of a piece's chunks
NUM_FRAMES = sum(SIZES)


def make_requests(count):
    plan = PrefillPlan((1,), (1,), ())
    return [SpeechRequest(f"id.{n}", plan, Sampling(), seed=7, max_frames=100, piece=n) for n in range(count)]


def audio(piece, first=0, count=NUM_FRAMES):
    return fake_pcm(fake_codes(7, first, count, piece), SAMPLES)


class Source:
    """Starts streams as a codec handle does: each runs ahead in a task of its own.

    sizes: frames of each chunk, for every piece. finishes: by piece, "stop" where none is given. turns: of the
    event loop that a chunk takes. refusals: {piece: errors raised one by one}. alter: (piece, chunk) -> chunk, None
    to leave it out, or an error.
    """

    def __init__(self, sizes=SIZES, finishes=None, turns=1, refusals=None, alter=lambda _, chunk: chunk):
        self.sizes, self.finishes, self.turns, self.alter = sizes, finishes or {}, turns, alter
        self.refusals = {piece: list(errors) for piece, errors in (refusals or {}).items()}
        self.started, self.ids, self.made, self.num_running, self.streams = [], [], [], 0, []

    def __call__(self, request):
        self.started.append(request.piece)
        self.ids.append(request.request_id)
        self.streams.append(FakeStream(self._speak(request)))
        return self.streams[-1]

    async def _speak(self, request):
        self.num_running += 1
        try:
            if self.refusals.get(request.piece):
                raise self.refusals[request.piece].pop(0)
            first = 0
            for number, size in enumerate(self.sizes):
                for _ in range(self.turns):
                    await asyncio.sleep(0)
                is_last = number == len(self.sizes) - 1
                codes = fake_codes(request.seed, first, size, request.piece)
                finish = self.finishes.get(request.piece, "stop") if is_last else None
                chunk = AudioChunk(first, size, NUM_GROUPS, fake_pcm(codes, SAMPLES), codes.tobytes(), finish)
                chunk, first = self.alter(request.piece, chunk), first + size
                if isinstance(chunk, Exception):
                    raise chunk
                if chunk is not None:
                    self.made.append(request.piece)
                    yield chunk.to_bytes()
        finally:
            self.num_running -= 1


async def joined(source, count, max_frames=None, **options):
    async with aclosing(
        join_pieces(Chains(source), make_requests(count), SAMPLES, max_frames, **options)
    ) as chunks:
        return [chunk async for chunk in chunks]


def assert_one_stream(chunks, finish="stop"):
    """Counted on without a hole, and ended once, at the end."""
    position = 0
    for chunk in chunks:
        assert chunk.first_frame == position
        assert len(chunk.pcm) == chunk.num_frames * SAMPLES * 2
        assert len(chunk.codes) == chunk.num_frames * NUM_GROUPS * 2
        position += chunk.num_frames
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [finish]


# ---------------------------------------------------------------- what comes
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("sizes", [SIZES, (1,), (1, 3, 0)])
async def test_the_pieces_come_in_order_as_one_stream(count, sizes):
    source = Source(sizes)
    chunks = await joined(source, count)
    assert_one_stream(chunks)
    assert b"".join(chunk.pcm for chunk in chunks) == b"".join(audio(n, 0, sum(sizes)) for n in range(count))
    assert source.started == list(range(count))
    assert not any(stream.was_cancelled for stream in source.streams)


async def test_a_single_piece_is_passed_on_as_it_is():
    source = Source()
    chunks = await joined(source, 1)
    alone = [AudioChunk.from_bytes(item) async for item in source(make_requests(1)[0])]
    assert chunks == alone


@pytest.mark.parametrize("limited", [{0}, {1}, {2}, {0, 2}, set()])
async def test_length_is_the_finish_if_any_piece_ran_into_its_limit(limited):
    """known_faults rows 3 and 41: a runaway isn't recorded as complete, and costs the rest of the text nothing."""
    chunks = await joined(Source(finishes=dict.fromkeys(limited, "length")), 3)
    assert_one_stream(chunks, "length" if limited else "stop")
    assert sum(chunk.num_frames for chunk in chunks) == 3 * NUM_FRAMES


@given(max_frames=st.integers(1, 3 * NUM_FRAMES + 2))
def test_max_frames_cuts_the_whole_and_nothing_else(max_frames):
    async def check():
        source = Source()
        chunks = await joined(source, 3, max_frames)
        whole = b"".join(audio(n) for n in range(3))
        assert_one_stream(chunks, "length" if max_frames < 3 * NUM_FRAMES else "stop")
        assert b"".join(chunk.pcm for chunk in chunks) == whole[: max_frames * SAMPLES * 2]
        await until(lambda: source.num_running == 0)
        assert max(source.started) == min(max_frames - 1, 3 * NUM_FRAMES - 1) // NUM_FRAMES  # none in vain

    asyncio.run(check())


# ---------------------------------------------------------------- when it comes
async def test_the_next_piece_is_started_before_the_last_chunk_of_this_one_is_passed_on():
    """known_faults row 33: no gap between sentences. And not before: pieces aren't batched with each other."""
    source = Source(turns=3)
    async with aclosing(join_pieces(Chains(source), make_requests(4), SAMPLES)) as chunks:
        position = 0
        async for chunk in chunks:
            piece = chunk.first_frame // NUM_FRAMES
            position += chunk.num_frames
            if position % NUM_FRAMES == 0:
                assert source.started == list(range(min(piece + 2, 4)))
            else:
                assert source.started == list(range(piece + 1))


async def test_the_next_piece_speaks_while_the_last_chunk_is_played():
    source = Source(turns=3)
    async with aclosing(join_pieces(Chains(source), make_requests(5), SAMPLES)) as chunks:
        for _ in SIZES:
            await anext(chunks)
        for _ in range(200):  # the reader stands still
            await asyncio.sleep(0)
        assert source.made.count(1) == len(SIZES)
        assert source.started == [0, 1]


# ---------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize("piece", [0, 1, 2])
@pytest.mark.parametrize("number", range(len(SIZES)))
@pytest.mark.parametrize("fault", ["lost", "short", "error"])
async def test_a_piece_that_fails_fails_the_whole_without_an_end(piece, number, fault):
    first = sum(SIZES[:number])

    def alter(which, chunk):
        if which != piece or chunk.first_frame != first:
            return chunk
        if fault == "short":
            return chunk._replace(pcm=chunk.pcm[:-2])
        return None if fault == "lost" else RuntimeError("page 7")

    source, seen = Source(alter=alter), []

    async def collect():
        async with aclosing(join_pieces(Chains(source), make_requests(3), SAMPLES)) as chunks:
            async for chunk in chunks:
                seen.append(chunk)  # noqa: PERF401 - what came before the fault is what is looked at

    with pytest.raises(RuntimeError if fault == "error" else EngineFault):
        await collect()
    assert not any(chunk.finish for chunk in seen)
    whole = b"".join(audio(n) for n in range(3))
    assert whole.startswith(b"".join(chunk.pcm for chunk in seen))
    assert sum(chunk.num_frames for chunk in seen) == piece * NUM_FRAMES + first
    await until(lambda: source.num_running == 0)


@pytest.mark.parametrize("refusal", [Overloaded("full", 2.5), BackPressureError(1, 1)])
async def test_the_first_piece_is_refused_at_once(refusal):
    source = Source(refusals={0: [refusal]})
    with pytest.raises(type(refusal)):
        await joined(source, 3)
    assert source.started == [0]


@pytest.mark.parametrize("refusal", [Overloaded("full", 2.5), BackPressureError(1, 1)])
async def test_a_later_piece_waits_for_its_place(refusal, monkeypatch):
    monkeypatch.setattr(utterance, "_RETRY_S", 0.001)
    source = Source(refusals={1: [refusal] * 3, 2: [refusal]})
    chunks = await joined(source, 3)
    assert_one_stream(chunks)
    assert b"".join(chunk.pcm for chunk in chunks) == b"".join(audio(n) for n in range(3))
    assert source.started == [0, 1, 1, 1, 1, 2, 2]
    assert len(set(source.ids)) == len(source.ids)


async def test_a_later_piece_does_not_wait_for_ever(own_time, monkeypatch):
    monkeypatch.setattr(utterance, "_RETRY_S", 0.01)
    source = Source(refusals={1: [Overloaded("full", 2.5)] * 1000})
    with pytest.raises(Overloaded):
        await joined(source, 3, patience_s=0.05)
    assert source.started.count(1) == 4  # at 0, 10, 25 and 47.5 ms


async def test_a_later_piece_that_fails_otherwise_is_not_tried_again():
    source = Source(refusals={1: [EngineFault("page 7")]})
    with pytest.raises(EngineFault, match="page 7"):
        await joined(source, 3)
    assert source.started == [0, 1]


# ---------------------------------------------------------------- leaving
@pytest.mark.parametrize("num_taken", range(1, 3 * len(SIZES)))
async def test_leaving_at_any_chunk_ends_the_running_piece_and_the_one_ahead(num_taken):
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    before = asyncio.all_tasks()
    source = Source(turns=5, refusals={1: [Overloaded("full")]} if num_taken == len(SIZES) else None)
    chunks = join_pieces(Chains(source), make_requests(3), SAMPLES)
    for _ in range(num_taken):
        await anext(chunks)
    await chunks.aclose()
    assert source.streams[num_taken // len(SIZES)].was_cancelled
    await until(lambda: source.num_running == 0 and asyncio.all_tasks() <= before)
    gc.collect()
    assert complaints == []


async def test_leaving_while_a_piece_ahead_has_failed_makes_no_noise():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    source = Source(refusals={1: [EngineFault("page 7")]})
    chunks = join_pieces(Chains(source), make_requests(3), SAMPLES)
    for _ in SIZES:
        await anext(chunks)
    for _ in range(50):
        await asyncio.sleep(0)
    await chunks.aclose()
    del chunks
    await until(lambda: source.num_running == 0)
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 40])
async def test_a_cancel_while_waiting_ends_everything_started(turns):
    before = asyncio.all_tasks()
    source = Source(turns=4, refusals={1: [Overloaded("full")] * 50})
    task = asyncio.create_task(joined(source, 3))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: source.num_running == 0 and asyncio.all_tasks() <= before)
