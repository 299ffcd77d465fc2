import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.arrivals import poisson_arrivals


@given(rate=st.floats(0.1, 200), duration=st.floats(0.1, 20), seed=st.integers(0, 1000))
def test_arrivals_rise_within_their_time_and_depend_on_the_seed_alone(rate, duration, seed):
    times = poisson_arrivals(rate, duration, seed)
    assert times == sorted(times)
    assert all(0 < at < duration for at in times)
    assert times == poisson_arrivals(rate, duration, seed)


def test_arrivals_come_at_their_rate_and_with_gaps_as_unequal_as_a_poisson_process_has():
    times = poisson_arrivals(50.0, 400.0, seed=1)
    assert len(times) == pytest.approx(20_000, rel=0.03)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert spread / mean == pytest.approx(1, abs=0.05)


def test_another_seed_gives_other_times():
    assert poisson_arrivals(5, 10, 0) != poisson_arrivals(5, 10, 1)


@pytest.mark.parametrize(("rate", "duration"), [(0, 1), (1, 0), (-1, 1)])
def test_no_rate_or_time_is_an_error(rate, duration):
    with pytest.raises(ValueError, match="above 0"):
        poisson_arrivals(rate, duration, 0)
