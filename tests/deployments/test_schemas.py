import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.schemas import SpeechBody, accepted_fields, parse_speech_body
from qwen3tts_core.errors import InvalidRequest


def parse(**fields):
    return parse_speech_body(json.dumps({"input": "Hi.", **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"stream": "false"}, "stream", 'must be true or false, got "false"'),
        ({"stream": 0}, "stream", "must be true or false, got 0"),
        ({"seed": True}, "seed", "must be an integer, got true"),
        ({"seed": "1"}, "seed", 'must be an integer, got "1"'),
        ({"seed": 1.5}, "seed", "got 1.5"),
        ({"seed": 2**63}, "seed", "at most 9223372036854775807, got"),
        ({"seed": -(2**63) - 1}, "seed", "at least -9223372036854775808 and at most"),
        ({"temperature": "0.9"}, "temperature", 'must be a number, got "0.9"'),
        ({"temperature": True}, "temperature", "must be a number, got true"),
        ({"temperature": -0.1}, "temperature", "at least 0 and at most 10, got -0.1"),
        ({"top_k": 1.5}, "top_k", "an integer"),
        ({"top_k": -1}, "top_k", "at least 0 and at most 1000000"),
        ({"top_p": 0}, "top_p", "above 0 and at most 1, got 0"),
        ({"top_p": 1.1}, "top_p", "above 0 and at most 1, got 1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "at least 0.01 and at most 100"),
        ({"subtalker_temperature": "hot"}, "subtalker_temperature", "must be a number"),
        ({"subtalker_dosample": 1}, "subtalker_dosample", "must be true or false"),
        ({"max_new_tokens": 0}, "max_new_tokens", "at least 1, got 0"),
        ({"max_new_tokens": 12.0}, "max_new_tokens", "an integer"),
        ({"input": 5}, "input", "must be a string, got 5"),
        ({"input": None}, "input", "must be a string, got null"),
        ({"voice": ["vivian"]}, "voice", "must be a string"),
        ({"language": 7}, "language", "must be a string"),
        ({"response_format": "m4a"}, "response_format", '"opus", "aac" or "flac", got "m4a"'),
        ({"response_format": "WAV"}, "response_format", '"wav", "pcm", "mp3"'),
        ({"sample_rate": 44_100}, "sample_rate", "8000, 16000, 24000 or 48000, got 44100"),
        ({"sample_rate": "24000"}, "sample_rate", '8000, 16000, 24000 or 48000, got "24000"'),
        ({"speed": 0.2}, "speed", "at least 0.25 and at most 4, got 0.2"),
        ({"speed": 4.5}, "speed", "at least 0.25 and at most 4, got 4.5"),
        ({"speed": "fast"}, "speed", 'must be a number, got "fast"'),
        ({"speed": True}, "speed", "must be a number, got true"),
        ({"stream_format": "json"}, "stream_format", '"audio" or "sse"'),
        ({"stream": False, "stream_format": "sse"}, "stream_format", "needs stream true"),
        ({"voice": "vivian", "speaker": "eric"}, "speaker", "differ"),
        ({"pitch": 1.0}, "pitch", 'unknown field "pitch"; accepted: model, input, voice'),
        ({"Input": "Hi."}, "Input", 'unknown field "Input"'),
    ],
)
def test_a_refusal_names_the_field_and_what_it_accepts(fields, param, words):
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"not json", b'{"input": "a"', b"[" * 5000, b'{"input": "\xff"}', b'{"input": "\\ud800"}'],
)
def test_malformed_json_is_refused_as_such(raw):
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        parse_speech_body(raw)


def test_what_a_refusal_quotes_is_cut_short():
    for fields in ({"x" * 5_000: 1}, {"voice": "y" * 5_000}, {"stop": "z" * 5_000}, {"seed": [1] * 5_000}):
        with pytest.raises(InvalidRequest) as caught:
            parse(**fields)
        assert len(caught.value.message) < 600
        assert len(caught.value.param) <= 60


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"input": "a", "input": "b"}', "input"),
        (b'{"input": "a", "voice": null, "voice": null}', "voice"),
        (b'{"input": "a", "seed": 1, "\\u0073eed": 2}', "seed"),
        (
            b'{"input": "a", "ref_audio": "%s", "ref_audio": "%s"}' % (b"A" * 70_000, b"A" * 70_000),
            "ref_audio",
        ),
    ],
)
def test_a_key_that_is_there_twice_is_refused(raw, param):
    with pytest.raises(InvalidRequest, match="twice") as caught:
        parse_speech_body(raw)
    assert caught.value.param == param


def test_a_clip_is_no_reason_to_miss_or_to_find_twins():
    clip = b"A" * 70_000
    assert parse_speech_body(b'{"input": "a", "ref_audio": "%s"}' % clip).ref_audio == clip.decode()
    with pytest.raises(InvalidRequest, match="twice"):
        parse_speech_body(b'{"input": "a", "ref_audio": "%s", "input": "a"}' % clip)


@pytest.mark.parametrize("raw", [b"null", b"[]", b'"Hi."', b"7"])
def test_a_body_that_is_no_object_is_refused(raw):
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        parse_speech_body(raw)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(number):
    with pytest.raises(InvalidRequest):
        parse_speech_body(b'{"input": "Hi.", "temperature": %s}' % number.encode())


def test_input_is_the_only_required_field():
    with pytest.raises(InvalidRequest, match="input is required"):
        parse_speech_body(b"{}")
    assert parse().input == "Hi."


def test_null_is_the_same_as_absent():
    nulls = dict.fromkeys(name for name in accepted_fields() if name != "input")
    assert parse(**nulls) == parse()


def test_integers_are_numbers():
    assert parse(temperature=1, top_p=1).temperature == 1.0


def test_the_alias_may_repeat_the_voice():
    assert parse(voice="vivian", speaker="vivian").voice == "vivian"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"stream": True}, True),
        ({"stream": False, "stream_format": "audio"}, False),
        ({"stream_format": "sse"}, True),
        ({"stream_format": "audio"}, False),
    ],
)
def test_sse_implies_a_stream_and_nothing_else_does(fields, expected):
    assert parse(**fields).is_streaming is expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3),
)


def refusal_of(raw):
    try:
        parse_speech_body(raw)
    except InvalidRequest as refusal:
        return refusal
    return None


@given(st.dictionaries(st.sampled_from([*SpeechBody.model_fields, "extra"]), JSON, max_size=6))
def test_any_json_object_is_accepted_or_refused_by_name(fields):
    refusal = refusal_of(json.dumps(fields).encode())
    assert refusal is None or refusal.message
    assert refusal is None or refusal.param in {None, "extra", *SpeechBody.model_fields}


@given(st.binary(max_size=40))
def test_any_bytes_are_accepted_or_refused(raw):
    refusal = refusal_of(raw)
    assert refusal is None or refusal.message
