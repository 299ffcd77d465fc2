import asyncio
import threading

import pytest

from qwen3tts_core.engine.outbox import AsyncOutbox
from qwen3tts_core.errors import EngineFault


def in_a_thread(work):
    """As an engine does: everything from another thread, over before the loop goes on."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def put_all(outbox, *items):
    def work():
        for request_id, item in items:
            outbox.put(request_id, item)
        outbox.flush()

    in_a_thread(work)


async def take(stream, count):
    async with asyncio.timeout(30):
        return [await stream.get() for _ in range(count)]


@pytest.fixture
async def outbox():
    return AsyncOutbox(asyncio.get_running_loop())


async def test_each_reader_gets_its_own_items_in_order(outbox):
    with outbox.stream("a") as a, outbox.stream("b") as b:
        put_all(outbox, ("a", 1), ("b", 10), ("a", 2))
        put_all(outbox, ("b", 11), ("a", 3))
        assert await take(a, 3) == [1, 2, 3]
        assert await take(b, 2) == [10, 11]


async def test_a_waiting_reader_is_woken(outbox):
    with outbox.stream("a") as a:
        reader = asyncio.create_task(take(a, 1))
        await asyncio.sleep(0)
        put_all(outbox, ("a", 1))
        assert await reader == [1]


async def test_nothing_arrives_before_the_flush_and_one_flush_wakes_once(outbox):
    wakes = []
    loop = asyncio.get_running_loop()
    plain = loop.call_soon_threadsafe
    with outbox.stream("a") as a, outbox.stream("b") as b:
        outbox.put("a", 1)
        outbox.put("b", 2)
        await asyncio.sleep(0.01)
        assert (a.num_waiting, b.num_waiting) == (0, 0)
        loop.call_soon_threadsafe = lambda *args: wakes.append(plain(*args))
        try:
            outbox.flush()
            outbox.flush()  # nothing to say
        finally:
            del loop.call_soon_threadsafe
        assert await take(a, 1) + await take(b, 1) == [1, 2]
    assert len(wakes) == 1


async def test_an_error_is_raised_where_it_stands(outbox):
    with outbox.stream("a") as a:
        put_all(outbox, ("a", 1), ("a", EngineFault("broken")), ("a", 2))
        assert await take(a, 1) == [1]
        with pytest.raises(EngineFault, match="broken"):
            await take(a, 1)


async def test_iteration_ends_with_the_error(outbox):
    got = []

    async def read(stream):
        async for item in stream:
            got.append(item)  # noqa: PERF401 - an error comes in between

    with outbox.stream("a") as a:
        put_all(outbox, ("a", 1), ("a", 2), ("a", EngineFault("broken")))
        with pytest.raises(EngineFault):
            await read(a)
    assert got == [1, 2]


async def test_items_that_nobody_reads_are_dropped(outbox):
    put_all(outbox, ("a", 1))
    with outbox.stream("a") as a:
        put_all(outbox, ("a", 2))
        assert await take(a, 1) == [2]
    put_all(outbox, ("a", 3))
    assert a.num_waiting == 0


async def test_the_next_reader_of_an_id_gets_nothing_meant_for_the_last(outbox):
    """An id is taken again while an item for its old reader is still on its way."""
    with outbox.stream("a"):
        in_a_thread(lambda: outbox.put("a", "old, not flushed"))
    with outbox.stream("a"):
        put_all(outbox, ("a", "old, not delivered"))
    with outbox.stream("a") as newer:
        put_all(outbox, ("a", "new"))
        assert await take(newer, 1) == ["new"]


async def test_an_id_has_one_reader_at_a_time(outbox):
    with outbox.stream("a"):
        with pytest.raises(ValueError, match="already being read"), outbox.stream("a"):
            pass
        with outbox.stream("b"):
            pass
    with outbox.stream("a"):
        pass


def test_an_engine_outlives_the_loop_of_its_readers():
    loop = asyncio.new_event_loop()
    outbox = AsyncOutbox(loop)
    with outbox.stream("a"):
        loop.close()
        put_all(outbox, ("a", 1))
