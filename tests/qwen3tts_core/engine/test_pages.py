import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.engine.pages import PagePool

# Each number is an owner's wish for pages; None gives the oldest owner's back.
histories = st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=40)


@given(st.integers(1, 12), histories)
def test_every_page_is_free_or_owned_by_exactly_one(num_pages, history):
    pool, owned = PagePool(num_pages), {}
    for turn, wish in enumerate(history):
        if wish is None:
            if owned:
                owner = next(iter(owned))
                pool.give_back(owner)
                del owned[owner]
        else:
            pages = pool.take(str(turn), wish)
            assert (pages is None) == (wish > num_pages - sum(map(len, owned.values())))
            if pages is not None:
                assert len(pages) == wish
                owned[str(turn)] = pages
        taken = [page for pages in owned.values() for page in pages]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(num_pages))
        assert pool.num_free == num_pages - len(taken)


def test_a_refused_wish_takes_nothing():
    pool = PagePool(3)
    assert pool.take("a", 2) is not None
    assert pool.take("b", 2) is None
    assert pool.num_free == 1
    assert pool.take("b", 1) is not None  # and leaves no owner behind


def test_the_trash_page_is_nobodys():
    pool = PagePool(4)
    assert pool.trash_page not in pool.take("a", 4)


def test_giving_back_what_one_does_not_own_is_a_bug():
    pool = PagePool(2)
    pool.take("a", 1)
    pool.give_back("a")
    with pytest.raises(KeyError):
        pool.give_back("a")
    pool.take("b", 1)
    with pytest.raises(AssertionError, match="b already owns"):
        pool.take("b", 1)
