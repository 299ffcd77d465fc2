"""Chunk sizes: the ramp first, then steady for ever."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.streaming.chunk_ramp import ChunkRamp

ramps = st.builds(
    ChunkRamp, ramp=st.lists(st.integers(1, 50), max_size=6).map(tuple), steady=st.integers(1, 50)
)


def test_first_chunks_follow_the_ramp_then_settle():
    assert list(islice(ChunkRamp().sizes(), 7)) == [1, 3, 8, 16, 25, 25, 25]
    assert list(islice(ChunkRamp((), 4).sizes(), 3)) == [4, 4, 4]


@given(ramp=ramps, index=st.integers(0, 30))
def test_a_chunk_s_size_doesn_t_depend_on_how_it_is_asked_for(ramp, index):
    assert next(islice(ramp.sizes(), index, None)) == ramp.chunk_frames(index)


@given(ramp=ramps)
def test_no_chunk_is_longer_than_announced(ramp):
    assert max(islice(ramp.sizes(), 20)) == ramp.max_frames


@pytest.mark.parametrize(("ramp", "steady"), [((0,), 25), ((1, -3), 25), ((), 0)])
def test_a_chunk_without_frames_is_refused(ramp, steady):
    with pytest.raises(ValueError, match="at least 1 frame"):
        ChunkRamp(ramp, steady)
