import base64
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.adapters import ADAPTERS, BrokenStream, Clip, EventReader, RawReader, SpeechJob

CLIP = Clip("ada", base64.b64encode(b"RIFF").decode(), "What ada says.")


def body(engine, job, **options):
    return json.loads(
        ADAPTERS[engine].body(
            job, options.get("model"), options.get("extra", {}), options.get("events", False)
        )
    )


@pytest.mark.parametrize("engine", ADAPTERS)
def test_every_server_is_asked_for_a_stream_of_the_text(engine):
    sent = body(engine, SpeechJob(0, "Hello.", seed=7, voice="vivian"), model="m")
    assert sent["input"] == "Hello."
    assert sent["stream"] is True
    assert (sent["seed"], sent["voice"], sent["model"]) == (7, "vivian", "m")


def test_dialects_are_those_of_the_servers():
    job = SpeechJob(0, "Hello.")
    raw = {"input": "Hello.", "stream": True, "response_format": "pcm"}
    assert body("ours", job) == body("vllm-omni", job) == {**raw, "stream_format": "audio"}
    assert body("sglang-omni", job) == raw
    assert body("mstar", job) == {**raw, "response_format": "wav"}


def test_ours_is_taken_by_our_own_schema():
    from deployments.schemas import parse_speech_body

    job = SpeechJob(0, "Hello.", seed=7, max_frames=60, voice="vivian", clip=CLIP)
    parsed = parse_speech_body(ADAPTERS["ours"].body(job, "m", {}, events=True))
    assert (parsed.max_new_tokens, parsed.seed, parsed.ref_text) == (60, 7, CLIP.text)
    assert parsed.is_streaming


def test_a_frame_limit_is_refused_where_the_server_takes_none():
    job = SpeechJob(0, "Hello.", max_frames=60)
    assert body("vllm-omni", job)["max_new_tokens"] == 60
    with pytest.raises(ValueError, match="mstar takes no frame limit"):
        body("mstar", job)


def test_a_clip_travels_as_a_data_uri_with_its_text():
    sent = body("vllm-omni", SpeechJob(0, "Hello.", clip=CLIP))
    assert sent["ref_audio"] == "data:audio/wav;base64,UklGRg=="
    assert (sent["ref_text"], sent["task_type"]) == (CLIP.text, "Base")


def test_extra_fields_go_over_everything_and_null_takes_one_out():
    sent = body("ours", SpeechJob(0, "Hello."), extra={"stream_format": None, "temperature": 0})
    assert sent["temperature"] == 0
    assert "stream_format" not in sent


def test_events_are_for_servers_that_tell_frames_by_them():
    assert body("ours", SpeechJob(0, "Hello."), events=True)["stream_format"] == "sse"
    with pytest.raises(ValueError, match="raw audio"):
        body("mstar", SpeechJob(0, "Hello."), events=True)


def cut(data, cuts):
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


cuts = st.lists(st.integers(0, 400), max_size=6)


@given(st.binary(max_size=200), cuts)
def test_a_header_is_dropped_wherever_reads_cut_it(audio, cuts):
    reader = RawReader(skip=44)
    assert b"".join(reader.feed(part) for part in cut(b"h" * 44 + audio, cuts)) == audio
    reader.finish()


def test_a_body_that_ends_inside_its_header_is_broken():
    reader = RawReader(skip=44)
    reader.feed(b"RIFF")
    with pytest.raises(BrokenStream):
        reader.finish()


def event(kind, **fields):
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def delta(audio):
    return event("speech.audio.delta", audio=base64.b64encode(audio).decode())


@given(st.lists(st.binary(max_size=40), max_size=4), cuts)
def test_events_give_their_audio_and_the_frames_they_tell(parts, cuts):
    stream = b"".join(delta(part) for part in parts) + event("speech.audio.done", num_frames=5)
    reader = EventReader()
    assert b"".join(reader.feed(part) for part in cut(stream, cuts)) == b"".join(parts)
    reader.finish()
    assert reader.num_frames == 5


def test_events_without_their_end_are_broken():
    reader = EventReader()
    reader.feed(delta(b"ab"))
    with pytest.raises(BrokenStream, match=r"without speech\.audio\.done"):
        reader.finish()


@pytest.mark.parametrize("stream", [event("speech.audio.error", error={"code": "x"}), b"data: nothing\n\n"])
def test_an_error_event_and_what_is_no_event_are_broken(stream):
    with pytest.raises(BrokenStream):
        EventReader().feed(stream)
