from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from qwen3tts_core.config import TalkerEngineConfig
from qwen3tts_core.engine.scheduler import Scheduler
from qwen3tts_core.errors import InvalidRequest, Overloaded, TextTooLong
from qwen3tts_core.types import Resume
from tests.qwen3tts_core.request_kit import make_plan, make_request

MAX_POSITIONS = 24


def make_scheduler(**changes):
    sizes = {"num_slots": 2, "max_queued": 2, "page_size": 4, "max_positions": MAX_POSITIONS, "num_pages": 12}
    return Scheduler(TalkerEngineConfig(**{**sizes, "prefill_buckets": (4, 8), **changes}))


# ---------------------------------------------------------------- as a machine
class AnyTraffic(RuleBasedStateMachine):
    """Arrivals, turns of the engine and departures in any order, beside a model of a few lists."""

    @initialize(
        num_slots=st.integers(1, 4),
        max_queued=st.integers(0, 3),
        num_pages=st.integers(6, 14),  # from one longest request up to two and a bit
        deterministic=st.booleans(),
    )
    def build(self, **sizes):
        self.scheduler = make_scheduler(**sizes)
        self.waiting, self.placed = [], []
        self.requests, self.frames_left = {}, {}

    # ------------------------------------------------------------ what may happen
    @rule(rows=st.integers(1, 16), frames=st.integers(1, 9))
    def arrive(self, rows, frames):
        request = make_request(str(len(self.requests)), rows=rows, frames=frames)
        config = self.scheduler.config
        full = len(self.waiting) + len(self.placed) >= config.num_slots + config.max_queued
        self.requests[request.request_id] = request
        self.scheduler.check(request)
        if full:
            with pytest.raises(Overloaded):
                self.scheduler.enqueue(request)
            return
        self.scheduler.enqueue(request)
        self.waiting.append(request.request_id)
        self.frames_left[request.request_id] = frames

    @rule()
    def turn(self):
        """What the engine does between two steps."""
        config = self.scheduler.config
        free_pages = self.scheduler.pages.num_free
        for placed in self.scheduler.admit():
            assert placed.request.request_id == self.waiting.pop(0), "first come, first served"
            self.placed.append(placed.request.request_id)
            free_pages -= len(placed.pages)
        if self.waiting and len(self.placed) < config.num_slots:
            assert free_pages < self.pages_needed(self.waiting[0]), "waits although it fits"
        self.prefill()
        for placed in self.scheduler.running():
            name = placed.request.request_id
            self.frames_left[name] -= 1
            if self.frames_left[name] == 0:
                self.leave(name)

    @rule(data=st.data())
    @precondition(lambda self: self.waiting or self.placed)
    def cancel(self, data):
        self.leave(data.draw(st.sampled_from(self.waiting + self.placed)))

    @rule()
    def cancel_a_stranger(self):
        assert self.scheduler.release("nobody") is False

    # ------------------------------------------------------------ what must hold
    @invariant()
    def everyone_is_where_the_model_says(self):
        assert self.scheduler.request_ids() == self.placed + self.waiting
        assert self.scheduler.num_waiting == len(self.waiting)
        assert self.scheduler.num_placed == len(self.placed)
        assert self.scheduler.has_work == bool(self.placed or self.waiting)
        assert all(self.scheduler.placed(name) is None for name in self.waiting)

    @invariant()
    def no_slot_and_no_page_has_two_owners(self):
        all_placed = [self.scheduler.placed(name) for name in self.placed]
        slots = [placed.slot for placed in all_placed]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= set(range(self.scheduler.config.num_slots))
        pages = Counter(page for placed in all_placed for page in placed.pages)
        assert not pages or max(pages.values()) == 1
        assert self.scheduler.pages.num_free == self.scheduler.config.num_pages - len(pages)

    @invariant()
    def each_owns_pages_for_prompt_and_frames(self):
        for name in self.placed:
            assert len(self.scheduler.placed(name).pages) == self.pages_needed(name)

    def teardown(self):
        """Without arrivals everything ends, in a number of turns that the work left bounds."""
        if not hasattr(self, "scheduler"):
            return
        turns = sum(self.frames_left.values()) + 20 * (len(self.waiting) + len(self.placed))
        for _ in range(turns):
            self.turn()
        assert not self.scheduler.has_work
        assert self.scheduler.pages.num_free == self.scheduler.config.num_pages

    # ------------------------------------------------------------ helpers
    def prefill(self):
        """Check the next prefill: within the budget, oldest first, whole before the next begins."""
        config = self.scheduler.config
        before = {name: self.scheduler.placed(name).num_cached for name in self.placed}
        pieces = self.scheduler.next_prefill()
        budget = config.prefill_buckets[-1]
        assert sum(piece.num_rows for piece in pieces) <= budget
        for piece in pieces:
            placed = piece.placed
            assert piece.num_rows > 0
            assert piece.first == before[placed.request.request_id]
            assert placed.num_cached == piece.first + piece.num_rows <= placed.num_prefill
        unfinished = [n for n in self.placed if before[n] < self.scheduler.placed(n).num_prefill]
        served = [piece.placed.request.request_id for piece in pieces]
        assert served == unfinished[: len(served)], "oldest first"
        if config.deterministic:
            assert len(pieces) <= 1
        elif len(served) < len(unfinished):
            assert sum(piece.num_rows for piece in pieces) == budget, "budget left while prompts wait"
        if unfinished:
            assert pieces

    def leave(self, name):
        assert self.scheduler.release(name) is True
        assert self.scheduler.release(name) is False
        (self.waiting if name in self.waiting else self.placed).remove(name)
        self.frames_left.pop(name)

    def pages_needed(self, name):
        request = self.requests[name]
        positions = request.plan.num_rows + request.max_frames - 1
        return -(-positions // self.scheduler.config.page_size)


AnyTraffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyTraffic = AnyTraffic.TestCase


# ---------------------------------------------------------------- by example
def test_overloaded_comes_exactly_after_slots_plus_queue():
    scheduler = make_scheduler(num_slots=2, max_queued=3)
    for name in "abcde":
        scheduler.enqueue(make_request(name))
    with pytest.raises(Overloaded, match="2 streams"):
        scheduler.enqueue(make_request("f"))
    scheduler.admit()
    with pytest.raises(Overloaded):
        scheduler.enqueue(make_request("f"))
    scheduler.release("d")  # one who waits leaves
    scheduler.enqueue(make_request("f"))
    scheduler.release("a")  # one who runs leaves
    scheduler.enqueue(make_request("g"))
    with pytest.raises(Overloaded):
        scheduler.enqueue(make_request("h"))


def test_nobody_overtakes_a_big_request_at_the_head():
    scheduler = make_scheduler(num_slots=3, num_pages=6)
    for name, rows in {"running": 8, "big": 20, "small": 1}.items():  # 2, 5 and 1 pages
        scheduler.enqueue(make_request(name, rows=rows, frames=1))
    assert [placed.request.request_id for placed in scheduler.admit()] == ["running"]
    assert scheduler.admit() == []
    scheduler.release("running")
    assert [placed.request.request_id for placed in scheduler.admit()] == ["big", "small"]


def test_who_is_listened_to_already_goes_before_new_requests_in_order():
    scheduler = make_scheduler(num_slots=1, max_queued=9)
    begun = Resume(np.zeros((2, 16), "<i2").tobytes(), (1, 1))
    for name, changes in {
        "new": {},
        "second piece": {"piece": 1},
        "begun elsewhere": {"resume": begun, "frames": 3},
        "new too": {},
        "third piece": {"piece": 2},
    }.items():
        scheduler.enqueue(make_request(name, **changes))
    order = []
    while placed := scheduler.admit():
        order += [each.request.request_id for each in placed]
        scheduler.release(order[-1])
    assert order == ["second piece", "begun elsewhere", "third piece", "new", "new too"]


def test_a_long_prompt_is_cached_in_budget_sized_pieces():
    scheduler = make_scheduler()
    scheduler.enqueue(make_request("a", rows=20, frames=1))
    (placed,) = scheduler.admit()
    spans = []
    while not placed.can_decode:
        assert scheduler.running() == ()
        spans += [(piece.first, piece.num_rows) for piece in scheduler.next_prefill()]
    assert spans == [(0, 8), (8, 8), (16, 3)]  # the last of the 20 rows is the first step's input
    assert scheduler.running() == (placed,)
    assert scheduler.next_prefill() == []


def test_short_prompts_share_a_prefill_unless_it_must_be_deterministic():
    for deterministic, expected in {False: [["a", "b"]], True: [["a"], ["b"]]}.items():
        scheduler = make_scheduler(deterministic=deterministic)
        for name in "ab":
            scheduler.enqueue(make_request(name, rows=4))
        scheduler.admit()
        packs = []
        while pieces := scheduler.next_prefill():
            packs.append([piece.placed.request.request_id for piece in pieces])
        assert packs == expected


def test_a_prompt_of_one_row_needs_no_prefill():
    scheduler = make_scheduler()
    scheduler.enqueue(make_request("a", rows=1))
    (placed,) = scheduler.admit()
    assert scheduler.next_prefill() == []
    assert scheduler.running() == (placed,)


# ---------------------------------------------------------------- what could never run
@pytest.mark.parametrize("rows", [MAX_POSITIONS, MAX_POSITIONS + 1])
def test_a_prompt_without_room_for_a_frame_is_too_long(rows):
    with pytest.raises(TextTooLong) as caught:
        make_scheduler().check(make_request("a", rows=rows, frames=1))
    assert (caught.value.length, caught.value.limit) == (rows, MAX_POSITIONS - 1)


def test_trailing_text_that_outlasts_every_frame_is_too_long():
    scheduler = make_scheduler()
    plan = make_plan(3, num_trailing=MAX_POSITIONS)
    with pytest.raises(TextTooLong):
        scheduler.check(make_request("a", plan=plan, frames=1))
    scheduler.check(make_request("a", plan=make_plan(3, num_trailing=MAX_POSITIONS - 1), frames=1))


def test_too_many_frames_name_the_field_and_the_most_that_fit():
    scheduler = make_scheduler()
    fits = MAX_POSITIONS - 10 + 1
    scheduler.check(make_request("a", rows=10, frames=fits))
    with pytest.raises(InvalidRequest, match=f"the limit is {fits}") as caught:
        scheduler.check(make_request("a", rows=10, frames=fits + 1))
    assert caught.value.param == "max_new_tokens"


def test_more_pages_than_the_server_has_is_refused_and_not_queued_forever():
    scheduler = make_scheduler(num_pages=3)
    scheduler.check(make_request("a", rows=4, frames=9))  # 12 positions, 3 pages
    with pytest.raises(InvalidRequest, match="need 4 KV pages, this server has 3") as caught:
        scheduler.check(make_request("a", rows=4, frames=10))
    assert caught.value.param == "max_new_tokens"
