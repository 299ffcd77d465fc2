import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from qwen3tts_core.engine.frame_step import FRAME
from qwen3tts_core.engine.scheduler import Scheduler
from qwen3tts_core.engine.slots import SlotState
from qwen3tts_core.engine.talker_runner import TalkerRunner
from qwen3tts_core.errors import EngineFault, InvalidRequest
from qwen3tts_core.ops.reference import run_eagerly
from qwen3tts_core.ops.select import Backend
from qwen3tts_core.types import ReferenceVoice, Resume, Sampling
from tests.qwen3tts_core.request_kit import make_plan, make_request
from tests.qwen3tts_core.talker_kit import backend_for, engine_config, small_talker

TALKER = small_talker()


class Desk:
    """A runner and the scheduler that feeds it, turned by hand."""

    def __init__(self, *, capture=run_eagerly, **changes):
        self.config = engine_config(**changes)
        self.runner = TalkerRunner(TALKER, self.config, backend_for(TALKER, capture=capture))
        self.scheduler = Scheduler(self.config)

    def join(self, *requests):
        for request in requests:
            self.scheduler.enqueue(request)
        placed = self.scheduler.admit()
        for each in placed:
            self.runner.admit(each)
        return placed

    def cache_prompts(self):
        """Prefill until every prompt is cached; how many it took."""
        count = 0
        while pieces := self.scheduler.next_prefill():
            self.runner.prefill(pieces)
            count += 1
        return count

    def step(self, *placed):
        """Codes by request id."""
        rows = self.runner.launch(placed).wait()
        assert (rows[:, -1] == FRAME).all()
        return {p.request.request_id: row[:-1].copy() for p, row in zip(placed, rows, strict=True)}


def frames_alone(request, count):
    desk = Desk()
    (placed,) = desk.join(request)
    desk.cache_prompts()
    return [desk.step(placed)[request.request_id] for _ in range(count)]


# ---------------------------------------------------------------- prefill
@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([(4,), (8, 16), (3, 7, 64)]),
    st.booleans(),
)
def test_however_prompts_are_packed_and_cut_the_frames_are_the_same(lengths, buckets, deterministic):
    requests = [make_request(str(i), rows=rows, frames=9) for i, rows in enumerate(lengths)]
    desk = Desk(prefill_buckets=buckets, deterministic=deterministic)
    placed = desk.join(*requests)
    desk.cache_prompts()
    steps = [desk.step(*placed) for _ in range(3)]
    for request in requests:
        for step, expected in zip(steps, frames_alone(request, 3), strict=True):
            assert np.array_equal(step[request.request_id], expected)


def test_a_pack_takes_the_smallest_bucket_and_counts_its_rows():
    desk = Desk(prefill_buckets=(4, 16))
    seen = []
    talker_pass = TALKER.forward

    def spy(rows, layout, cache):
        seen.append(len(rows))
        return talker_pass(rows, layout, cache)

    TALKER.forward = spy
    try:
        desk.join(make_request("a", rows=4), make_request("b", rows=3))  # 3 + 2 rows to cache
        assert desk.cache_prompts() == 1
        desk.join(make_request("c", rows=5))
        desk.cache_prompts()
    finally:
        del TALKER.forward
    assert seen == [16, 4]
    assert (desk.runner.counters.prefills, desk.runner.counters.prefill_rows) == (2, 9)


def cloned(name, rows):
    """One whose prompt is more than a sum of two ids a row."""
    voice = ReferenceVoice("v", np.linspace(-9, 9, TALKER.width, dtype="<f4").tobytes())
    return make_request(name, plan=replace(make_plan(rows), speaker_row=1), reference=voice, frames=9)


def keys_of(desk, placed):
    """[rows, K, E]: what the first layer keeps of its prompt, but for the last row."""
    return desk.runner.cache[0].key[placed.pages].flatten(0, 1)[: placed.num_prefill]


def test_prompts_of_ids_and_prompts_that_were_made_before_share_a_pack():
    requests = [make_request("a", rows=5, frames=9), cloned("b", rows=6), make_request("c", rows=7, frames=9)]
    desk = Desk(prefill_buckets=(8, 32))
    placed = desk.join(*requests)
    assert desk.cache_prompts() == 1
    for request, its in zip(requests, placed, strict=True):
        alone = Desk()
        (its_alone,) = alone.join(request)
        alone.cache_prompts()
        torch.testing.assert_close(keys_of(desk, its), keys_of(alone, its_alone))
    plain = Desk()
    (without_voice,) = plain.join(make_request("b", rows=6, frames=9))
    plain.cache_prompts()
    assert not torch.allclose(keys_of(plain, without_voice)[1], keys_of(desk, placed[1])[1]), (
        "no voice in its row"
    )


def test_a_prompt_s_rows_are_dropped_once_cached_or_forgotten():
    made, prompt_rows = [], TALKER.prompt_rows

    def watched(plan, reference=None):
        rows = prompt_rows(plan, reference)
        made.append(weakref.ref(rows))
        return rows

    TALKER.prompt_rows = watched
    try:
        desk = Desk(prefill_buckets=(4,))
        cached, forgotten = desk.join(cloned("a", rows=4), cloned("b", rows=40))
    finally:
        del TALKER.prompt_rows
    assert all(rows() is not None for rows in made)
    desk.runner.prefill(desk.scheduler.next_prefill())
    assert cached.can_decode
    assert not forgotten.can_decode
    assert [rows() is None for rows in made] == [True, False]
    desk.runner.forget(forgotten.slot)
    assert [rows() is None for rows in made] == [True, True]


def test_a_voice_that_does_not_fit_is_the_caller_s_error():
    desk = Desk()
    plan = replace(make_plan(4), speaker_row=1)
    voice = ReferenceVoice("v", np.zeros(3, "<f4").tobytes())
    with pytest.raises(InvalidRequest, match="3 values"):
        desk.join(make_request("a", plan=plan, reference=voice))


class CallsToTheDevice(TorchDispatchMode):
    """What the host asks for itself. As a `Capture`, it makes one call of a whole step, as a graph's launch is."""

    def __init__(self):
        super().__init__()
        self.names, self._is_launching = [], False

    def capture(self, fn, name):
        def launch():
            self.names.append("launch")
            self._is_launching = True
            fn()
            self._is_launching = False

        return launch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            not self._is_launching and func.overloadpacket.__name__ != "lift_fresh"
        ):  # what `from_numpy` does here
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_request_joins_with_one_copy_and_one_launch_for_its_slot_one_for_its_prompt_and_one_copy_for_the_step():
    """Each further call is a moment at which the engine's thread may lose the interpreter."""
    calls = CallsToTheDevice()
    desk = Desk(capture=calls.capture)
    with calls:
        first, second = desk.join(make_request("a", rows=9, frames=9), make_request("b", rows=4, frames=9))
        assert calls.names == ["copy_", "launch"] * 2
        calls.names.clear()
        desk.cache_prompts()
        assert calls.names == ["copy_", "launch"]
        calls.names.clear()
        both = (first, second)
        desk.runner.launch(both)
        desk.runner.launch(both)
        assert calls.names[:2] == ["copy_", "launch"]
        assert calls.names.count("launch") == 2
        assert "copy_" not in calls.names[2:], "nobody joined or left"


@pytest.mark.parametrize("is_cloned", [False, True])
def test_ids_that_no_table_holds_are_told_and_nothing_is_written(is_cloned):
    """In a graph they would end every stream of the GPU."""
    desk = Desk()
    request = cloned("a", rows=6) if is_cloned else make_request("a", rows=6)
    plan = replace(request.plan, text_ids=(*request.plan.text_ids[:-1], 10**6))
    before = desk.runner.state.ints.clone()
    with pytest.raises(EngineFault, match=str(10**6)):
        desk.join(replace(request, plan=plan))
    assert torch.equal(desk.runner.state.ints, before)


def test_a_slot_that_nobody_tidied_up_knows_nothing_of_the_voice_before():
    desk, alone = Desk(num_slots=1), Desk(num_slots=1)
    desk.join(cloned("c", rows=6))
    desk.scheduler.release("c")  # and no word to the runner
    plain = make_request("a", rows=6, frames=9)
    (placed,), (expected,) = desk.join(plain), alone.join(plain)
    desk.cache_prompts()
    alone.cache_prompts()
    assert torch.equal(keys_of(desk, placed), keys_of(alone, expected))


def test_a_voice_that_does_not_fit_is_told_before_frames_that_cannot_be_resumed():
    """The first is the caller's, the second another engine's."""
    voice = ReferenceVoice("v", np.zeros(3, "<f4").tobytes())
    plan = replace(make_plan(4), speaker_row=1)
    resume = Resume(np.full((1, 4), 30_000, "<i2").tobytes(), (1,))
    with pytest.raises(InvalidRequest, match="3 values"):
        Desk().join(make_request("a", plan=plan, reference=voice, resume=resume))


# ---------------------------------------------------------------- decode
def test_every_bucket_is_captured_once_and_named():
    """known_faults row 35: at the start, none at a first request."""
    names = []
    desk = Desk(capture=lambda fn, name: names.append(name) or fn, num_slots=6, prefill_buckets=(8, 32))
    assert sorted(names) == [
        "admission of a request",
        *(f"decode step of {size} rows" for size in (1, 2, 4, 6)),
        *(f"prefill of {size} rows" for size in (32, 8)),
    ]
    placed = desk.join(*(make_request(str(i), frames=9) for i in range(6)))
    desk.cache_prompts()
    for count in (6, 3, 1):
        desk.step(*placed[:count])
    assert len(names) == 7


def test_a_step_that_cannot_be_captured_stops_the_start():
    """known_faults row 36: never the slow path in silence."""

    def refuse(fn, name):
        raise RuntimeError(f"cannot capture {name}")

    with pytest.raises(RuntimeError, match="cannot capture decode step of 1 rows"):
        Desk(capture=refuse)


def test_rows_join_leave_and_change_places_in_one_bucket():
    """The bucket's row numbers follow the membership, not its size."""
    requests = {name: make_request(name, rows=3 + i, frames=20) for i, name in enumerate("abcdef")}
    desk = Desk(decode_buckets=(8,))
    placed = {p.request.request_id: p for p in desk.join(*requests.values())}
    desk.cache_prompts()
    frames = {name: [] for name in requests}
    for members in ("abc", "abd", "dba", "f", "e", "abcdef", "fedcba", "", "c"):
        if members:
            for name, codes in desk.step(*(placed[name] for name in members)).items():
                frames[name].append(codes)
    for name, request in requests.items():
        assert np.array_equal(frames[name], frames_alone(request, len(frames[name]))), name


def test_the_smallest_bucket_runs_and_padding_is_counted():
    desk = Desk(decode_buckets=(1, 4, 8))
    placed = desk.join(*(make_request(str(i), frames=9) for i in range(5)))
    desk.cache_prompts()
    for count, padding in {5: 3, 4: 0, 2: 2, 1: 0}.items():
        before = desk.runner.counters.padded_rows
        desk.step(*placed[:count])
        assert desk.runner.counters.padded_rows - before == padding
    counters = desk.runner.counters
    assert (counters.steps, counters.rows) == (4, 5 + 4 + 2 + 1)
    assert counters.steps_by_bucket == {1: 1, 4: 2, 8: 1}


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_launch_is_a_replay_if_something_was_captured_else_an_eager_step(is_captured):
    """known_faults row 36: eager steps are counted."""
    desk = Desk(capture=(lambda step, name: lambda: step()) if is_captured else run_eagerly)
    placed = desk.join(make_request("a", frames=9))
    num_launches = desk.cache_prompts() + 2
    for _ in range(2):
        desk.step(*placed)
    counters = desk.runner.counters
    expected = (num_launches, 0) if is_captured else (0, num_launches)
    assert (counters.graph_replays, counters.eager_steps) == expected


def test_a_warm_up_touches_no_slot_and_no_page():
    desk = Desk()
    (placed,) = desk.join(make_request("a", rows=6, frames=9, sampling=Sampling()))
    desk.cache_prompts()
    real = slice(desk.runner.state.padding_slot)

    def everything():
        rows = [getattr(desk.runner.state, name)[real].clone() for name in SlotState.__slots__]
        return rows + [kv.key[:-1].clone() for kv in desk.runner.cache]

    before = everything()
    desk.runner.warm_up()
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert desk.runner.counters.steps == 0
    assert np.array_equal(
        desk.step(placed)["a"], frames_alone(make_request("a", rows=6, frames=9, sampling=Sampling()), 1)[0]
    )


def test_a_result_is_its_own_although_the_next_step_has_run():
    desk = Desk()
    (placed,) = desk.join(make_request("a", rows=6, frames=9))
    desk.cache_prompts()
    first, second = desk.runner.launch([placed]), desk.runner.launch([placed])
    expected = frames_alone(make_request("a", rows=6, frames=9), 2)
    assert np.array_equal(first.wait()[0, :-1], expected[0])
    assert np.array_equal(second.wait()[0, :-1], expected[1])


class NearlyFull(Backend):
    def free_bytes(self):
        return 3 * 2**10


def test_a_cache_that_does_not_fit_is_told_with_its_knobs():
    """known_faults row 46: the Talker's."""
    plain = backend_for(TALKER)
    backend = NearlyFull(plain.device, plain.ops, plain.capture, plain.transfer)
    with pytest.raises(
        EngineFault, match=r"64 KV pages take 0\.00 GiB, 0\.00 GiB are free; raise the talker's memory_gib"
    ):
        TalkerRunner(TALKER, engine_config(num_pages=64), backend)
    TalkerRunner(TALKER, engine_config(num_pages=1), backend)
