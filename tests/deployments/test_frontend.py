from pathlib import Path

import pytest

from deployments.frontend import Frontend
from deployments.schemas import SpeechBody
from qwen3tts_core.errors import InvalidRequest, TextTooLong, UnknownLanguage, UnknownVoice
from qwen3tts_core.types import NO_ID

TINY = Path(__file__).parents[2] / "checkpoints" / "tiny"


@pytest.fixture(scope="module")
def frontend():
    return Frontend.from_checkpoint(TINY, model_name="tiny", max_positions=4096)


def prepare(frontend, **fields):
    return frontend.prepare(SpeechBody(**{"input": "Hello there.", **fields}))


def test_the_default_voice_is_the_checkpoints_first(frontend):
    assert frontend.default_voice == frontend.voices[0]
    named = prepare(frontend, voice=frontend.default_voice)
    assert prepare(frontend).request.plan == named.request.plan
    assert prepare(frontend).voice == frontend.default_voice


def test_voice_alias_and_case_mean_the_same_prompt(frontend):
    plans = {
        prepare(frontend, **fields).request.plan
        for fields in ({"voice": "vivian"}, {"speaker": "vivian"}, {"voice": "VIVIAN"})
    }
    assert len(plans) == 1
    assert prepare(frontend, voice="serena").request.plan not in plans


def test_the_text_layout_follows_non_streaming_mode(frontend):
    full, streaming = (prepare(frontend, non_streaming_mode=mode).request.plan for mode in (True, False))
    assert prepare(frontend).request.plan == full  # the reference's default for CustomVoice
    assert len(full.trailing_ids) == 1
    assert len(streaming.trailing_ids) > 1
    assert streaming.num_rows < full.num_rows
    assert NO_ID not in full.text_ids


def test_sampling_is_the_checkpoints_own_unless_a_field_says_otherwise(frontend):
    default = frontend.config.sampling
    assert prepare(frontend).request.sampling == default
    changed = prepare(frontend, top_k=7, subtalker_top_p=0.5, repetition_penalty=1.0).request.sampling
    assert changed.talker.top_k == 7
    assert changed.talker.temperature == default.talker.temperature
    assert changed.subtalker.top_p == 0.5
    assert changed.subtalker.top_k == default.subtalker.top_k
    assert changed.repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("prefix", "sample", "stage"),
    [("", "do_sample", "talker"), ("subtalker_", "subtalker_dosample", "subtalker")],
)
def test_temperature_zero_is_greedy_for_its_stage_alone(frontend, prefix, sample, stage):
    sampling = prepare(frontend, **{f"{prefix}temperature": 0.0, sample: True}).request.sampling
    stages = {"talker": sampling.talker, "subtalker": sampling.subtalker}
    assert not stages.pop(stage).do_sample
    assert all(other.do_sample for other in stages.values())


def test_a_temperature_that_would_overflow_is_refused(frontend):
    with pytest.raises(InvalidRequest) as caught:
        prepare(frontend, subtalker_temperature=1e-30)
    assert caught.value.param == "subtalker_temperature"


def test_a_seed_is_kept_and_an_absent_one_is_drawn_anew(frontend):
    assert prepare(frontend, seed=-5).request.seed == -5
    drawn = {prepare(frontend).request.seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_request_ids_are_never_shared(frontend):
    assert len({prepare(frontend, seed=1).request.request_id for _ in range(50)}) == 50


def test_the_frame_limit_is_the_callers_or_grows_with_the_text(frontend):
    assert prepare(frontend, max_new_tokens=5).request.max_frames == 5
    short, long = prepare(frontend), prepare(frontend, input="one two three four five " * 20)
    assert short.request.max_frames < long.request.max_frames <= frontend.config.max_new_tokens
    assert short.num_text_tokens < long.num_text_tokens


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"voice": "nope"}, UnknownVoice, "voice"),
        ({"speaker": "nope"}, UnknownVoice, "voice"),
        ({"language": "klingon"}, UnknownLanguage, "language"),
        ({"language": "beijing_dialect"}, UnknownLanguage, "language"),
        ({"input": ""}, InvalidRequest, "input"),
        ({"input": " \n\t "}, InvalidRequest, "input"),
        ({"instructions": "Whisper."}, InvalidRequest, "instructions"),  # a 0.6B checkpoint
        ({"input": "word " * 5000}, TextTooLong, "input"),
        ({"max_new_tokens": 10**9}, InvalidRequest, "max_new_tokens"),
    ],
)
def test_what_the_checkpoint_does_not_take_is_refused_by_name(frontend, fields, kind, param):
    with pytest.raises(kind) as caught:
        prepare(frontend, **fields)
    assert caught.value.param == param


def test_unknown_names_come_with_the_accepted_ones(frontend):
    with pytest.raises(UnknownVoice, match="vivian"):
        prepare(frontend, voice="nope")
    with pytest.raises(UnknownLanguage, match=r"Auto.*english"):
        prepare(frontend, language="klingon")


def test_an_empty_name_is_told_the_accepted_ones(frontend):
    for fields, kind, accepted in [
        ({"voice": ""}, UnknownVoice, "vivian"), ({"speaker": ""}, UnknownVoice, "vivian"), ({"language": ""}, UnknownLanguage, "Auto"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=f"accepted: .*{accepted}"):
            prepare(frontend, **fields)


def test_pieces_without_anything_to_say_are_left_out(frontend):
    prepared = prepare(frontend, input="One word. " * 60 + "\u200b" * 2_000 + " And the end.")
    assert len(prepared.requests) > 1
    assert [request.piece for request in prepared.requests] == list(range(len(prepared.requests)))
