import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.engine.memo import Memo


def failing():
    raise AssertionError("computed again")


def test_a_value_is_computed_once():
    memo = Memo(100, len)
    assert memo.get("a", lambda: b"x") == b"x"
    assert memo.get("a", failing) == b"x"
    assert (memo.stats().num_runs, memo.stats().num_hits) == (1, 1)


def test_threads_that_ask_at_once_share_one_computation():
    memo = Memo(100, len)
    begun, go = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go.wait(60)
        return b"voice"

    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(memo.get, "a", slow)
        assert begun.wait(60)
        others = [pool.submit(memo.get, "a", failing) for _ in range(7)]
        while memo.stats().num_joined < 7:
            assert not any(other.done() for other in others)
        other_key = memo.get("b", lambda: b"quick")  # a run in flight blocks nobody else
        go.set()
        assert {first.result(60), *(other.result(60) for other in others)} == {b"voice"}
    assert other_key == b"quick"
    assert memo.stats().num_runs == 2


def test_an_error_reaches_everyone_who_waited_and_is_forgotten():
    memo = Memo(100, len)
    begun, go = threading.Event(), threading.Event()

    def broken():
        begun.set()
        assert go.wait(60)
        raise ValueError("no audio")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(memo.get, "a", broken)
        assert begun.wait(60)
        second = pool.submit(memo.get, "a", failing)
        while memo.stats().num_joined < 1:
            pass
        go.set()
        for waiter in (first, second):
            with pytest.raises(ValueError, match="no audio"):
                waiter.result(60)
    assert memo.get("a", lambda: b"now") == b"now"


def test_the_least_recently_used_value_is_forgotten_first():
    memo = Memo(3, len)
    for key in "abc":
        memo.get(key, lambda: b"1")
    memo.get("a", failing)
    memo.get("d", lambda: b"1")
    memo.get("a", failing)
    runs = memo.stats().num_runs
    memo.get("b", lambda: b"1")
    assert memo.stats().num_runs == runs + 1


def test_a_value_beyond_the_bound_is_served_and_evicts_nothing():
    memo = Memo(3, len)
    memo.get("small", lambda: b"1")
    assert memo.get("huge", lambda: b"1234") == b"1234"
    memo.get("small", failing)
    assert memo.get("huge", lambda: b"again") == b"again"


@given(st.integers(0, 40), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 15))))
def test_the_bytes_kept_never_pass_the_bound(max_bytes, requests):
    memo = Memo(max_bytes, len)
    for key, size in requests:
        value = memo.get(str(key), lambda size=size: bytes(size))
        stats = memo.stats()
        assert stats.num_bytes <= max_bytes
        assert stats.num_bytes == sum(len(kept) for kept in memo._kept.values())
        assert stats.num_entries == len(memo._kept)
        if len(value) <= max_bytes:
            assert memo.get(str(key), failing) == value
