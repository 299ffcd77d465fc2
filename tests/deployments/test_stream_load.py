from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.autoscaling import ReplicaLoad
from deployments.stream_load import MOST_SLACK_S, StreamLoad


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def load(clock):
    return StreamLoad(2, 0.1, clock)


def test_it_reports_what_the_policy_reads(load):
    assert ReplicaLoad(**load.stats()) == (0, 0, 2, MOST_SLACK_S)


def test_streams_beyond_the_slots_wait_and_all_are_counted_only_while_they_are_open(load):
    with load.stream(), load.stream():
        with load.stream():
            assert (load.stats()["streams"], load.stats()["queued"]) == (2, 1)
        assert (load.stats()["streams"], load.stats()["queued"]) == (2, 0)
    with pytest.raises(RuntimeError), load.stream():
        raise RuntimeError
    assert (load.stats()["streams"], load.stats()["queued"]) == (0, 0)


def test_slack_is_the_time_from_a_chunk_to_when_its_first_frame_must_be_heard(load, clock):
    with load.stream() as playback:
        assert load.stats()["slack_s"] == MOST_SLACK_S, "nobody listens yet"
        playback.sent(0, 1)
        clock.now += 0.04
        playback.sent(1, 3)  # needed 0.1 s after the first
        assert load.stats()["slack_s"] == pytest.approx(0.06)
        clock.now += 0.5
        playback.sent(4, 8)  # needed at 0.4, here at 0.54
        assert load.stats()["slack_s"] == pytest.approx(-0.14)


def test_a_chunk_that_does_not_come_is_late_before_it_comes(load, clock):
    with load.stream() as playback:
        playback.sent(0, 10)
        clock.now += 3
        assert load.stats()["slack_s"] == pytest.approx(-2.0)


def test_a_stream_that_goes_on_elsewhere_is_due_from_the_frame_it_starts_with(load, clock):
    with load.stream() as playback:
        playback.sent(50, 10)
        clock.now += 0.5
        playback.sent(60, 10)
        assert load.stats()["slack_s"] == pytest.approx(0.5)


def test_what_came_too_late_is_not_the_fault_of_who_passes_it_on(load, clock):
    with load.stream() as playback:
        playback.arrived()
        playback.sent(0, 1)
        clock.now += 2  # the maker is late
        assert load.stats()["slack_s"] == MOST_SLACK_S
        playback.arrived()
        playback.sent(1, 1)
        assert load.stats()["slack_s"] == MOST_SLACK_S


def test_what_came_in_time_and_is_kept_too_long_is(load, clock):
    with load.stream() as playback:
        playback.arrived()
        playback.sent(0, 1)
        playback.arrived()
        clock.now += 0.3
        assert load.stats()["slack_s"] == pytest.approx(-0.2), "still here"
        playback.sent(1, 1)
        assert load.stats()["slack_s"] == pytest.approx(-0.2)


def test_one_late_stream_of_four_is_no_quarter_and_two_of_five_are(clock):
    load = StreamLoad(8, 0.1, clock)

    def playing(stack, late):
        playback = stack.enter_context(load.stream())
        playback.sent(0, 1000 if not late else 1)
        return playback

    with ExitStack() as stack:
        streams = [playing(stack, late=number == 0) for number in range(5)]
        clock.now += 5
        assert load.stats()["slack_s"] == MOST_SLACK_S
        streams += [playing(stack, late=True)]
        clock.now += 5
        assert load.stats()["slack_s"] < 0


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 25)), max_size=20))
def test_slack_is_always_a_number_within_its_limits(steps):
    clock = Clock()
    load, frame = StreamLoad(4, 0.08, clock), 0
    with load.stream() as playback:
        for seconds, num_frames in steps:
            clock.now += seconds
            playback.sent(frame, num_frames)
            frame += num_frames
            assert -MOST_SLACK_S <= load.stats()["slack_s"] <= MOST_SLACK_S
            assert all(type(value) is float for value in load.stats().values())
