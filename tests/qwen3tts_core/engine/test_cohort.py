from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3tts_core.engine import cohort as cohort_module
from qwen3tts_core.engine.cohort import Cohort
from qwen3tts_core.engine.frame_step import FRAME, FRAME_AND_LIMIT, INERT, STOP
from qwen3tts_core.engine.scheduler import Placed
from tests.qwen3tts_core.request_kit import make_request

NUM_SLOTS, GROUPS = 5, 3


def placed_in(slot, name):
    return Placed(make_request(name), slot, [slot], 5)


class Listener:
    """One request as its consumer sees it: what it was sent, and what it should have been sent."""

    def __init__(self, placed, chunk):
        self.placed, self.chunk = placed, chunk
        self.made, self.sent = [], []

    def __repr__(self):
        return self.placed.request.request_id


def run(script, chunks):
    """script: for each step, which slots change hands before it, and which end with it. Every frame is told apart."""
    cohort, running, everyone, number = Cohort(NUM_SLOTS), {}, [], 0
    for changes, ends in script:
        for slot in changes:
            if slot in running and slot % 2:  # left; its slot stays empty for now
                del running[slot]
            else:
                listener = Listener(placed_in(slot, str(len(everyone))), chunks[len(everyone) % len(chunks)])
                running[slot] = listener
                everyone.append(listener)
        if not running:
            continue
        listeners = list(running.values())
        chunk_of = {id(one.placed): one.chunk for one in listeners}
        members = tuple(one.placed for one in listeners)
        if [id(placed) for placed in members] != [id(placed) for placed in cohort.members]:
            cohort.change(members, lambda placed, of=chunk_of: of[id(placed)])
        results = np.empty((len(listeners), GROUPS + 1), np.int64)
        for row, one in enumerate(listeners):
            number += 1
            results[row, :-1] = number
            results[row, -1] = ends.get(one.placed.slot, FRAME)
            if results[row, -1] != STOP:
                one.made.append(number)
        for row in cohort.add(results):
            one = listeners[row]
            one.sent += cohort.take(row, int(results[row, -1]))[:, 0].tolist()
            if results[row, -1] == FRAME:
                assert len(one.sent) % one.chunk == 0, "looked at before its chunk was full"
                cohort.expect(row, one.chunk)
            else:
                cohort.forget(row)
                del running[one.placed.slot]
        for one in running.values():
            assert len(one.made) - len(one.sent) < one.chunk, "a full chunk was kept"
            assert one.sent == one.made[: len(one.sent)]
        ended = [one for one in listeners if one.placed.slot in ends]
        assert all(one.sent == one.made for one in ended), "an end keeps nothing back"
    return cohort


slots = st.integers(0, NUM_SLOTS - 1)
ending = st.dictionaries(slots, st.sampled_from([STOP, FRAME_AND_LIMIT]), max_size=2)
steps = st.lists(st.tuples(st.lists(slots, max_size=3, unique=True), ending), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(steps, st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_whoever_comes_and_goes_each_gets_its_own_frames_in_full_chunks(script, chunks):
    with mock.patch.object(cohort_module, "_STEPS_AT_FIRST", 3):  # else room is made too seldom to be seen
        run(script, chunks)


def test_what_everybody_has_taken_is_not_kept():
    """Also where a slot was left with frames that nobody took, and is empty ever since."""
    first, left = placed_in(0, "first"), placed_in(1, "left")
    cohort = Cohort(NUM_SLOTS)
    cohort.change((first, left), lambda placed: 4)
    results = np.full((2, GROUPS + 1), FRAME, np.int64)
    cohort.add(results)
    cohort.change((first,), lambda placed: 4)
    for _ in range(1_000):
        for row in cohort.add(results[:1]):
            cohort.take(row, FRAME)
            cohort.expect(row, 4)
    assert len(cohort._frames) < 100


def test_one_that_ended_in_an_earlier_step_has_no_more_frames():
    """The step after was launched before anyone knew."""
    one, other = placed_in(0, "one"), placed_in(3, "other")
    cohort = Cohort(NUM_SLOTS)
    cohort.change((one, other), lambda placed: 3 if placed is one else 25)
    results = np.full((2, GROUPS + 1), FRAME, np.int64)
    results[0, -1] = FRAME_AND_LIMIT
    assert cohort.add(results).tolist() == [0]
    assert cohort.take(0, FRAME_AND_LIMIT).shape == (1, GROUPS)
    results[0, -1] = INERT
    assert cohort.add(results).tolist() == [0]  # so that it can be forgotten
    cohort.forget(0)
    results[0, -1] = FRAME  # whatever it says
    assert cohort.add(results).tolist() == []


def test_rows_are_told_apart_only_in_steps_that_somebody_was_waiting_for():
    """All others cost the host three array operations, however many rows there are."""
    members = tuple(placed_in(slot, str(slot)) for slot in range(NUM_SLOTS))
    cohort = Cohort(NUM_SLOTS)
    cohort.change(members, lambda placed: 10 + placed.slot % 2)
    results = np.full((NUM_SLOTS, GROUPS + 1), FRAME, np.int64)
    looked_at = []
    with mock.patch.object(cohort_module.np, "flatnonzero", wraps=np.flatnonzero) as tells_apart:
        for step in range(1, 100):
            for row in cohort.add(results).tolist():
                looked_at.append((step, row))
                cohort.take(row, FRAME)
                cohort.expect(row, 10)
    assert looked_at == [
        (step, row) for step in range(10, 100) for row in range(NUM_SLOTS) if step % 10 == row % 2
    ]
    assert tells_apart.call_count == len({step for step, _ in looked_at}) == 18
