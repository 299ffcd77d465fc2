import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.async_memo import AsyncMemo


class Work:
    def __init__(self, value=b"value", error=None):
        self.value, self.error, self.num_runs, self.may_end = value, error, 0, asyncio.Event()

    async def __call__(self):
        self.num_runs += 1
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return self.value


async def test_those_who_ask_at_once_share_one_run_and_later_ones_its_result():
    memo, work = AsyncMemo(100, len), Work()
    asking = [asyncio.create_task(memo.get("a", work)) for _ in range(20)]
    await asyncio.sleep(0)
    work.may_end.set()
    assert await asyncio.gather(*asking) == [b"value"] * 20
    assert await memo.get("a", work) == b"value"
    assert work.num_runs == 1
    stats = memo.stats()
    assert (stats.num_runs, stats.num_joined, stats.num_hits) == (1, 19, 1)
    assert (stats.num_entries, stats.num_bytes) == (1, len(b"value"))


async def test_one_who_leaves_stops_nobodys_work():
    memo, work = AsyncMemo(100, len), Work()
    first, second = (asyncio.create_task(memo.get("a", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    work.may_end.set()
    assert await second == b"value"
    assert work.num_runs == 1


async def test_an_error_goes_to_all_who_wait_and_is_not_remembered():
    memo, work = AsyncMemo(100, len), Work(error=ValueError("no"))
    work.may_end.set()
    asking = [asyncio.create_task(memo.get("a", work)) for _ in range(3)]
    assert [str(e) for e in await asyncio.gather(*asking, return_exceptions=True)] == ["no"] * 3
    work.error = None
    assert await memo.get("a", work) == b"value"
    assert work.num_runs == 2


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 12)), max_size=40))
def test_what_is_kept_never_exceeds_its_bytes_and_is_never_anothers(steps):
    async def run():
        memo, sizes = AsyncMemo(20, len), {}
        for key, size in steps:
            size = sizes.setdefault(key, size)

            async def compute(key=key, size=size):
                return key.encode() * size

            assert await memo.get(key, compute) == key.encode() * size
            assert memo.num_bytes == sum(len(value) for value in memo._kept.values()) <= 20

    asyncio.run(run())


async def test_the_least_recently_used_goes_first():
    memo, counts = AsyncMemo(2, len), dict.fromkeys("abc", 0)

    async def ask(key):
        async def compute():
            counts[key] += 1
            return key.encode()

        return await memo.get(key, compute)

    for key in "abaca":
        await ask(key)
    assert counts == {"a": 1, "b": 1, "c": 1}
    await ask("b")
    assert counts["b"] == 2
