from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.errors import InvalidRequest, TextTooLong
from qwen3tts_core.text.limits import default_frame_limit, frame_limit, frame_room, text_token_limit

SEED0 = Path(__file__).parents[2] / "parity" / "golden" / "seed0"
config = CheckpointConfig.from_checkpoint(SEED0 / "custom_voice_large")
base = CheckpointConfig.from_checkpoint(SEED0 / "base")


@pytest.mark.parametrize(
    ("tokens", "frames"),
    [(1, 192), (16, 192), (17, 204), (100, 1200), (682, 8184), (683, 8192), (5000, 8192)],
)
def test_the_default_grows_with_the_text_between_floor_and_the_checkpoints_own(tokens, frames):
    """known_faults rows 3 and 40: a runaway ends, and a floor and a generous factor leave room for slow speech."""
    assert config.max_new_tokens == 8192
    assert default_frame_limit(config, tokens) == frames


def test_a_checkpoint_with_a_small_limit_keeps_it():
    assert default_frame_limit(replace(config, max_new_tokens=50), 1000) == 50


@pytest.mark.parametrize("asked", [1, 7, 192, 3000])
def test_an_explicit_limit_is_used_as_given(asked):
    assert frame_limit(config, 1, 20, 4096, asked) == asked


@pytest.mark.parametrize("asked", [0, -1, 4077, 10**9])
def test_an_explicit_limit_that_cannot_be_kept_is_refused(asked):
    with pytest.raises(InvalidRequest, match="4,076") as caught:
        frame_limit(config, 1, 20, 4096, asked)
    assert caught.value.param == "max_new_tokens"


def test_the_longest_text_is_taken_and_one_token_more_is_not():
    limit = text_token_limit(config, 4096)
    assert limit == 819
    assert frame_limit(config, limit, 1, 4096) == 4095
    with pytest.raises(TextTooLong) as caught:
        frame_limit(config, limit + 1, 1, 4096)
    assert (caught.value.length, caught.value.limit, caught.value.param) == (820, 819, "input")


def test_the_talkers_own_positions_bound_a_generous_engine():
    short = replace(config, talker=replace(config.talker, max_positions=100))
    assert text_token_limit(short, 4096) == 20
    with pytest.raises(InvalidRequest):
        frame_limit(short, 1, 10, 4096, 91)


@pytest.mark.parametrize(("checkpoint", "field"), [(config, "instructions"), (base, "ref_audio")])
def test_a_prompt_filled_by_something_else_than_the_text_says_so(checkpoint, field):
    with pytest.raises(TextTooLong) as caught:
        frame_limit(checkpoint, 10, 4090, 4096)
    assert caught.value.param == field
    assert caught.value.length == 4080
    assert frame_limit(checkpoint, 10, 10 + caught.value.limit, 4096) >= 40


@given(
    tokens=st.integers(1, 900),
    others=st.integers(0, 5000),
    max_positions=st.integers(1, 9000),
    asked=st.none() | st.integers(-5, 10_000),
)
def test_an_accepted_request_fits_and_has_room_to_speak(tokens, others, max_positions, asked):
    try:
        frames = frame_limit(config, tokens, tokens + others, max_positions, asked)
    except InvalidRequest:
        return
    assert 1 <= frames <= max_positions - tokens - others
    assert frames == asked if asked is not None else frames >= 4 * tokens


def test_the_room_behind_a_prompt_is_what_the_smaller_of_engine_and_talker_leaves():
    assert frame_room(config, 20, 4096) == 4076
    short = replace(config, talker=replace(config.talker, max_positions=100))
    assert frame_room(short, 20, 4096) == 80
    assert frame_limit(config, 1, 20, 4096, frame_room(config, 20, 4096)) == 4076
