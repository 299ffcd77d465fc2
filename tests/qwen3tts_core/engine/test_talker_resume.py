"""A stream that goes on in another engine says what it would have said: at any frame, in any company."""

import functools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3tts_core.errors import InvalidCodes, Overloaded
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.types import DrawParams, Resume, Sampling
from tests.qwen3tts_core.request_kit import make_request
from tests.qwen3tts_core.talker_kit import (
    RecordingOps,
    build_engine,
    checkpoint_talker,
    engine_config,
    golden,
    resumed,
    small_talker,
    speak,
    talking,
)

TALKER = small_talker()
STRONG = Sampling(DrawParams(), DrawParams(), repetition_penalty=1.6)  # what was drawn matters a lot
MODES = {"prefilled": {}, "stepped through": {"deterministic": True}}

each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def config_of(mode, **changes):
    return engine_config(**mode, **changes)


@functools.cache
def alone(request, is_deterministic=False):
    return speak(TALKER, [request], engine_config(deterministic=is_deterministic))[request.request_id]


def undisturbed(request, mode):
    return alone(request, bool(mode))


def assert_goes_on(rest, whole, num_chunks):
    """Not a frame lost, repeated or changed; cut and ended as if nothing had happened."""
    assert rest.error is None
    assert rest.batches == whole.batches[num_chunks:]


def chunks_to_resume_after(whole):
    """All but the whole: then its end has been sent, too."""
    return range(1, len(whole.batches))


# ---------------------------------------------------------------- any frame
@each_mode
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(2, 40),
    trailing=st.integers(0, 40),
    frames=st.integers(2, 40),
    seed=st.integers(-(2**63), 2**64),
    piece=st.integers(0, 3),
    cut=st.integers(1, 39),
)
def test_any_frame_of_any_request(mode, rows, trailing, frames, seed, piece, cut):
    request = make_request(
        "r", rows=rows, trailing=trailing, frames=frames, seed=seed, piece=piece, sampling=STRONG
    )
    one_by_one = ChunkRamp((), 1)
    whole = speak(TALKER, [request], config_of(mode), ramp=one_by_one)["r"]
    cut = min(cut, len(whole.batches) - 1)
    rest = speak(TALKER, [resumed(request, whole, cut)], config_of(mode), ramp=one_by_one)["r"]
    assert_goes_on(rest, whole, cut)


@each_mode
@pytest.mark.parametrize("trailing", [1, 7, 30])
def test_the_chunk_ramp_goes_on_where_it_was(mode, trailing):
    request = make_request("r", rows=9, trailing=trailing, frames=90, seed=3, sampling=STRONG)
    whole = undisturbed(request, mode)
    assert whole.sizes[:5] == [1, 3, 8, 16, 25]
    for num_chunks in chunks_to_resume_after(whole):
        rest = speak(TALKER, [resumed(request, whole, num_chunks)], config_of(mode))["r"]
        assert_goes_on(rest, whole, num_chunks)


@each_mode
def test_the_end_of_speech_is_where_it_was(mode):
    """plain_auto_stream draws EOS as its tenth sample: chunks of 1, 3 and 5 frames."""
    talker, case = checkpoint_talker("custom_voice"), golden("custom_voice")["plain_auto_stream"]
    request = make_request("r", plan=case.plan, frames=40)
    for ramp, last in ((ChunkRamp(), 2), (ChunkRamp((), 1), 9), (ChunkRamp((), 3), 3)):
        whole = speak(talker, [request], config_of(mode), ramp=ramp)["r"]
        assert (len(whole.codes), whole.finish) == (9, "stop")
        for num_chunks in range(1, last + 1):
            rest = speak(talker, [resumed(request, whole, num_chunks)], config_of(mode), ramp=ramp)["r"]
            assert_goes_on(rest, whole, num_chunks)


@each_mode
def test_a_stream_may_be_broken_again_and_again(mode):
    request = make_request("r", rows=5, frames=70, seed=8, sampling=Sampling())
    whole, heard = undisturbed(request, mode), []
    while len(heard) < len(whole.batches):
        after = replace(request, resume=None) if not heard else resumed(request, whole, len(heard))
        heard.append(speak(TALKER, [after], config_of(mode))["r"].batches[0])
    assert heard == whole.batches


# ---------------------------------------------------------------- company
@each_mode
def test_streams_resumed_together_and_beside_others(mode):
    """Of several lengths, in one packed prefill, more than there are slots; each as if alone."""
    rng = random.Random(4)
    requests = [
        make_request(
            f"r{i}", rows=rng.randint(2, 50), trailing=9 * i, frames=40 + i, seed=i, sampling=Sampling()
        )
        for i in range(8)
    ]
    wholes = {request.request_id: undisturbed(request, mode) for request in requests}
    cuts = {request.request_id: rng.randint(0, 4) for request in requests}
    again = [
        resumed(request, wholes[request.request_id], cut) if (cut := cuts[request.request_id]) else request
        for request in requests
    ]
    for config in (config_of(mode), config_of(mode, num_slots=3)):
        for request_id, rest in speak(TALKER, again, config).items():
            assert_goes_on(rest, wholes[request_id], cuts[request_id])


@each_mode
def test_a_shortage_of_pages_makes_it_wait_and_nothing_worse(mode):
    config = config_of(mode, num_pages=32, num_slots=4)
    requests = [
        make_request(f"r{i}", rows=8, frames=70, seed=i, sampling=Sampling()) for i in range(4)
    ]  # of 20 pages: one at a time
    wholes = {request.request_id: undisturbed(request, mode) for request in requests}
    again = [resumed(request, wholes[request.request_id], 4) for request in requests]
    for request_id, rest in speak(TALKER, again, config).items():
        assert_goes_on(rest, wholes[request_id], 4)


def test_listeners_go_before_those_who_have_heard_nothing_yet():
    config = engine_config(num_slots=1, max_queued=4)
    request = make_request("resumed", rows=5, frames=30, seed=1)
    new = [make_request(f"new {i}", frames=2, seed=i) for i in range(2)]
    engine, inbox = build_engine(TALKER, config)
    also = replace(resumed(request, alone(request), 2), request_id="also")
    for each in (*new, resumed(request, alone(request), 3), also):
        engine.submit(each)
    engine.submit(make_request("new 2", frames=2))
    with pytest.raises(Overloaded):
        engine.submit(make_request("new 3"))
    engine.start()
    ends = []
    while len(ends) < 5:
        request_id, item = inbox.next()
        if item.finish:
            ends.append(request_id)
    engine.stop()
    assert ends == ["resumed", "also", "new 0", "new 1", "new 2"]


# ---------------------------------------------------------------- bytes
def test_deterministic_mode_goes_on_with_the_same_bits():
    """All logits of all groups after the break: alone, and among others."""

    def logits_of(*requests):
        ops = RecordingOps(trim_context=False)
        talker = checkpoint_talker("custom_voice_large", ops=ops)
        spoken = speak(talker, requests, engine_config(deterministic=True))["target"]
        return spoken, list(ops.logits[7])

    target = make_request("target", rows=21, frames=20, seed=7, sampling=Sampling())
    others = [make_request(f"o{i}", rows=9 + i, frames=7 + i, seed=100 + i) for i in range(6)]
    whole, expected = logits_of(target)
    for company in ([], others):
        rest, made = logits_of(*company, resumed(target, whole, 2))
        assert_goes_on(rest, whole, 2)
        for old, new in list(zip(expected, made, strict=False))[4 * 16 : 20 * 16]:
            assert np.array_equal(old, new)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("codes", "cuts", "says"),
    [
        (np.zeros((3, 4), "<i2"), (1, 1), "2 frames announced, 3 sent"),
        (np.zeros((2, 3), "<i2"), (1, 1), "code groups"),
        (np.full((2, 4), 64, "<i2"), (1, 1), r"in \[0, 64\)"),
        (np.full((2, 4), -1, "<i2"), (1, 1), r"in \[0, 64\)"),
        (np.zeros((9, 4), "<i2"), (1, 8), "the request ends at 9"),
    ],
)
def test_frames_that_can_t_be_resumed_after_are_refused_and_hold_nothing(codes, cuts, says):
    request = make_request("bad", frames=9, resume=Resume(codes.tobytes(), cuts))
    with talking(TALKER) as (engine, inbox):

        def go_on():
            engine.submit(request)
            raise inbox.wait_for("bad")["bad"].error

        with pytest.raises(InvalidCodes, match=says):
            go_on()
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_pages == engine_config().num_pages
