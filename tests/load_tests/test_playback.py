import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.playback import AudibleStart, seconds_of, underrun_s

BYTES_PER_S = 48_000


def test_audio_that_is_always_there_in_time_is_no_underrun():
    assert underrun_s([(0.5, BYTES_PER_S), (1.4, 2 * BYTES_PER_S)]) == 0


def test_a_late_chunk_is_waited_for():
    assert underrun_s([(0.5, BYTES_PER_S), (1.75, 2 * BYTES_PER_S)]) == pytest.approx(0.25)


def test_nothing_and_one_chunk_have_no_underrun():
    assert underrun_s([]) == 0
    assert underrun_s([(3.0, 10)]) == 0


arrivals = st.lists(st.tuples(st.floats(0, 2), st.integers(1, 100_000)), min_size=1, max_size=20).map(
    lambda steps: [
        (sum(gap for gap, _ in steps[: end + 1]), sum(size for _, size in steps[: end + 1]))
        for end in range(len(steps))
    ]
)


def waits_of_a_stopping_player(arrivals):
    """Plays what it has, stops when that is used up, goes on when there is more."""
    clock, heard, waited = arrivals[0][0], 0.0, 0.0
    have = seconds_of(arrivals[0][1])
    for at, num_bytes in arrivals[1:]:
        runs_dry_at = clock + have - heard
        if at > runs_dry_at:
            waited += at - runs_dry_at
            clock, heard = at, have
        have = seconds_of(num_bytes)
    return waited


@given(arrivals)
def test_the_underrun_is_what_a_player_that_stops_waits_in_all(arrivals):
    assert underrun_s(arrivals) == pytest.approx(waits_of_a_stopping_player(arrivals), abs=1e-6)


@given(arrivals, st.floats(0, 100))
def test_the_underrun_does_not_depend_on_when_the_first_audio_came(arrivals, shift):
    later = [(at + shift, num_bytes) for at, num_bytes in arrivals]
    assert underrun_s(later) == pytest.approx(underrun_s(arrivals), abs=1e-6)


def pcm(*samples):
    return np.array(samples, "<i2").tobytes()


def test_what_is_below_50_dbfs_is_not_heard():
    """known_faults row 37: leading silence isn't taken for audio."""
    start = AudibleStart()
    start.feed(0.1, pcm(103, -103))
    assert start.at_s is None
    start.feed(0.2, pcm(0, -104))
    assert start.at_s == 0.2


def test_a_sound_behind_silence_is_heard_when_the_player_comes_to_it():
    """known_faults row 37: the second clock, beside TTFA."""
    start = AudibleStart()
    start.feed(0.1, pcm(*[0] * 24_000, 9_000))
    assert start.at_s == pytest.approx(1.1)


@given(st.lists(st.integers(-200, 200), min_size=1, max_size=50), st.lists(st.integers(0, 100), max_size=5))
def test_the_cuts_between_reads_change_nothing(samples, cuts):
    data = pcm(*samples)
    whole, pieces = AudibleStart(), AudibleStart()
    whole.feed(0.0, data)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(edges):
        pieces.feed(0.0, data[begin:end])
    assert whole.at_s == pieces.at_s
