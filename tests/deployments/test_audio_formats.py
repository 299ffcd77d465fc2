import base64
import io
import json
import wave

from hypothesis import given
from hypothesis import strategies as st

from deployments.audio_formats import header_for, sse_delta, sse_event


@given(
    st.binary(max_size=200).map(lambda raw: raw[: len(raw) // 2 * 2]), st.sampled_from([8000, 24000, 48000])
)
def test_a_whole_wav_opens_with_the_standard_library(pcm, rate):
    with wave.open(io.BytesIO(header_for("wav", rate, len(pcm)) + pcm)) as reader:
        assert (reader.getnchannels(), reader.getsampwidth(), reader.getframerate()) == (1, 2, rate)
        assert reader.getnframes() == len(pcm) // 2
        assert reader.readframes(reader.getnframes()) == pcm


def test_a_streamed_wav_differs_in_its_sizes_alone():
    whole, streamed = header_for("wav", 24000, 3840), header_for("wav", 24000, None)
    assert len(whole) == len(streamed) == 44
    assert streamed[4:8] == streamed[40:44] == b"\xff" * 4
    assert streamed[:4] + streamed[8:40] == whole[:4] + whole[8:40]


def test_bare_pcm_has_no_header():
    assert header_for("pcm", 24000, 5) == header_for("pcm", 24000, None) == b""


@given(st.binary(max_size=100))
def test_a_delta_carries_its_bytes_in_one_event(audio):
    lines = sse_delta(audio).decode().split("\n")
    assert lines[0] == "event: speech.audio.delta"
    assert lines[2:] == ["", ""]
    data = json.loads(lines[1].removeprefix("data: "))
    assert data["type"] == "speech.audio.delta"
    assert base64.b64decode(data["audio"], validate=True) == audio


def test_a_newline_in_a_field_stays_inside_its_event():
    assert sse_event("speech.audio.error", {"error": "a\n\nb"}).count(b"\n") == 3
