"""No engine waits for a slow reader, and what waits for slow readers is bounded."""

import asyncio
from contextlib import aclosing

import pytest

from deployments.read_ahead import UnreadAudio
from qwen3tts_core.errors import EngineFault, Overloaded


async def settled():
    for _ in range(50):
        await asyncio.sleep(0)


class Chain:
    """So many parts of so many bytes; counts what was taken of it."""

    def __init__(self, num_parts, size=10, error=None):
        self.num_taken, self.is_closed = 0, False
        self._num_parts, self._size, self._error = num_parts, size, error

    async def parts(self):
        try:
            for number in range(self._num_parts):
                self.num_taken += 1
                yield bytes([number]) * self._size
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


async def test_the_chain_ends_while_its_reader_has_heard_the_first_part():
    unread, chain = UnreadAudio(), Chain(20)
    async with aclosing(unread.ahead(chain.parts())) as parts:
        assert await anext(parts) == bytes([0]) * 10
        await settled()
        assert chain.is_closed
        assert unread.num_bytes == 200
        assert [part[0] async for part in parts] == list(range(1, 20))
    assert unread.num_bytes == 0


async def test_a_stream_that_is_far_enough_ahead_waits_for_its_reader():
    unread, chain = UnreadAudio(ahead_s=50 / 48_000), Chain(20)
    async with aclosing(unread.ahead(chain.parts())) as parts:
        first = await anext(parts)
        await settled()
        assert unread.num_bytes == 50
        assert chain.num_taken == 6  # five held, one in hand
        rest = [part[0] async for part in parts]
    assert [first[0], *rest] == list(range(20))
    assert unread.num_bytes == 0


async def test_all_streams_together_are_bounded_and_new_ones_refused_meanwhile():
    unread = UnreadAudio(max_bytes=100)
    chains = [Chain(20) for _ in range(3)]
    streams = [unread.ahead(chain.parts()) for chain in chains]
    for stream in streams:
        await anext(stream)
    await settled()
    assert unread.num_bytes <= 100 + 2 * 10  # a stream that holds nothing may always take one part
    with pytest.raises(Overloaded):
        unread.check()
    await streams.pop(0).aclose()
    unread.check()
    heard = [sum(1 for _ in [part async for part in stream]) for stream in streams]
    assert heard == [19, 19]
    assert unread.num_bytes == 0


async def test_an_error_of_the_chain_comes_after_the_audio_before_it():
    unread, heard = UnreadAudio(), []

    async def listen():
        async with aclosing(unread.ahead(Chain(3, error=EngineFault("broke")).parts())) as parts:
            async for part in parts:
                heard.append(part[0])
                await settled()

    with pytest.raises(EngineFault, match="broke"):
        await listen()
    assert heard == [0, 1, 2]
    assert unread.num_bytes == 0


async def test_who_leaves_stops_the_taking_before_the_chain_is_closed():
    unread, chain = UnreadAudio(ahead_s=30 / 48_000), Chain(20)
    async with aclosing(chain.parts()) as source, aclosing(unread.ahead(source)) as parts:
        await anext(parts)
        await settled()
    assert chain.is_closed
    assert unread.num_bytes == 0
    taken = chain.num_taken
    await settled()
    assert chain.num_taken == taken


async def test_a_whole_body_counts_while_it_is_sent():
    unread = UnreadAudio(max_bytes=100)
    async with unread.holding(150):
        with pytest.raises(Overloaded):
            unread.check()
    unread.check()
