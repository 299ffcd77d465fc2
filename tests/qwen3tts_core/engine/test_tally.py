from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.engine.tally import BATCH_ROWS, STEP_SECONDS, Tally


def test_a_value_at_a_bound_counts_for_it_and_one_above_for_the_next():
    tally = Tally((1, 2, 4))
    for value in (0, 1, 2, 3, 4, 5):
        tally.add(value)
    assert tally.counts() == (2, 1, 2, 1)


@given(st.lists(st.floats(0, 20)))
def test_counts_up_to_a_bound_are_the_values_up_to_it(values):
    tally = Tally(STEP_SECONDS)
    for value in values:
        tally.add(value)
    for i, bound in enumerate(STEP_SECONDS):
        assert sum(tally.counts()[: i + 1]) == sum(value <= bound for value in values)
    assert sum(tally.counts()) == len(values)


def test_bounds_rise():
    for bounds in (STEP_SECONDS, BATCH_ROWS):
        assert list(bounds) == sorted(set(bounds))
