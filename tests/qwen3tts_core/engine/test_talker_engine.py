import functools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from qwen3tts_core.config import TalkerEngineConfig
from qwen3tts_core.engine import threads
from qwen3tts_core.engine.talker_engine import TalkerEngine, open_talker_engine
from qwen3tts_core.errors import EngineFault, InvalidRequest, Overloaded, TextTooLong
from qwen3tts_core.ops.reference import HostTransfer
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.types import ReferenceVoice, Sampling
from tests.qwen3tts_core.request_kit import make_plan, make_request
from tests.qwen3tts_core.talker_kit import (
    FOLDERS,
    Inbox,
    LateTransfer,
    RecordingOps,
    StepHook,
    always_eos,
    backend_for,
    build_engine,
    checkpoint_talker,
    engine_config,
    golden,
    small_talker,
    speak,
    talking,
)

TALKER = small_talker()
ONE_BY_ONE = ChunkRamp((), 1)
TRANSFERS = {"at once": HostTransfer, "one step late": LateTransfer}

each_transfer = pytest.mark.parametrize("transfer", TRANSFERS.values(), ids=TRANSFERS)
each_checkpoint = pytest.mark.parametrize("variant", FOLDERS)


@functools.cache
def open_checkpoint(variant):
    return checkpoint_talker(variant)


@functools.cache
def alone(request):
    """What the small talker says to this request with the engine to itself."""
    return speak(TALKER, [request])[request.request_id]


def with_hook(before, config, transfer=HostTransfer):
    """A backend that calls `before(step)` in the engine's thread ahead of each step."""
    hook = StepHook(before, len(config.decode_buckets))
    return backend_for(TALKER, capture=hook, transfer=transfer())


def assert_same_speech(spoken, expected):
    assert spoken.error is None
    assert np.array_equal(spoken.codes, expected.codes)
    assert (spoken.finish, spoken.sizes) == (expected.finish, expected.sizes)


def wait_until(claim, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ---------------------------------------------------------------- the reference's frames
@each_checkpoint
def test_golden_codes_one_request_at_a_time(variant):
    with talking(open_checkpoint(variant)) as (engine, inbox):
        for name, case in golden(variant).items():
            engine.submit(make_request(name, plan=case.plan, frames=13))
            spoken = inbox.wait_for(name)[name]
            assert np.array_equal(spoken.codes, case.codes), name
            assert spoken.finish == ("stop" if case.is_stopped else "length")


@each_transfer
@each_checkpoint
def test_golden_codes_all_together_joining_and_leaving_a_padded_batch(variant, transfer):
    """known_faults row 5: each stops at the reference's step, also in a padded bucket.

    More prompts than slots, one bucket wider than both; the stopped one leaves in the middle.
    """
    talker, cases = open_checkpoint(variant), golden(variant)
    config = engine_config(num_slots=5, decode_buckets=(7,))
    requests = [make_request(name, plan=case.plan, frames=13) for name, case in cases.items()]
    spoken = speak(talker, requests, config, backend=backend_for(talker, transfer=transfer()))
    for name, case in cases.items():
        assert np.array_equal(spoken[name].codes, case.codes), name
        assert spoken[name].finish == ("stop" if case.is_stopped else "length")
    assert any(case.is_stopped for case in cases.values())


@each_checkpoint
def test_the_end_is_where_the_reference_ends(variant):
    """plain_auto_stream draws EOS as its tenth sample: nine frames, however many were allowed."""
    talker, case = open_checkpoint(variant), golden(variant)["plain_auto_stream"]
    stops = make_request("stops", plan=case.plan, frames=40)
    others = [make_request(str(i), rows=4 + i, frames=20 - i) for i in range(6)]
    for requests in ([stops], [*others[:3], stops, *others[3:]]):
        spoken = speak(talker, requests)["stops"]
        assert (len(spoken.codes), spoken.finish, spoken.sizes) == (9, "stop", [1, 3, 5])
        assert np.array_equal(spoken.codes, case.codes)


def test_a_talker_that_wants_to_end_at_once_says_two_frames():
    """known_faults row 1: by default, so that there is audio."""
    spoken = speak(always_eos(small_talker()), [make_request("a", frames=9)])["a"]
    assert (spoken.error, len(spoken.codes), spoken.finish) == (None, 2, "stop")


def test_the_count_of_frames_never_falls(monkeypatch):
    """Another thread may read it at any moment, to export what has been added since."""
    counts = []
    count = property(lambda _: counts[-1], lambda _, value: counts.append(value))
    monkeypatch.setattr(TalkerEngine, "_num_frames", count, raising=False)
    spoken = speak(always_eos(small_talker()), [make_request(name, frames=9) for name in "abc"])
    assert counts == sorted(counts)
    assert counts[-1] == sum(len(stream.codes) for stream in spoken.values()) == 6


# ---------------------------------------------------------------- alone and among others
SEEDED = [
    make_request(f"seeded {i}", rows=3 + 5 * i, frames=30, trailing=i, sampling=Sampling(), seed=17 * i - 3)
    for i in range(8)
]


@each_transfer
def test_a_seeded_request_draws_the_same_codes_alone_and_among_seven_others(transfer):
    """known_faults row 19: the same draws in any company."""
    backend = backend_for(TALKER, transfer=transfer())
    for requests in (SEEDED, SEEDED[::-1]):
        for request_id, spoken in speak(TALKER, requests, backend=backend).items():
            request = next(r for r in SEEDED if r.request_id == request_id)
            assert_same_speech(spoken, alone(request))


def test_seeds_differ_and_repeat():
    """known_faults row 18: the seed decides."""
    request = SEEDED[0]
    other = replace(request, seed=request.seed + 1)
    assert np.array_equal(speak(TALKER, [request])["seeded 0"].codes, alone(request).codes)
    assert not np.array_equal(alone(other).codes, alone(request).codes)


def test_threads_that_ask_at_once_each_hear_their_own():
    """known_faults row 38: one cache, and calls from eight threads."""
    barrier = threading.Barrier(len(SEEDED))
    with talking(TALKER) as (engine, inbox), ThreadPoolExecutor(len(SEEDED)) as pool:

        def ask(request):
            barrier.wait(10)
            engine.submit(request)

        list(pool.map(ask, SEEDED))
        spoken = inbox.wait_for(*(request.request_id for request in SEEDED))
    for request in SEEDED:
        assert_same_speech(spoken[request.request_id], alone(request))


@each_transfer
def test_whoever_joins_or_leaves_at_any_step_changes_nobody(transfer):
    """Random arrivals through the run, in every bucket size; each speaks as if alone."""
    rng = random.Random(5)
    requests = [
        make_request(str(i), rows=rng.randint(1, 60), frames=rng.randint(1, 25), seed=i, sampling=Sampling())
        for i in range(24)
    ]
    config = engine_config()
    arrivals = requests[1:]

    def before(step):
        for _ in range(rng.choice([0, 0, 1, 2])):
            if arrivals and engine.stats().num_waiting < config.max_queued:
                engine.submit(arrivals.pop())

    # A stream for the whole run, so that there is always a next step for the rest to arrive at.
    longest = make_request("longest", frames=100)
    engine, inbox = build_engine(TALKER, config, backend=with_hook(before, config, transfer))
    for request in (longest, requests[0]):
        engine.submit(request)
    engine.start()
    spoken = inbox.wait_for("longest", *(r.request_id for r in requests), timeout_s=120)
    engine.stop()
    for request in (longest, *requests):
        assert_same_speech(spoken[request.request_id], alone(request))


def test_deterministic_mode_is_bitwise_the_same_in_any_company():
    """known_faults row 19: the mode in which logits don't drift either.

    All logits of all groups, not just the codes: alone, among others, in other slots, after others.
    """
    torch.manual_seed(0)

    def logits_of(seed, requests, *, earlier=()):
        ops = RecordingOps(trim_context=False)
        talker = checkpoint_talker("custom_voice_large", ops=ops)
        engine, inbox = build_engine(talker, engine_config(deterministic=True))
        for request in earlier:
            engine.submit(request)
        engine.start()
        inbox.wait_for(*(r.request_id for r in earlier))
        for request in requests:
            engine.submit(request)
        inbox.wait_for(*(r.request_id for r in requests))
        engine.stop()
        return torch.stack([torch.nn.functional.pad(row, (0, 1088 - len(row))) for row in ops.logits[seed]])

    def others(count):
        lengths = [9, 40, 3, 70, 33, 17, 28]
        return [
            make_request(f"o{i}", rows=lengths[i], frames=4 + i, seed=100 + i, sampling=Sampling())
            for i in range(count)
        ]

    target = make_request("target", rows=21, frames=8, seed=7, sampling=Sampling())
    expected = logits_of(7, [target])
    assert len(expected) == 8 * 16
    for company in (
        {"requests": [target, *others(7)]},
        {"requests": [*others(7), target]},
        {"requests": [*others(4)[::-1], target, *others(7)[4:]]},
        {"requests": [target], "earlier": others(3)},
        {"requests": [*others(1), target], "earlier": [make_request("e", rows=90, frames=2, seed=1)]},
    ):
        made = logits_of(7, **company)
        # A row goes on being drawn, inert, for the step after its last: compare what was used.
        assert torch.equal(made[: len(expected)], expected)


# ---------------------------------------------------------------- results that come late
def test_a_row_that_ended_rides_along_once_and_changes_nothing():
    """One step ahead: the wasted step makes no frame, no item and no difference to the next tenant."""
    config = engine_config(num_slots=1)
    first, second = make_request("first", frames=5), make_request("second", rows=9, frames=5)
    engine, inbox = build_engine(TALKER, config, backend=backend_for(TALKER, transfer=LateTransfer()))
    engine.submit(first)
    engine.submit(second)
    engine.start()
    spoken = inbox.wait_for("first", "second")
    wait_until(lambda: engine.stats().num_running == 0)
    engine.stop()
    assert_same_speech(spoken["first"], alone(first))
    assert_same_speech(spoken["second"], alone(second))
    assert inbox.is_empty()
    stats = engine.stats()
    assert stats.frames == 10
    assert stats.steps == 12  # each had one step in flight when its end was read


@each_transfer
def test_first_frames_leave_at_once_and_the_host_is_one_step_behind_at_most(transfer):
    lag = {HostTransfer: 0, LateTransfer: 1}[transfer]
    config, seen = engine_config(), {}

    def before(step):
        while not inbox.is_empty():
            inbox.next()
        seen[step] = len(inbox.spoken("a").codes)

    engine, inbox = build_engine(TALKER, config, ramp=ONE_BY_ONE, backend=with_hook(before, config, transfer))
    engine.submit(make_request("a", frames=12))
    engine.start()
    wait_until(lambda: engine.stats().frames == 12)  # its slot is free before it is given one, too
    wait_until(lambda: engine.stats().num_free_slots == config.num_slots)
    engine.stop()
    assert [seen[step] for step in range(12)] == [max(0, step - lag) for step in range(12)]


# ---------------------------------------------------------------- what leaves together
def test_items_follow_the_ramp_and_join_without_a_gap():
    request = make_request("a", rows=5, frames=1 + 3 + 8 + 16 + 25 + 25 + 7)
    spoken = alone(request)
    assert spoken.sizes == [1, 3, 8, 16, 25, 25, 7]
    assert [batch.first_frame for batch in spoken.batches] == [0, 1, 4, 12, 28, 53, 78]
    assert [batch.finish for batch in spoken.batches] == [None] * 6 + ["length"]
    assert {batch.num_groups for batch in spoken.batches} == {4}


def test_a_limit_at_the_edge_of_an_item_ends_with_it():
    assert alone(make_request("a", frames=28)).sizes == [1, 3, 8, 16]
    assert alone(make_request("a", frames=28)).finish == "length"


def test_an_end_after_a_full_item_is_an_empty_item():
    case = golden("custom_voice")["plain_auto_stream"]
    request = make_request("a", plan=case.plan, frames=40)
    spoken = speak(open_checkpoint("custom_voice"), [request], ramp=ChunkRamp((1, 8), 4))["a"]
    assert (spoken.sizes, spoken.finish) == ([1, 8, 0], "stop")
    assert spoken.batches[-1].first_frame == 9


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5])
def test_n_frames_at_most_means_n(frames):
    spoken = alone(make_request("a", frames=frames))
    assert (len(spoken.codes), spoken.finish) == (frames, "length")


def test_a_long_prompt_does_not_hold_up_who_is_speaking():
    """Its thirteen pieces go in between the steps of the other."""
    config, order = engine_config(prefill_buckets=(8,)), []

    def before(step):
        if step == 3:
            engine.submit(make_request("long", rows=101, frames=3))

    class Ordered(Inbox):
        def put(self, request_id, item):
            order.append(request_id)
            super().put(request_id, item)

    engine, inbox = build_engine(
        TALKER, config, ramp=ONE_BY_ONE, backend=with_hook(before, config), inbox=Ordered()
    )
    engine.submit(make_request("running", frames=40))
    engine.start()
    inbox.wait_for("running", "long")
    engine.stop()
    assert order.index("long") - 3 >= 13
    assert order[: order.index("long")] == ["running"] * order.index("long")


# ---------------------------------------------------------------- leaving
@each_transfer
def test_a_hundred_cancellations_free_everything_within_two_steps(transfer):
    """One leaves and one comes at every step; a bystander hears nothing of it."""
    rng = random.Random(1)
    config = engine_config(num_slots=6, min_frames=120)  # nobody ends before it is told to
    bystander = make_request("bystander", frames=110, seed=3)
    live, count = [], 0

    def arrive():
        nonlocal count
        count += 1
        live.append(str(count))
        engine.submit(
            make_request(live[-1], rows=rng.randint(1, 30), frames=90, seed=count, sampling=Sampling())
        )

    def before(step):
        if step == 0:
            return  # not everybody has been admitted yet
        stats = engine.stats()
        if step <= 100:  # whom the step before cancelled is gone, and whom it brought is in
            assert stats.num_running + stats.num_waiting == len(live) + 1
            engine.cancel(live.pop(rng.randrange(len(live))))
            arrive()
        elif step == 101:
            while live:
                engine.cancel(live.pop())
        else:
            assert stats.num_running == 1
            assert stats.num_free_slots == config.num_slots - 1

    engine, inbox = build_engine(TALKER, config, backend=with_hook(before, config, transfer))
    engine.submit(bystander)
    for _ in range(7):  # five run and two wait
        arrive()
    engine.start()
    spoken = inbox.wait_for("bystander")["bystander"]
    wait_until(lambda: engine.stats().num_running == 0)
    engine.check_health()
    engine.stop()
    assert_same_speech(spoken, speak(TALKER, [bystander], config)["bystander"])
    stats = engine.stats()
    assert (stats.num_free_slots, stats.num_free_pages) == (config.num_slots, config.num_pages)
    assert stats.num_waiting == 0


def test_whoever_waits_or_prefills_can_leave():
    config = engine_config(num_slots=2, prefill_buckets=(4,))

    def before(step):
        if step == 2:
            engine.submit(make_request("prefilling", rows=90, frames=5))
            engine.submit(make_request("waiting", rows=90, frames=5))
        if step == 5:
            assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 1)
            engine.cancel("waiting")
            engine.cancel("prefilling")
            engine.cancel("nobody")
        if step == 6:
            assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 0)

    engine, inbox = build_engine(TALKER, config, backend=with_hook(before, config))
    running = make_request("running", frames=12)
    engine.submit(running)
    engine.start()
    assert_same_speech(inbox.wait_for("running")["running"], alone(running))
    after = make_request("after", rows=50, frames=5)
    engine.submit(after)
    assert_same_speech(inbox.wait_for("after")["after"], alone(after))
    engine.stop()
    assert set(inbox.items) == {"running", "after"}
    assert engine.stats().num_free_pages == config.num_pages


def test_cancelling_from_outside_at_any_time_leaks_nothing():
    rng = random.Random(2)
    with talking(TALKER) as (engine, inbox):
        for i in range(100):
            engine.submit(make_request(f"{i}", rows=rng.randint(1, 50), frames=60))
            if rng.random() < 0.5:
                time.sleep(rng.random() * 0.01)
            engine.cancel(f"{i}")
            engine.cancel(f"{i}")
        wait_until(lambda: engine.stats().num_running + engine.stats().num_waiting == 0)
        assert engine.stats().num_free_pages == engine_config().num_pages
        engine.check_health()
        request = make_request("last", frames=5)
        engine.submit(request)
        assert_same_speech(inbox.wait_for("last")["last"], alone(request))


@each_transfer
@pytest.mark.parametrize("is_queued", [False, True])
def test_an_id_taken_again_after_a_cancel_hears_only_its_own_frames(transfer, is_queued):
    """known_faults row 10: ids used again.

    At the very step of the cancel, with results of the old one on their way; queued or running.
    """
    config, cut = engine_config(num_slots=1 if is_queued else 4), "cut"
    old, new = make_request("a", rows=7, frames=50), make_request("a", rows=12, frames=9)

    def before(step):
        if step == 4:
            engine.cancel("a")
            inbox.put("a", cut)
            engine.submit(new)
            engine.cancel("a")
            engine.submit(new)

    engine, inbox = build_engine(TALKER, config, ramp=ONE_BY_ONE, backend=with_hook(before, config, transfer))
    if is_queued:
        engine.submit(make_request("first", frames=8))
    engine.submit(old)
    engine.start()
    items = []
    while not items or items[-1] == cut or items[-1].finish is None:
        request_id, item = inbox.next()
        if request_id == "a":
            items.append(item)
    engine.stop()
    heard = items[items.index(cut) + 1 :]
    assert [batch.first_frame for batch in heard] == list(range(9))
    assert b"".join(batch.codes for batch in heard) == alone(new).codes.tobytes()
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_free_pages) == (0, config.num_pages)


def test_a_late_cancel_does_not_hit_the_next_request_of_that_id():
    """The consumer leaves with its last item in hand, and comes back before the engine's next turn."""
    again = make_request("a", rows=9, frames=6)

    class ComesBack(Inbox):
        comings = 0

        def flush(self):  # the engine's thread, at the end of a turn
            if self.comings == 0 and engine.stats().frames == 3:
                self.comings = 1
                engine.cancel("a")
                engine.submit(again)
                engine.cancel("a")
                engine.submit(again)

    engine, inbox = build_engine(TALKER, inbox=ComesBack())
    engine.submit(make_request("a", frames=3))
    engine.start()
    wait_until(lambda: engine.stats().frames == 9 and engine.stats().num_running == 0)
    engine.stop()
    while not inbox.is_empty():
        inbox.next()
    assert inbox.spoken("a").codes[3:].tobytes() == alone(again).codes.tobytes()


# ---------------------------------------------------------------- refusing
def test_overloaded_comes_exactly_after_slots_plus_queue():
    config = engine_config(num_slots=2, max_queued=3)
    requests = [make_request(str(i), frames=3) for i in range(6)]
    engine, inbox = build_engine(TALKER, config)
    for request in requests[:5]:
        engine.submit(request)
    with pytest.raises(Overloaded):
        engine.submit(requests[5])
    assert engine.stats().requests == 5
    engine.start()
    inbox.wait_for(*"01234")
    engine.submit(requests[5])  # refused once, it left nothing behind
    assert_same_speech(inbox.wait_for("5")["5"], alone(requests[5]))
    engine.stop()


def test_a_request_that_could_never_run_is_refused_at_the_door():
    with talking(TALKER) as (engine, inbox):
        with pytest.raises(TextTooLong):
            engine.submit(make_request("a", rows=128, frames=1))
        with pytest.raises(InvalidRequest, match="max_new_tokens"):
            engine.submit(make_request("a", rows=100, frames=30))
        assert engine.stats().num_waiting == 0
        assert inbox.is_empty()


def test_a_voice_that_does_not_fit_fails_alone():
    """Known only at admission: the request hears of it, its slot is free, nobody else notices."""
    bad = make_request(
        "bad",
        plan=replace(make_plan(6), speaker_row=2),
        reference=ReferenceVoice("v", np.zeros(3, "<f4").tobytes()),
    )
    good = make_request("good", frames=6)
    with talking(TALKER) as (engine, inbox):
        engine.submit(bad)
        engine.submit(good)
        spoken = inbox.wait_for("bad", "good")
        assert isinstance(spoken["bad"].error, InvalidRequest)
        assert_same_speech(spoken["good"], alone(good))
        wait_until(lambda: engine.stats().num_running == 0)
        assert engine.stats().num_free_pages == engine_config().num_pages
        engine.check_health()
        engine.submit(make_request("bad", frames=6))  # its id is free again


def test_whoever_leaves_while_being_refused_comes_back_as_somebody_else():
    """The cancel falls between admission and the voice's refusal."""
    talker, again = small_talker(), make_request("a", rows=9, frames=6)
    prompt_rows = talker.prompt_rows

    def leave_and_come_back(plan, reference=None):
        if reference is not None:
            engine.cancel("a")
            engine.submit(again)
        return prompt_rows(plan, reference)

    talker.prompt_rows = leave_and_come_back
    voice = ReferenceVoice("v", np.zeros(3, "<f4").tobytes())
    with talking(talker) as (engine, inbox):
        engine.submit(make_request("a", plan=replace(make_plan(6), speaker_row=2), reference=voice))
        assert_same_speech(inbox.wait_for("a")["a"], alone(again))
        wait_until(lambda: engine.stats().num_running == 0)
        assert engine.stats().num_free_pages == engine_config().num_pages


def test_an_id_that_is_running_is_not_taken_twice():
    with talking(TALKER) as (engine, inbox):
        request = make_request("a", frames=100)
        engine.submit(request)
        with pytest.raises(EngineFault, match="already running"):
            engine.submit(request)
        assert_same_speech(inbox.wait_for("a")["a"], alone(request))
        engine.submit(make_request("a", frames=2))


# ---------------------------------------------------------------- breaking and stopping
def test_a_fault_in_a_step_fails_every_stream_and_the_health_check():
    def before(step):
        if step == 4:
            raise RuntimeError("the device fell off")

    config = engine_config(num_slots=2)
    engine, inbox = build_engine(TALKER, config, backend=with_hook(before, config))
    for name in "abcd":
        engine.submit(make_request(name, frames=30))
    engine.start()
    for name, spoken in inbox.wait_for(*"abcd").items():
        assert isinstance(spoken.error, EngineFault), name
        assert "the device fell off" in str(spoken.error)
    assert [len(inbox.spoken(name).codes) for name in "abcd"] == [4, 4, 0, 0]
    with pytest.raises(EngineFault, match="the device fell off"):
        engine.check_health()
    with pytest.raises(EngineFault, match="the device fell off"):
        engine.submit(make_request("e"))
    engine.cancel("a")
    engine.stop()
    assert engine.stats().num_running == engine.stats().num_waiting == 0


def test_a_fault_while_warming_up_stops_the_start():
    def broken(fn, name):
        def launch():
            raise RuntimeError(f"{name} fails")

        return launch

    engine, _ = build_engine(TALKER, backend=backend_for(TALKER, capture=broken))
    with pytest.raises(RuntimeError, match="decode step of 1 rows fails"):
        engine.start()


def test_stop_ends_open_streams_with_an_error():
    engine, inbox = build_engine(TALKER, engine_config(num_slots=2))
    for name in "abc":
        engine.submit(make_request(name, rows=3, frames=120))
    engine.start()
    inbox.next()
    engine.stop()
    for spoken in inbox.wait_for(*"abc", timeout_s=1).values():
        assert isinstance(spoken.error, EngineFault)
        assert spoken.finish is None
    with pytest.raises(EngineFault, match="stopped"):
        engine.check_health()
    with pytest.raises(EngineFault, match="stopped"):
        engine.submit(make_request("d"))
    engine.stop()


def test_stop_before_start_ends_them_too():
    engine, inbox = build_engine(TALKER)
    engine.submit(make_request("a"))
    engine.stop()
    assert isinstance(inbox.wait_for("a", timeout_s=1)["a"].error, EngineFault)


# ---------------------------------------------------------------- opening
def test_an_engine_opens_from_a_checkpoint_folder():
    inbox, case = Inbox(), golden("custom_voice")["plain_auto_stream"]
    engine = open_talker_engine(
        FOLDERS["custom_voice"],
        config=engine_config(num_slots=2),
        ramp=ChunkRamp(),
        outbox=inbox,
        device="cpu",
    )
    engine.submit(make_request("a", plan=case.plan, frames=40))
    engine.start()
    assert np.array_equal(inbox.wait_for("a")["a"].codes, case.codes)
    engine.stop()


@pytest.mark.parametrize("wrong", [{"dtype": "float16"}, {"device": "cpu:x"}, {"device": "meta"}])
def test_a_device_or_dtype_that_is_not_there_stops_the_start(wrong):
    with pytest.raises((ValueError, RuntimeError)):
        open_talker_engine(
            FOLDERS["custom_voice"],
            config=TalkerEngineConfig(max_positions=64),
            ramp=ChunkRamp(),
            outbox=Inbox(),
            **{"device": "cpu", **wrong},
        )


def test_a_loop_that_hangs_does_not_keep_stop_from_returning(monkeypatch, caplog):
    entered, leave = threading.Event(), threading.Event()

    def hang(step):
        entered.set()
        assert leave.wait(60)

    config = engine_config()
    engine, _ = build_engine(TALKER, config, backend=with_hook(hang, config))
    engine.start()
    engine.submit(make_request("a", frames=3))
    assert entered.wait(60)
    monkeypatch.setattr(threads, "STOP_WITHIN_S", 0.05)
    stopping = threading.Thread(target=engine.stop, daemon=True)
    stopping.start()
    try:
        stopping.join(60)
        assert not stopping.is_alive()
        assert "talker-engine didn't end within 0.05 s" in caplog.text
    finally:
        leave.set()


def test_health_tells_a_loop_that_is_stuck_in_one_turn_from_an_idle_one():
    now = [0.0]
    entered, leave = threading.Event(), threading.Event()

    def stall(step):
        entered.set()
        assert leave.wait(60)

    config = engine_config()
    engine, inbox = build_engine(TALKER, config, backend=with_hook(stall, config), clock=lambda: now[0])
    engine.start()
    try:
        now[0] = 1e6
        engine.check_health()  # idle, however long
        engine.submit(make_request("a", frames=3))
        assert entered.wait(60)
        engine.check_health()
        now[0] += 61
        with pytest.raises(EngineFault, match="in one turn for 61 s"):
            engine.check_health()
        leave.set()
        assert inbox.wait_for("a")["a"].finish == "length"
        engine.check_health()
    finally:
        leave.set()
        engine.stop()
