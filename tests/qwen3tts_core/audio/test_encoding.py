"""Every format, whole and streamed, read by decoders that know nothing of the encoder.

Rows are those of the list of known faults in other servers: 21 a header in every chunk, 22 wrong WAV
sizes, 23 an encoder that isn't flushed, 25 a speed that is ignored or moves the pitch.
"""

import gc
import io
import sys
import threading
import wave

import numpy as np
import pytest
from av.container import OutputContainer
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3tts_core.audio import compressed
from qwen3tts_core.audio.encoding import (
    MEDIA_TYPES,
    SAMPLE_RATES_HZ,
    is_plain,
    missing_formats,
    open_encoder,
)
from qwen3tts_core.errors import EncoderUnavailable, InvalidRequest, StreamCancelled
from qwen3tts_core.streaming.pcm import wav_file, wav_header
from tests.outside_decoder import SOURCE_RATE_HZ, decode, decode_with_libsndfile, peak_hz, tone

FORMATS = list(MEDIA_TYPES)
LOSSLESS = ["wav", "pcm", "flac"]
MAGIC = {"wav": b"RIFF", "flac": b"fLaC", "opus": b"OggS", "aac": b"\xff\xf1", "mp3": b"\xff"}
CHUNKS = [1920 * n for n in (1, 3, 8, 16, 25)]


def cut(pcm, sizes):
    """Pieces of that many samples, the last size repeated."""
    pieces, at, sizes = [], 0, list(sizes)
    while at < len(pcm):
        size = 2 * (sizes.pop(0) if len(sizes) > 1 else sizes[0])
        pieces.append(pcm[at : at + size])
        at += size
    return pieces


def encode(audio_format, pcm, rate=None, speed=1.0, streaming=True, sizes=CHUNKS):
    """What each call gave, the last by `finish`."""
    encoder = open_encoder(audio_format, SOURCE_RATE_HZ, rate, speed, is_streaming=streaming)
    parts = [encoder.feed(piece) for piece in cut(pcm, sizes)]
    parts.append(encoder.finish())
    encoder.close()
    return parts


def samples_of(audio_format, data, folder, rate=SOURCE_RATE_HZ):
    if audio_format == "pcm":
        return np.frombuffer(data, "<i2"), rate
    return decode(data, folder)


def allowed_surplus(audio_format, rate, streaming):
    """(least, most) samples more than were put in: compressed.py's table, at the container's rate."""
    frame = {"mp3": 1152 if rate == 48_000 else 576, "aac": 1024}.get(audio_format, 0)
    delay = 1024 if audio_format == "aac" else 0
    return delay - 1, delay + frame + 1


# ---------------------------------------------------------------- row 23: nothing lost, nothing made up
@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("rate", SAMPLE_RATES_HZ)
@pytest.mark.parametrize("audio_format", FORMATS)
def test_row_23_every_format_lasts_as_long_as_its_samples(audio_format, rate, streaming, tmp_path):
    num_in = 37 * 1920 + 713  # 2.99 s; no multiple of any codec's frame
    data = b"".join(encode(audio_format, tone(num_in), rate, streaming=streaming))
    samples, told_rate = samples_of(audio_format, data, tmp_path, rate)
    assert told_rate == (48_000 if audio_format == "opus" else rate)  # every Opus decoder plays at 48 kHz
    surplus = len(samples) - num_in * told_rate / SOURCE_RATE_HZ
    least, most = allowed_surplus(audio_format, rate, streaming)
    assert least - 2 <= surplus <= most + 2  # 2: a sample of the lower rate is several of Opus's 48 kHz
    assert peak_hz(samples, told_rate) == pytest.approx(440, abs=1)
    loud = np.abs(samples.astype(np.int32)) > 3_000
    end = num_in * told_rate / SOURCE_RATE_HZ + (least + 1)
    assert loud.nonzero()[0][-1] > end - 0.003 * told_rate, "the last milliseconds are missing"


@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("audio_format", ["wav", "flac", "mp3", "opus"])
def test_libsndfile_reads_them_too(audio_format, streaming):
    num_in = 72_037
    data = b"".join(encode(audio_format, tone(num_in), streaming=streaming))
    samples, rate = decode_with_libsndfile(data)
    delay = 1_105 if audio_format == "mp3" and streaming else 0  # mpg123 doesn't skip where no length is told
    assert 0 <= len(samples) - num_in - delay <= (576 if audio_format == "mp3" else 0)
    assert rate == SOURCE_RATE_HZ
    assert peak_hz(samples, rate) == pytest.approx(440, abs=1)


@pytest.mark.parametrize("rate", SAMPLE_RATES_HZ)
def test_opus_tells_the_rate_that_was_asked_for(rate):
    data = b"".join(encode("opus", tone(9_600), rate))
    head = data.index(b"OpusHead")
    assert int.from_bytes(data[head + 12 : head + 16], "little") == rate


@pytest.mark.parametrize("num_samples", [1, 479, 576, 1_151, 1_920, 17_280])
@pytest.mark.parametrize("audio_format", ["mp3", "opus", "aac", "flac"])
def test_row_23_a_short_stream_is_whole_as_well(audio_format, num_samples, tmp_path):
    samples, rate = decode(b"".join(encode(audio_format, tone(num_samples))), tmp_path)
    surplus = len(samples) - num_samples * rate / SOURCE_RATE_HZ
    least, most = allowed_surplus(audio_format, SOURCE_RATE_HZ, True)
    assert least <= surplus <= most


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("audio_format", FORMATS)
def test_no_samples_are_no_error(audio_format, streaming):
    data = b"".join(encode(audio_format, b"", streaming=streaming))
    assert data.startswith(MAGIC.get(audio_format, b"") if audio_format not in ("aac", "mp3") else b"")


# ---------------------------------------------------------------- row 25: speed
@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("speed", [0.25, 0.5, 2, 4])
@pytest.mark.parametrize("audio_format", FORMATS)
def test_row_25_speed_changes_the_duration_and_keeps_the_pitch(audio_format, speed, streaming, tmp_path):
    num_in = 48_000 + 713
    data = b"".join(encode(audio_format, tone(num_in), speed=speed, streaming=streaming))
    samples, rate = samples_of(audio_format, data, tmp_path)
    surplus = len(samples) - num_in / speed * rate / SOURCE_RATE_HZ
    least, most = allowed_surplus(audio_format, SOURCE_RATE_HZ, streaming)
    assert least - 1 <= surplus <= most + 1
    assert peak_hz(samples, rate) == pytest.approx(440, abs=2)


@given(st.floats(0.25, 4), st.integers(1, 30_000), st.sampled_from(SAMPLE_RATES_HZ))
@settings(max_examples=25)
def test_row_25_any_speed_gives_its_exact_duration(speed, num_in, rate):
    data = b"".join(encode("pcm", tone(num_in), rate, speed))
    assert abs(len(data) // 2 - num_in / speed * rate / SOURCE_RATE_HZ) <= 1.5


def test_row_25_what_is_spoken_last_is_spoken_whole():
    """A beep of 40 ms before the last 20 is heard where it belongs, give or take a piece of 43 ms."""
    pcm = np.zeros(24_000, "<i2")
    pcm[-1_440:-480] = np.frombuffer(tone(960, hz=1_000), "<i2")
    for speed in (0.25, 0.5, 0.8, 1.3, 2, 4):
        changed = np.frombuffer(b"".join(encode("pcm", pcm.tobytes(), speed=speed)), "<i2")
        (heard,) = np.nonzero(np.abs(changed.astype(np.int32)) > 3_000)
        assert len(heard), speed
        assert abs(heard.mean() - 23_040 / speed) < 1_024 / min(speed, 1), speed


# ---------------------------------------------------------------- as early as the codec allows
@pytest.mark.parametrize("audio_format", ["mp3", "opus", "aac", "flac"])
def test_a_stream_is_never_more_than_its_encoder_behind(audio_format):
    """By a second of audio, at least 0.8 s of it have left; nobody waits for the end."""
    pcm = tone(96_000)
    parts = encode(audio_format, pcm, sizes=[1_920])
    total = sum(map(len, parts))
    sent = np.cumsum([len(part) for part in parts])
    assert parts[0 if audio_format != "aac" else 2]  # AAC looks two frames of 43 ms ahead
    for number, so_far in enumerate(sent[:-1], 1):
        fed_s = number * 0.08
        assert so_far / total * 4 > fed_s - 0.2, f"after {fed_s:.2f} s"


@pytest.mark.parametrize("speed", [0.25, 4])
def test_a_stretched_stream_follows_closely_too(speed):
    parts = encode("pcm", tone(48_000), speed=speed, sizes=[1_920])
    behind = [number * 1_920 - sum(map(len, parts[:number])) // 2 * speed for number in range(1, len(parts))]
    assert max(behind) <= 5_760  # 240 ms of input


# ---------------------------------------------------------------- streamed and whole
@pytest.mark.parametrize("audio_format", LOSSLESS)
@pytest.mark.parametrize(("rate", "speed"), [(24_000, 1), (16_000, 1), (48_000, 0.7), (8_000, 3)])
def test_lossless_formats_hold_the_same_samples_streamed_and_whole(audio_format, rate, speed, tmp_path):
    pcm = tone(70_001)
    streamed, whole = [
        samples_of(audio_format, b"".join(encode(audio_format, pcm, rate, speed, streaming)), tmp_path, rate)[
            0
        ]
        for streaming in (True, False)
    ]
    np.testing.assert_array_equal(streamed, whole)
    if (rate, speed) == (24_000, 1):
        assert streamed.tobytes() == pcm


@given(
    st.lists(st.integers(1, 9_000), min_size=1, max_size=6),
    st.sampled_from(SAMPLE_RATES_HZ),
    st.sampled_from([0.25, 0.6, 1, 1.7, 4]),
)
@settings(max_examples=20)
def test_however_the_samples_are_cut_they_sound_the_same(sizes, rate, speed):
    pcm = tone(20_000)
    pieces = b"".join(encode("pcm", pcm, rate, speed, sizes=sizes))
    assert pieces == b"".join(encode("pcm", pcm, rate, speed, streaming=False, sizes=[20_000]))


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("audio_format", FORMATS)
def test_the_same_samples_give_the_same_bytes(audio_format, streaming):
    once, twice = [b"".join(encode(audio_format, tone(24_000), streaming=streaming)) for _ in range(2)]
    assert once == twice


# ---------------------------------------------------------------- rows 21 and 22: headers
@pytest.mark.parametrize("audio_format", ["wav", "flac"])
def test_row_21_a_stream_has_one_header_at_its_start(audio_format):
    data = b"".join(encode(audio_format, tone(115_200)))
    assert data.startswith(MAGIC[audio_format])
    assert data.count(MAGIC[audio_format]) == 1


@pytest.mark.parametrize(("rate", "speed"), [(24_000, 1), (8_000, 1), (48_000, 2)])
def test_row_22_a_whole_wav_has_true_sizes_and_a_streamed_one_says_unknown(rate, speed):
    pcm = tone(48_000)
    whole, streamed = [b"".join(encode("wav", pcm, rate, speed, streaming)) for streaming in (False, True)]
    with wave.open(io.BytesIO(whole)) as reader:
        assert (reader.getframerate(), reader.getnframes()) == (rate, rate * 2 / speed)
    assert int.from_bytes(whole[4:8], "little") == len(whole) - 8
    assert streamed[4:8] == streamed[40:44] == b"\xff" * 4
    assert streamed[44:] == whole[44:]


@given(st.binary(max_size=400).map(lambda raw: raw[: len(raw) // 2 * 2]), st.sampled_from([1, 7, 50]))
def test_the_default_path_passes_samples_through_untouched(pcm, size):
    pieces = encode("wav", pcm, sizes=[size])
    assert b"".join(pieces) == wav_header(SOURCE_RATE_HZ) + pcm
    assert encode("wav", pcm, streaming=False, sizes=[size])[-1] == wav_file(pcm, SOURCE_RATE_HZ)
    assert b"".join(encode("pcm", pcm, sizes=[size])) == pcm
    assert encode("pcm", pcm, sizes=[size])[:-1] == cut(pcm, [size])


def test_only_the_default_path_is_plain():
    for audio_format in FORMATS:
        for rate in SAMPLE_RATES_HZ:
            for speed in (1.0, 2.0):
                encoder = open_encoder(audio_format, SOURCE_RATE_HZ, rate, speed, is_streaming=True)
                expected = audio_format in ("wav", "pcm") and rate == SOURCE_RATE_HZ and speed == 1
                assert encoder.is_plain == is_plain(audio_format, SOURCE_RATE_HZ, rate, speed) == expected
                assert (encoder.sample_rate_hz, encoder.media_type) == (rate, MEDIA_TYPES[audio_format])
                encoder.close()


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("rate", [0, 7_999, 11_025, 44_100])
def test_other_rates_are_refused(rate):
    with pytest.raises(InvalidRequest, match=f"8000, 16000, 24000, 48000, got {rate}") as caught:
        open_encoder("mp3", SOURCE_RATE_HZ, rate, is_streaming=True)
    assert caught.value.param == "sample_rate"


@pytest.mark.parametrize("speed", [0, 0.2499, 4.01, -1, float("nan"), float("inf")])
def test_row_25_other_speeds_are_refused(speed):
    with pytest.raises(InvalidRequest, match=r"speed must be 0\.25 to 4") as caught:
        open_encoder("pcm", SOURCE_RATE_HZ, None, speed, is_streaming=True)
    assert caught.value.param == "speed"


def test_a_missing_encoder_is_refused_by_name(monkeypatch):
    kind = compressed._KINDS["mp3"]._replace(codec="libnosuch")
    monkeypatch.setitem(compressed._KINDS, "mp3", kind)
    with pytest.raises(EncoderUnavailable, match=r"response_format mp3 isn't available.*libnosuch") as caught:
        open_encoder("mp3", SOURCE_RATE_HZ, is_streaming=True)
    assert caught.value.param == "response_format"
    assert missing_formats() == ("mp3",)


def test_without_the_library_the_default_path_still_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    for name in ("qwen3tts_core.audio.compressed", "qwen3tts_core.audio.conversion"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert missing_formats() == ("mp3", "opus", "aac", "flac")
    with pytest.raises(EncoderUnavailable, match="response_format opus"):
        open_encoder("opus", SOURCE_RATE_HZ, is_streaming=True)
    with pytest.raises(EncoderUnavailable, match="speed") as caught:
        open_encoder("wav", SOURCE_RATE_HZ, None, 2.0, is_streaming=True)
    assert caught.value.param == "speed"
    assert b"".join(encode("pcm", tone(10))) == tone(10)


def test_this_machine_writes_every_format():
    assert missing_formats() == ()


# ---------------------------------------------------------------- release
def num_containers():
    return sum(type(thing) is OutputContainer for thing in gc.get_objects())  # isinstance wakes lazy objects


@pytest.mark.parametrize("audio_format", ["mp3", "opus", "aac", "flac"])
def test_a_stream_that_is_left_gives_its_encoder_back_at_once(audio_format):
    gc.collect()
    before = num_containers()
    encoder = open_encoder(audio_format, SOURCE_RATE_HZ, 16_000, 1.5, is_streaming=True)
    encoder.feed(tone(9_600))
    gc.disable()  # without waiting for a collection
    try:
        assert num_containers() == before + 1
        encoder.close()
        encoder.close()
        del encoder
        assert num_containers() == before
    finally:
        gc.enable()


def test_closing_waits_for_the_call_in_progress_and_refuses_the_next():
    encoder = open_encoder("mp3", SOURCE_RATE_HZ, is_streaming=True)
    entered, may_leave, ended, write = threading.Event(), threading.Event(), [], encoder._writer.feed

    def slow_feed(pcm):
        entered.set()
        assert may_leave.wait(60)
        data = write(pcm)
        ended.append("feed")
        return data

    encoder._writer.feed = slow_feed
    feeding = threading.Thread(target=encoder.feed, args=[tone(24_000)])
    closing = threading.Thread(target=lambda: (encoder.close(), ended.append("close")))
    feeding.start()
    assert entered.wait(60)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    may_leave.set()
    for thread in (feeding, closing):
        thread.join(60)
    assert ended == ["feed", "close"]
    with pytest.raises(StreamCancelled):
        encoder.feed(tone(10))
