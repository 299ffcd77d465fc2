"""An utterance goes on with other engines when its own have died, and not otherwise."""

import asyncio
from contextlib import aclosing

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RequestCancelledError

from deployments import utterance
from deployments.admission import Admission
from deployments.handles import is_death
from deployments.pieces import join_pieces
from deployments.utterance import Chains
from qwen3tts_core.errors import (
    EngineDown,
    EngineFault,
    InvalidCodes,
    InvalidRequest,
    Overloaded,
    StreamCancelled,
    StreamLost,
)
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.types import AudioChunk, PrefillPlan, Sampling, SpeechRequest
from tests.fakes import NUM_GROUPS, FakeStream, fake_codes, fake_pcm, until

SAMPLES = 4
SIZES = (1, 3, 8, 16, 25, 25, 7)
NUM_FRAMES = sum(SIZES)


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(utterance, "_RETRY_S", 0.002)


def peer_error(code):
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")


DEATHS = [
    ActorDiedError(),
    ActorUnavailableError("no answer", b"0" * 16),
    TaskCancelledError(),
    RequestCancelledError("id"),
    EngineDown("the talker is stopped"),
    StreamCancelled(),
    peer_error(grpc.StatusCode.UNAVAILABLE),
    peer_error(grpc.StatusCode.CANCELLED),
    RayTaskError("decode", "traceback", ActorDiedError()),
]
FAULTS = [
    EngineFault("page 7"),
    InvalidCodes("page 7"),
    InvalidRequest("no", "voice"),
    ValueError("page 7"),
    peer_error(grpc.StatusCode.RESOURCE_EXHAUSTED),
    RayTaskError("decode", "traceback", EngineFault("page 7")),
]


def requests(count=1):
    plan = PrefillPlan((1,), (1,), ())
    return [SpeechRequest(f"id.{n}", plan, Sampling(), seed=7, max_frames=100, piece=n) for n in range(count)]


def audio(piece=0):
    return fake_pcm(fake_codes(7, 0, NUM_FRAMES, piece), SAMPLES)


class Engines:
    """Chains of engines that go on after the frames they are given, at the place in the ramp that these tell.

    ends: for each chain in order, (after how many chunks, what it raises then); chains beyond live on.
    """

    def __init__(self, *ends):
        self._ends = iter(ends)
        self.requests, self.streams, self.num_running = [], [], 0

    def __call__(self, request):
        self.requests.append(request)
        self.streams.append(FakeStream(self._speak(request, *next(self._ends, (None, None)))))
        return self.streams[-1]

    async def _speak(self, request, num_chunks, error):
        self.num_running += 1
        try:
            old = request.resume
            first, index = (old.num_frames, len(old.cuts)) if old else (0, 0)
            if old:
                assert old.codes == fake_codes(7, 0, first, request.piece).tobytes()
            for number, size in enumerate(ChunkRamp().sizes(index)):
                await asyncio.sleep(0)
                if number == num_chunks:
                    await _forever_or(error)
                size = min(size, NUM_FRAMES - first)
                codes = fake_codes(request.seed, first, size, request.piece)
                finish = "stop" if first + size == NUM_FRAMES else None
                pcm = fake_pcm(codes, SAMPLES)
                yield AudioChunk(first, size, NUM_GROUPS, pcm, codes.tobytes(), finish).to_bytes()
                first += size
                if finish:
                    return
        finally:
            self.num_running -= 1


async def _forever_or(error):
    if error is None:
        await asyncio.Future()
    raise error


async def speak(engines, count=1, *, resume_timeout_s=60.0, **options):
    return await listen(Chains(engines, resume_timeout_s), count, **options)


async def listen(chains, count=1, **options):
    async with aclosing(join_pieces(chains, requests(count), SAMPLES, **options)) as chunks:
        return [chunk async for chunk in chunks]


def assert_whole(chunks, count=1):
    position = 0
    for chunk in chunks:
        assert chunk.first_frame == position
        position += chunk.num_frames
    assert b"".join(chunk.pcm for chunk in chunks) == b"".join(audio(piece) for piece in range(count))
    assert [chunk.num_frames for chunk in chunks] == list(SIZES) * count
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


# ---------------------------------------------------------------- going on
@pytest.mark.parametrize("num_chunks", range(len(SIZES)))
@pytest.mark.parametrize("death", DEATHS, ids=lambda death: type(death).__name__)
async def test_a_death_at_any_chunk_is_not_heard(death, num_chunks):
    engines, deaths = Engines((num_chunks, death)), []
    assert_whole(await speak(engines, on_death=deaths.append))
    first, second = engines.requests
    assert first.resume is None
    assert (second.resume.cuts if second.resume else ()) == SIZES[:num_chunks]
    assert first.request_id != second.request_id
    assert len(deaths) == 1
    await until(lambda: engines.num_running == 0)


@settings(deadline=None)
@given(ends=st.lists(st.integers(0, 3), max_size=12), count=st.integers(1, 3))
def test_any_number_of_deaths_at_any_place(ends, count):
    async def check():
        engines = Engines(*((end, ActorDiedError()) for end in ends))
        assert_whole(await speak(engines, count), count)
        assert len({request.request_id for request in engines.requests}) == len(engines.requests)
        await until(lambda: engines.num_running == 0)

    asyncio.run(check())


async def test_a_piece_that_was_started_ahead_survives_too():
    """The second chain is the second piece's, begun with the last chunk of the first."""
    for num_chunks in (0, 1, 2):
        engines = Engines((None, None), (num_chunks, ActorDiedError()))
        assert_whole(await speak(engines, 2), 2)
        assert [request.piece for request in engines.requests] == [0, 1, 1]


@pytest.mark.parametrize("refusal", [Overloaded("full", 2.5), BackPressureError(1, 1)])
async def test_a_broken_stream_waits_for_a_place_though_a_new_one_would_be_refused(refusal):
    engines = Engines((3, ActorDiedError()), (0, refusal), (0, refusal), (0, ActorDiedError()), (0, refusal))
    assert_whole(await speak(engines))
    assert len(engines.requests) == 6


async def test_the_time_to_go_on_counts_from_each_death_that_follows_audio(own_time):
    ends = [(1, ActorDiedError())] * 6
    engines = Engines(*ends)

    async def slowly():
        async with aclosing(join_pieces(Chains(engines, 0.2), requests(), SAMPLES)) as chunks:
            heard = []
            async for chunk in chunks:
                heard.append(chunk)
                await asyncio.sleep(0.05)  # six of these are longer than the time to go on
            return heard

    assert_whole(await slowly())


# ---------------------------------------------------------------- full engines
FULL = [Overloaded("8 streams are running", 2.5), BackPressureError(1, 1)]


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


async def refusals(chains, count):
    """How many of so many requests are refused; each is over before the next."""
    waits_s = []
    for _ in range(count):
        try:
            assert_whole(await listen(chains))
        except (Overloaded, BackPressureError) as error:
            waits_s.append(error.retry_after_s or 1.0)
    assert len(set(waits_s)) <= 1, "told by the engines, or in their stead"
    return len(waits_s)


@pytest.mark.parametrize("refusal", FULL, ids=lambda refusal: type(refusal).__name__)
async def test_engines_that_are_full_are_asked_once_a_second(refusal):
    engines, clock = Engines(*[(0, refusal)] * 6), Clock()
    chains = Chains(engines, admission=Admission(clock))
    for num_asked in (3, 4, 5, 6):
        assert await refusals(chains, 5) == 5
        assert len(engines.requests) == num_asked
        clock.now_s += 1.01
    assert_whole(await listen(chains))


async def test_engines_that_refuse_nobody_for_two_seconds_are_open():
    engines, clock = Engines(*[(0, FULL[0])] * 3), Clock()
    chains = Chains(engines, admission=Admission(clock))
    assert await refusals(chains, 5) == 5
    clock.now_s += 2.01
    streams = [join_pieces(chains, requests(), SAMPLES) for _ in range(9)]
    for stream in streams:
        await anext(stream)
    for stream in streams:
        await stream.aclose()


async def test_a_replica_that_is_full_among_others_that_are_not_closes_nothing():
    """Serve picks the best of two; now and then both are full."""
    engines = Engines(*[end for _ in range(20) for end in ((0, FULL[0]), (0, FULL[0]), (None, None))])
    chains = Chains(engines, admission=Admission(Clock()))
    assert await refusals(chains, 60) == 40
    assert len(engines.requests) == 60


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
async def test_a_stream_that_fails_makes_room_for_one_as_well(fault):
    engines = Engines((1, fault), *[(0, FULL[0])] * 3, (None, None), (0, FULL[0]))
    chains = Chains(engines, admission=Admission(Clock()))
    failing = join_pieces(chains, requests(), SAMPLES)
    await anext(failing)
    assert await refusals(chains, 5) == 5
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it is
        await anext(failing)
    assert_whole(await listen(chains))


@pytest.mark.parametrize("leaves", [False, True])
async def test_each_stream_that_ends_or_leaves_makes_room_for_one(leaves):
    """Though a whole burst has been let in before the first refusal was back."""
    engines = Engines(*[(None, None)] * 3, *[(0, FULL[0])] * 9)
    chains = Chains(engines, admission=Admission(Clock()))
    running = [join_pieces(chains, requests(), SAMPLES) for _ in range(3)]
    for stream in running:
        await anext(stream)
    burst = await asyncio.gather(*(listen(chains) for _ in range(9)), return_exceptions=True)
    assert [type(error) for error in burst] == [Overloaded] * 9
    assert len(engines.requests) == 12
    for num_ended, stream in enumerate(running, start=1):
        if not leaves:
            async for _ in stream:
                pass
        await stream.aclose()
        following = join_pieces(chains, requests(), SAMPLES)
        await anext(following)
        assert await refusals(chains, 5) == 5
        assert len(engines.requests) == 12 + num_ended
        running.append(following)
        if num_ended == 3:
            break
    for stream in running:
        await stream.aclose()


async def test_a_stream_that_goes_on_asks_though_a_new_one_would_not():
    engines = Engines((2, ActorDiedError()), (0, FULL[0]))
    assert_whole(await speak(engines))
    engines = Engines((None, None), (0, FULL[0]), (0, FULL[0]))  # the second piece is the second chain
    assert_whole(await speak(engines, 2, patience_s=60.0), 2)


# ---------------------------------------------------------------- not going on
async def test_without_a_replica_in_time_the_stream_is_lost(own_time):
    engines, seen = Engines(*[(2, ActorDiedError()), *[(0, Overloaded("full"))] * 10_000]), []

    async def collect():
        async with aclosing(join_pieces(Chains(engines, 0.1), requests(), SAMPLES)) as chunks:
            async for chunk in chunks:
                seen.append(chunk)  # noqa: PERF401 - what came before is what is looked at

    with pytest.raises(StreamLost, match=r"ActorDiedError .* within 0.1 s"):
        await collect()
    assert [chunk.num_frames for chunk in seen] == [1, 3]
    assert not any(chunk.finish for chunk in seen)
    await until(lambda: engines.num_running == 0)


async def test_a_router_that_waits_for_a_replica_is_not_waited_for_longer(own_time):
    """A call while there is no replica at all: nothing comes, and no error either."""
    engines = Engines((2, ActorDiedError()), (0, None))
    async with asyncio.timeout(5):
        with pytest.raises(StreamLost):
            await speak(engines, resume_timeout_s=0.1)
    assert engines.streams[1].was_cancelled
    await until(lambda: engines.num_running == 0)


async def test_zero_seconds_cut_at_once():
    engines = Engines((2, ActorDiedError()))
    with pytest.raises(StreamLost):
        await speak(engines, resume_timeout_s=0)
    assert len(engines.requests) == 1


async def test_an_utterance_that_kills_whoever_speaks_it_is_given_up(monkeypatch):
    monkeypatch.setattr(utterance, "_MOST_DEATHS", 3)
    engines = Engines(*[(1, ActorDiedError())] * 100)
    with pytest.raises(StreamLost):
        await speak(engines)
    assert len(engines.requests) == 4


@pytest.mark.parametrize("num_chunks", [0, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
async def test_a_requests_own_error_is_its_own(fault, num_chunks):
    engines = Engines((num_chunks, fault))
    with pytest.raises(type(fault)):
        await speak(engines)
    assert len(engines.requests) == 1


def test_deaths_and_faults_are_told_apart():
    assert all(is_death(death) for death in DEATHS[:-1])
    assert not any(is_death(fault) for fault in FAULTS)


async def test_leaving_while_a_broken_stream_waits_ends_everything():
    before = asyncio.all_tasks()
    engines = Engines((1, ActorDiedError()), *[(0, Overloaded("full"))] * 10_000)
    task = asyncio.create_task(speak(engines))
    await until(lambda: len(engines.requests) > 3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engines.num_running == 0 and asyncio.all_tasks() <= before)
