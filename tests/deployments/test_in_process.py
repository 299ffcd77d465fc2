"""A deployment in the caller's process, through the same functions that call one elsewhere."""

import asyncio
from contextvars import ContextVar

import pytest

from deployments.handles import bind_ask, bind_stream, bind_tell
from deployments.in_process import InProcessHandle
from qwen3tts_core.errors import Overloaded, StreamCancelled
from tests.fakes import until

NAME = ContextVar("NAME", default="nobody")


class Target:
    """A generator that notes what becomes of it, and two methods that answer once."""

    def __init__(self, num_items=3, error=None):
        self.num_items, self.error = num_items, error
        self.began = self.given = self.ended = 0
        self.told = []

    async def decode(self, request):
        self.began += 1
        token = NAME.set(request)  # as a span does: a generator that changes tasks couldn't reset it
        try:
            for number in range(self.num_items):
                self.given += 1
                yield b"%d" % number
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        finally:
            NAME.reset(token)
            self.ended += 1

    async def ready(self, stay_s):
        await asyncio.sleep(stay_s)
        if self.error is not None:
            raise self.error
        return True

    async def roll_call(self, wanted, given_up):
        self.told.append((wanted, given_up))


def start_of(target):
    return bind_stream(InProcessHandle(target), "decode", "value")


async def collect(stream):
    return [item async for item in stream]


async def test_every_item_comes_in_order_and_then_the_end_however_often_one_asks():
    target = Target(100)
    stream = start_of(target)("r")
    assert await collect(stream) == [b"%d" % number for number in range(100)]
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert (target.began, target.ended) == (1, 1)


async def test_it_runs_to_its_end_without_a_reader():
    """Whoever has the last chunk asks for no other: a generator that waited for that would keep its row."""
    target = Target()
    stream = start_of(target)("r")
    await until(lambda: target.ended)
    assert await collect(stream) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("num_items", [0, 2])
async def test_an_error_is_itself_and_comes_after_the_items_before_it(num_items):
    error = Overloaded("full", 2.5)
    stream = start_of(Target(num_items, error))("r")
    assert [await anext(stream) for _ in range(num_items)] == [b"0", b"1"][:num_items]
    for _ in range(2):
        with pytest.raises(Overloaded) as caught:
            await anext(stream)
        assert caught.value is error


@pytest.mark.parametrize("num_taken", [0, 1, 5])
async def test_cancel_closes_the_generator_at_once_and_may_be_called_twice(num_taken):
    target = Target(10**9)
    stream = start_of(target)("r")
    await asyncio.sleep(0)  # so that it has begun
    for _ in range(num_taken):
        await anext(stream)
    stream.cancel()
    stream.cancel()
    await asyncio.sleep(0)
    given = target.given
    assert target.ended == 1
    await asyncio.sleep(0.01)
    assert target.given == given
    stream.cancel()


async def test_one_that_is_cancelled_before_it_began_never_begins_and_leaves_no_reader_waiting():
    target = Target()
    stream = start_of(target)("r")
    stream.cancel()
    with pytest.raises(StreamCancelled):
        await anext(stream)
    assert target.began == 0


async def test_a_reader_in_another_task_hears_of_a_cancel():
    target = Target(0)
    target.decode = lambda _: _forever()
    stream = start_of(target)("r")
    reading = asyncio.create_task(anext_of(stream))
    await asyncio.sleep(0)
    stream.cancel()
    with pytest.raises(StreamCancelled):
        await asyncio.wait_for(reading, 30)


async def test_a_reader_that_gives_up_waiting_loses_nothing():
    """As with Serve's: only `cancel` ends a stream."""
    target = Target(1)
    go_on = asyncio.Event()

    async def late(_):
        await go_on.wait()
        yield b"late"

    target.decode = late
    stream = start_of(target)("r")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(stream)
    go_on.set()
    assert await anext(stream) == b"late"


async def test_readers_in_other_tasks_do_not_disturb_the_generators_context():
    stream = start_of(Target())("r")
    items = [await asyncio.create_task(anext_of(stream)) for _ in range(3)]
    assert items == [b"0", b"1", b"2"]
    with pytest.raises(StopAsyncIteration):  # not the ValueError of a token from elsewhere
        await anext(stream)


async def test_a_question_is_answered_fails_or_is_cancelled_like_one_to_serve():
    assert await bind_ask(InProcessHandle(Target()), "ready")(0.0) is True
    with pytest.raises(Overloaded):
        await bind_ask(InProcessHandle(Target(error=Overloaded("full", 1.0))), "ready")(0.0)
    tasks = asyncio.all_tasks()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await bind_ask(InProcessHandle(Target()), "ready")(60.0)
    await until(lambda: asyncio.all_tasks() == tasks)


async def test_what_every_replica_is_told_this_one_hears():
    target = Target()
    await bind_tell(InProcessHandle(target), "roll_call")(["a"], ["b"])
    assert target.told == [(["a"], ["b"])]


async def anext_of(stream):
    return await anext(stream)


async def _forever():
    await asyncio.Future()
    yield b""
