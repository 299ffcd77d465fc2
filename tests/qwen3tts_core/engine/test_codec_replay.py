"""A codec row made again from codes is the row that was lost: whatever was heard of it, and in whatever company."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3tts_core.config import CodecEngineConfig
from qwen3tts_core.engine.codec_engine import CodecEngine
from qwen3tts_core.engine.codec_rows import Seams
from qwen3tts_core.ops.reference import HostTransfer, run_eagerly
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from tests.qwen3tts_core.codec_kit import (
    MINI,
    ListOutbox,
    batch_of,
    mini_decoder,
    random_codes,
    reference,
)

SPF = MINI.samples_per_frame
DECODER = mini_decoder()
MODES = ["incremental", "window"]

each_mode = pytest.mark.parametrize("mode", MODES)
lengths = st.lists(st.integers(1, 12), min_size=2, max_size=8)


def make_engine(**config):
    config = {"num_rows": 4, "frame_buckets": (1, 4, 9), "left_context_frames": 7} | config
    seams = Seams(run_eagerly, HostTransfer())
    return CodecEngine(DECODER, CodecEngineConfig(**config), ListOutbox(), seams, clock=lambda: 0.0)


def run(engine):
    engine.step()
    while engine.stats().num_waiting:
        engine.step()


def speak(codes, cuts, *, num_replayed=0, keeps_cuts=False, voice=None, others=0, **config):
    """[samples of each chunk], of those after the replayed ones. others: streams beside it, replayed too."""
    engine = make_engine(**config)
    firsts = [0, *accumulate(cuts)]
    for number in range(others):
        engine.open(f"other {number}")
        engine.replay(f"other {number}", random_codes(5 + 3 * number, seed=number).tobytes())
    engine.open("r", voice)
    if num_replayed:
        old = codes[: firsts[num_replayed]].tobytes()
        engine.replay("r", old, cuts[:num_replayed] if keeps_cuts else ())
    for first, num_frames in list(zip(firsts, cuts, strict=False))[num_replayed:]:
        engine.submit("r", batch_of(codes, first, num_frames))
    run(engine)
    chunks = engine._outbox.items["r"]
    assert [chunk.first_frame for chunk in chunks] == firsts[num_replayed:-1]
    assert [len(chunk.pcm) for chunk in chunks] == [2 * SPF * n for n in cuts[num_replayed:]]
    return [np.frombuffer(chunk.pcm, "<i2").astype(int) for chunk in chunks]


def assert_goes_on(rest, whole, num_replayed, tolerance):
    for found, expected in zip(rest, whole[num_replayed:], strict=True):
        assert np.abs(found - expected).max(initial=0) <= tolerance


@each_mode
@settings(max_examples=40, deadline=None)
@given(cuts=lengths, at=st.integers(1, 7), seed=st.integers(0, 99), others=st.integers(0, 2), data=st.data())
def test_at_any_cut_the_rest_is_the_same_to_the_sample(mode, cuts, at, seed, others, data):
    """Replayed in big pieces; float32 sums in another order may flip a sample's last bit, and no more."""
    codes, at = random_codes(sum(cuts), seed=seed), min(at, len(cuts) - 1)
    voice = reference("v", random_codes(data.draw(st.integers(1, 15)), seed=7)) if seed % 2 else None
    whole = speak(codes, cuts, voice=voice, mode=mode)
    rest = speak(codes, cuts, num_replayed=at, voice=voice, others=others, mode=mode)
    assert_goes_on(rest, whole, at, tolerance=1)


@each_mode
@settings(max_examples=25, deadline=None)
@given(cuts=lengths, at=st.integers(1, 7), seed=st.integers(0, 99), others=st.integers(0, 2))
def test_a_deterministic_engine_that_keeps_the_cuts_goes_on_with_the_same_bytes(mode, cuts, at, seed, others):
    codes, at = random_codes(sum(cuts), seed=seed), min(at, len(cuts) - 1)
    config = {"mode": mode, "deterministic": True, "keeps_cuts": True}
    whole = speak(codes, cuts, **config)
    assert_goes_on(speak(codes, cuts, num_replayed=at, others=others, **config), whole, at, tolerance=0)


@each_mode
def test_the_published_ramp_broken_at_every_chunk(mode):
    cuts = [ChunkRamp().chunk_frames(index) for index in range(7)]
    codes = random_codes(sum(cuts), seed=3)
    whole = speak(codes, cuts, mode=mode)
    for at in range(1, len(cuts)):
        assert_goes_on(speak(codes, cuts, num_replayed=at, mode=mode), whole, at, tolerance=1)


def test_old_frames_are_decoded_in_the_largest_pieces_there_are():
    engine, codes = make_engine(), random_codes(60)
    engine.open("r")
    engine.replay("r", codes[:54].tobytes(), ())
    run(engine)
    assert engine.stats().batches == 6
    assert engine._outbox.items == {}


def test_window_mode_decodes_no_more_of_the_past_than_it_looks_back():
    engine, codes = make_engine(mode="window"), random_codes(60)
    engine.open("r")
    engine.replay("r", codes[:54].tobytes())
    run(engine)
    assert engine.stats().batches == 1
