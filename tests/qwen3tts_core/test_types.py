import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.errors import InvalidCodes, InvalidRequest
from qwen3tts_core.types import (
    AudioChunk,
    DrawParams,
    FrameBatch,
    PrefillPlan,
    ReferenceVoice,
    Sampling,
    SpeechRequest,
)

finishes = st.sampled_from([None, "stop", "length"])
PLAN = PrefillPlan(text_ids=(1, 2), codec_ids=(-1, 3), trailing_ids=(4,))


@st.composite
def frame_batches(draw):
    frames, groups = draw(st.integers(0, 30)), draw(st.integers(1, 32))
    codes = draw(st.binary(min_size=2 * frames * groups, max_size=2 * frames * groups))
    return FrameBatch(draw(st.integers(0, 2**32 - 1)), frames, groups, codes, draw(finishes))


@st.composite
def audio_chunks(draw):
    batch = draw(frame_batches())
    return AudioChunk(*batch[:3], draw(st.binary(max_size=200)), batch.codes, batch.finish)


@given(frame_batches())
def test_frames_survive_the_way_as_bytes(batch):
    assert FrameBatch.from_bytes(batch.to_bytes()) == batch


@given(audio_chunks())
def test_audio_survives_the_way_as_bytes(chunk):
    assert AudioChunk.from_bytes(chunk.to_bytes()) == chunk


@given(frame_batches(), st.integers(0, 60))
def test_a_cut_frame_item_is_refused(batch, cut):
    item = batch.to_bytes()
    with pytest.raises(InvalidCodes):
        FrameBatch.from_bytes(item[: max(0, len(item) - 1 - cut)])


@given(audio_chunks(), st.binary(min_size=1, max_size=9))
def test_an_audio_item_with_something_added_or_cut_is_refused(chunk, more):
    item = chunk.to_bytes()
    for wrong in (item + more, item[:-1]):
        with pytest.raises(InvalidCodes):
            AudioChunk.from_bytes(wrong)


@pytest.mark.parametrize("item", [FrameBatch(0, 0, 16, b""), AudioChunk(0, 0, 16, b"", b"")])
def test_an_unknown_end_is_refused(item):
    damaged = bytearray(item.to_bytes())
    damaged[7] = 9  # the last of the header's four first fields
    with pytest.raises(InvalidCodes, match="finishes with 9"):
        type(item).from_bytes(bytes(damaged))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
    ],
)
def test_a_draw_that_makes_no_sense_names_its_field(field, value):
    with pytest.raises(InvalidRequest) as caught:
        DrawParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize("penalty", [0, -1, float("nan"), float("inf")])
def test_a_penalty_that_makes_no_sense_is_refused(penalty):
    with pytest.raises(InvalidRequest) as caught:
        Sampling(repetition_penalty=penalty)
    assert caught.value.param == "repetition_penalty"


@pytest.mark.parametrize("edge", [{"top_k": 0}, {"top_p": 1}, {"temperature": 1e-3}, {"top_p": 1e-6}])
def test_edges_of_the_draw_are_accepted(edge):
    DrawParams(**edge)


def test_a_request_for_no_frames_is_refused():
    with pytest.raises(InvalidRequest) as caught:
        SpeechRequest("id", PLAN, Sampling(), seed=1, max_frames=0)
    assert caught.value.param == "max_new_tokens"


def test_a_plan_that_needs_a_voice_needs_a_voice():
    needy = PrefillPlan(text_ids=(1,), codec_ids=(2,), trailing_ids=(), speaker_row=0)
    with pytest.raises(AssertionError):
        SpeechRequest("id", needy, Sampling(), seed=1, max_frames=5)
    SpeechRequest("id", needy, Sampling(), seed=1, max_frames=5, reference=ReferenceVoice("key", b""))


def test_a_plan_has_one_codec_id_per_row():
    with pytest.raises(AssertionError):
        PrefillPlan(text_ids=(1, 2), codec_ids=(1,), trailing_ids=())
    assert PLAN.num_rows == 2
