"""Streams whose consumer has vanished are freed: those given up at once, those that nobody names in time.

Rows 29 and 30 of the list of known faults.
"""

import asyncio
import json
import threading
from contextlib import aclosing, suppress

import pytest

from deployments.leases import Leases
from deployments.roll_call import RollCall
from qwen3tts_core.errors import StreamCancelled
from qwen3tts_core.types import AudioChunk, FrameBatch, PrefillPlan, Sampling, SpeechRequest
from tests.fakes import FakeStream, Script, until

ENDLESS = Script(num_frames=20_000, seconds_per_item=0.1)


def request(request_id="r1"):
    return SpeechRequest(request_id, PrefillPlan((1,), (2,), (3,)), Sampling(), 3, 10**6, model="tiny")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ended():
    return []


@pytest.fixture
def leases(clock, ended):
    return Leases(60.0, ended.append, clock)


# ---------------------------------------------------------------- the engines' side
async def test_a_stream_that_nobody_names_is_ended_after_its_lease_and_not_before(leases, clock, ended):
    """known_faults row 30: what no cancellation reached is reaped."""
    with leases.stream("a"):
        clock.now += 60
        leases.reap()
        assert ended == []
        clock.now += 0.1
        leases.reap()
        assert ended == ["a"]
    assert leases.num_reaped == 1


async def test_naming_it_keeps_it_and_names_of_others_streams_are_nothing(leases, clock, ended):
    with leases.stream("a"), leases.stream("b"):
        for _ in range(10):
            clock.now += 50
            leases.renew(["a", "somebody else's"])
            leases.reap()
        assert set(ended) == {"b"}
        assert leases.num_reaped == len(ended)


async def test_what_is_given_up_ends_at_once_also_when_it_comes_later(leases, ended):
    with leases.stream("a"), leases.stream("b"):
        leases.give_up(["a", "late"])
        assert ended == ["a"]
        with pytest.raises(StreamCancelled), leases.stream("late"):
            pass
    with leases.stream("c"):
        leases.reap()
    assert ended == ["a"]


async def test_a_finished_stream_is_forgotten(leases, clock, ended):
    with leases.stream("a"):
        pass
    clock.now += 1000
    leases.reap()
    leases.give_up(["a"])
    assert ended == []


async def test_only_so_many_ids_are_remembered(leases):
    leases.give_up(map(str, range(100_000)))
    assert len(leases._given_up) < 10_000
    with pytest.raises(StreamCancelled), leases.stream("99999"):
        pass


async def test_the_reaper_runs_by_itself_and_only_while_there_is_something_to_reap(ended):
    leases = Leases(0.05, ended.append)
    with leases.stream("a"):
        await until(lambda: ended)
    await until(lambda: leases._timer is None)


async def test_a_lease_of_zero_ends_nothing(clock, ended):
    leases = Leases(0, ended.append, clock)
    with leases.stream("a"):
        clock.now += 1e6
        await asyncio.sleep(0.01)
        assert leases._timer is None
    assert ended == []


# ---------------------------------------------------------------- in the deployments
@pytest.mark.parametrize("num_items", [0, 2])
@pytest.mark.parametrize("deployment", ["talker", "codec"])
async def test_a_call_whose_cancellation_was_lost_is_freed_when_it_is_given_up(
    open_chain, deployment, num_items
):
    """The generator runs on; nobody closes it."""
    async with open_chain(talker=ENDLESS) as chain:
        target = getattr(chain, deployment)
        stream = target.generate(request()) if deployment == "talker" else target.decode(request())
        reading = asyncio.create_task(read(stream, FrameBatch if deployment == "talker" else AudioChunk))
        await until(lambda: chain.num_held >= 1)
        for _ in range(num_items):
            await asyncio.sleep(0.2)
        await target.roll_call([], ["r1"])
        with pytest.raises(StreamCancelled):
            await reading
        await until(lambda: chain.num_held == 0)


async def read(stream, kind):
    return [kind.from_bytes(item) async for item in stream]


async def test_a_stalled_reader_that_is_given_up_holds_no_slot_and_no_row(open_chain):
    """Suspended in the middle of its generator, as under gRPC's flow control: it can't be told, but freed."""
    async with open_chain(talker=ENDLESS) as chain, aclosing(chain.codec.decode(request())) as audio:
        await anext(audio)
        await chain.talker.roll_call([], ["r1"])
        await chain.codec.roll_call([], ["r1"])
        await until(lambda: chain.num_held == 0)


async def through_leases(chain, deployments, skip):
    """A call that runs for five times 20 s, with leases of 60 s; its engine makes an item in each of these times.
    skip: the fixture's."""
    told = []
    for deployment in deployments:
        deployment._leases._lease_s, deployment._leases._clock = 60.0, asyncio.get_running_loop().time
        deployment.roll_call = told_to(told, deployment.roll_call)
    call = speak(chain)
    await until(lambda: chain.num_held == 2)
    for _ in range(5):
        num_told = len(told)
        skip(20.0)
        await until(lambda num_told=num_told: len(told) >= num_told + len(deployments))
        chain.talker_engine.script.permits.release()
    chain.talker_engine.script.permits.release(1000)
    return await call.finish()


async def test_an_ingress_names_its_streams_for_as_long_as_they_run(open_chain, skip):
    """Leases shorter than the stream, and calls of the roll in between."""
    script = Script(num_frames=190, permits=threading.Semaphore(1))
    async with open_chain(talker=script, roll_call_period_s=20.0, first_audio_timeout_s=0) as chain:
        call = await through_leases(chain, [chain.talker, chain.codec], skip)
        assert call.headers["x-num-frames"] == "190"
        assert len(chain.talker_engine.requests) == 1


async def test_streams_that_no_ingress_names_are_reaped_and_go_on_elsewhere(open_chain, skip):
    """Here the only replica is its own elsewhere: the request is served by several streams, each cut short."""
    script = Script(num_frames=190, permits=threading.Semaphore(1))
    patience = {"first_audio_timeout_s": 0, "resume_timeout_s": 1e6}
    async with open_chain(talker=script, roll_call_period_s=1e6, **patience) as chain:
        for deployment in (chain.talker, chain.codec):
            deployment._leases._lease_s, deployment._leases._clock = 60.0, asyncio.get_running_loop().time
        call = speak(chain)
        for num_requests in (1, 2, 3):
            await until(lambda count=num_requests: len(chain.talker_engine.requests) == count)
            await until(lambda: chain.num_held == 2)
            skip(80.0)
        await until(lambda: len(chain.talker_engine.requests) == 4)
        script.permits.release(1000)
        await call.finish()
        assert call.headers["x-num-frames"] == "190"
        await until(lambda: chain.num_held == 0)


async def test_a_client_that_leaves_is_told_to_the_engines(open_chain):
    """known_faults row 29: slot and row are freed."""
    async with open_chain(talker=ENDLESS) as chain:
        told = []
        for deployment in (chain.talker, chain.codec):
            deployment.roll_call = told_to(told, deployment.roll_call)
        call = speak(chain, stream=True)
        await call.wait_for_parts(2)
        await call.leave()
        await until(lambda: len(told) == 2)
        assert {given_up for _, given_up in told} == {(chain.talker_engine.requests[0].request_id,)}
        await until(lambda: chain.num_held == 0)


async def test_clients_leave_and_every_cancellation_is_lost(open_chain, monkeypatch):
    """known_faults row 30: nothing is left a moment later, though Ray has told nobody."""
    monkeypatch.setattr(FakeStream, "cancel", lambda self: None)
    async with open_chain(talker=Script(num_frames=190, seconds_per_item=0.2)) as chain:  # 130 s by itself
        calls = [speak(chain, stream=True) for _ in range(60)]
        await until(lambda: chain.num_held == 120)
        for number, call in enumerate(calls):
            await asyncio.sleep(0.003 * (number % 3))
            await call.leave()
        await until(lambda: chain.num_held == 0)


async def test_a_whole_stream_is_given_up_by_nobody(open_chain):
    async with open_chain(roll_call_period_s=0.02) as chain:
        told = []
        chain.talker.roll_call = told_to(told, chain.talker.roll_call)
        await speak(chain).finish()
        await asyncio.sleep(0.3)
        assert not any(given_up for _, given_up in told)


async def test_a_refused_stream_is_given_up_by_nobody(open_chain):
    """A server that is full has better things to do."""
    async with open_chain(talker=Script(capacity=0), roll_call_period_s=0.02) as chain:
        told = []
        chain.codec.roll_call = told_to(told, chain.codec.roll_call)
        call = await speak(chain).finish()
        assert call.status == 503
        await asyncio.sleep(0.3)
        assert not any(given_up for _, given_up in told)


def speak(chain, **fields):
    body = json.dumps({"input": "Hello there.", "seed": 3, "response_format": "pcm", **fields}).encode()
    return chain.call("POST", "/v1/audio/speech", body, content_type="application/json")


def told_to(told, method):
    async def roll_call(wanted, given_up):
        told.append((tuple(wanted), tuple(given_up)))
        await method(wanted, given_up)

    return roll_call


# ---------------------------------------------------------------- the ingress's side
class Listener:
    def __init__(self, fails=False):
        self.heard, self.fails = [], fails

    async def __call__(self, wanted, given_up):
        self.heard.append((set(wanted), list(given_up)))
        if self.fails:
            raise RuntimeError("no such replica")


async def called(listeners, period_s, steps):
    roll = RollCall(listeners, period_s)
    task = asyncio.create_task(roll.run())
    await steps(roll)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_those_who_leave_together_are_told_in_one_call_and_soon(own_time):
    listener = Listener()

    async def steps(roll):
        for number in range(100):
            roll.want(str(number))
        for number in range(50):
            roll.give_up(str(number))
            await asyncio.sleep(0)
        await until(lambda: listener.heard)
        await asyncio.sleep(0.2)

    await called([listener], 1000.0, steps)
    ((wanted, given_up),) = listener.heard
    assert given_up == [str(number) for number in range(50)]
    assert wanted == {str(number) for number in range(50, 100)}


async def test_while_nobody_speaks_nothing_is_said():
    listener = Listener()

    async def steps(roll):
        roll.want("a")
        roll.ended("a")
        await asyncio.sleep(0.1)

    await called([listener], 0.01, steps)
    assert listener.heard == []


async def test_a_deployment_that_can_t_be_reached_stops_nobody():
    broken, listener = Listener(fails=True), Listener()

    async def steps(roll):
        roll.want("a")
        await until(lambda: len(listener.heard) >= 3 and len(broken.heard) >= 3)

    await called([broken, listener], 0.01, steps)
    assert all(wanted == {"a"} for wanted, _ in listener.heard)
