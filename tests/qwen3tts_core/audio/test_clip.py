"""Every documented kind of clip gets its documented answer."""

import hashlib
import io
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3tts_core.audio.clip import CLIP_RATE_HZ, ReferenceClip, ReferenceLimits, read_clip
from qwen3tts_core.errors import InvalidReferenceAudio


def tone(seconds=1.5, rate_hz=24_000, channels=1, hz=440.0):
    wave = 0.3 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate_hz)) / rate_hz)
    return wave if channels == 1 else np.repeat(wave[:, None], channels, axis=1)


def encode(samples, rate_hz=24_000, format="WAV", subtype=None):
    file = io.BytesIO()
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(file, "w", rate_hz, channels, subtype, format=format) as out:
        for start in range(
            0, len(samples), 24_000
        ):  # libsndfile 1.2.2 overflows its stack on a long Vorbis write
            out.write(samples[start : start + 24_000])
    return file.getvalue()


def assert_is_the_tone(clip, atol):
    """The middle second; codecs may shift and ring at the edges."""
    assert clip.samples.dtype == np.float32
    middle = clip.samples[6_000:30_000].astype(np.float64)
    t = np.arange(len(middle)) / CLIP_RATE_HZ
    basis = np.stack([np.sin(2 * np.pi * 440 * t), np.cos(2 * np.pi * 440 * t)], axis=1)
    weights, *_ = np.linalg.lstsq(basis, middle, rcond=None)
    assert np.hypot(*weights) == pytest.approx(0.3, rel=0.02)
    assert np.abs(middle - basis @ weights).max() < atol


# ---------------------------------------------------------------- accepted
@pytest.mark.parametrize(
    ("format", "subtype", "atol"),
    [
        ("WAV", "PCM_16", 1e-4),
        ("WAV", "PCM_24", 1e-6),
        ("WAV", "PCM_U8", 1e-2),
        ("WAV", "FLOAT", 1e-6),
        ("WAV", "DOUBLE", 1e-6),
        ("FLAC", "PCM_16", 1e-4),
        ("OGG", "VORBIS", 2e-2),
        ("OGG", "OPUS", 6e-2),
        ("MP3", None, 2e-2),
        ("AIFF", "PCM_16", 1e-4),
    ],
)
def test_formats_that_libsndfile_reads_are_read(format, subtype, atol):
    clip = read_clip(encode(tone(), format=format, subtype=subtype))
    assert_is_the_tone(clip, atol)


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000, 192_000])
def test_any_rate_becomes_24_khz(rate_hz):
    clip = read_clip(encode(tone(rate_hz=rate_hz), rate_hz, subtype="FLOAT"))
    assert abs(len(clip.samples) - 36_000) <= 2  # a file of 1.5 s rounded to its rate, then rounded up
    assert_is_the_tone(clip, 1e-4)


@pytest.mark.parametrize("channels", [2, 3, 8])
def test_channels_are_averaged(channels):
    samples = np.zeros((36_000, channels))
    samples[:, 0] = tone() * channels
    assert_is_the_tone(read_clip(encode(samples, subtype="FLOAT")), 1e-5)


def test_channels_that_cancel_are_silence():
    samples = np.stack([tone(), -tone()], axis=1)
    with pytest.raises(InvalidReferenceAudio, match="silent"):
        read_clip(encode(samples, subtype="FLOAT"))


def test_a_streamed_wav_without_sizes_is_read_to_its_end():
    data = bytearray(encode(tone(), subtype="PCM_16"))
    data[4:8] = data[40:44] = b"\xff\xff\xff\xff"
    assert len(read_clip(bytes(data)).samples) == 36_000


def test_a_flac_that_does_not_say_its_length_is_read_to_its_end():
    assert_is_the_tone(read_clip(flac_without_length(encode(tone(), format="FLAC"))), 1e-4)


@pytest.mark.parametrize("seconds", [1.0, 30.0])
def test_the_limits_themselves_are_accepted(seconds):
    assert read_clip(encode(tone(seconds))).seconds == seconds


def test_limits_are_configurable():
    limits = ReferenceLimits(min_seconds=0.1, max_seconds=0.5)
    assert read_clip(encode(tone(0.2)), limits).seconds == pytest.approx(0.2)
    with pytest.raises(InvalidReferenceAudio, match=r"lasts 1\.00 s, expected 0\.1 to 0\.5 s"):
        read_clip(encode(tone(1)), limits)


def test_a_clip_is_known_by_its_samples_not_by_its_file():
    samples = (tone() * 32_767).astype(np.int16)
    wav, flac = (encode(samples, format=f, subtype="PCM_16") for f in ("WAV", "FLAC"))
    first, second = read_clip(wav), read_clip(flac)
    assert first.digest == second.digest == hashlib.sha256(first.samples.astype("<f4").tobytes()).hexdigest()
    assert first.voice_key(True) != first.voice_key(False)
    assert read_clip(encode(tone(hz=441))).digest != first.digest


def test_a_clip_cannot_be_changed_and_crosses_processes():
    clip = read_clip(encode(tone()))
    with pytest.raises(ValueError, match="read-only"):
        clip.samples[0] = 1
    copy = pickle.loads(pickle.dumps(clip))
    assert copy.digest == clip.digest
    np.testing.assert_array_equal(copy.samples, clip.samples)


# ---------------------------------------------------------------- refused
def flac_without_length(data):
    """STREAMINFO's 36-bit number of samples set to 0, which means unknown."""
    assert data[:4] == b"fLaC"
    changed = bytearray(data)
    changed[21] &= 0xF0
    changed[22:26] = bytes(4)
    return bytes(changed)


def corrupt(data):
    middle = len(data) // 2
    return data[:middle] + np.random.default_rng(0).bytes(3_000) + data[middle + 3_000 :]


NAN = tone()
NAN[100] = np.nan
INFINITE = tone()
INFINITE[100] = np.inf
REFUSED = {
    "empty": (b"", "empty, expected an audio file"),
    "text": (b"hello there " * 500, "can't be decoded"),
    "html": (b"<!doctype html><html></html>" * 100, "expected WAV, FLAC, Ogg, MP3"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(5_000), "can't be decoded"),
    "noise": (np.random.default_rng(0).bytes(100_000), "can't be decoded"),
    "header only": (encode(tone())[:30], "can't be decoded"),
    "no samples": (encode(np.zeros(0)), r"lasts 0\.00 s, expected 1 to 30 s"),
    "0.2 s": (encode(tone(0.2)), r"lasts 0\.20 s, expected 1 to 30 s"),
    "a sample short": (encode(tone(1)[1:]), r"lasts 1\.00 s, expected 1 to 30 s"),
    "31 s": (encode(tone(31)), r"lasts 31\.00 s, expected 1 to 30 s"),
    "corrupt FLAC": (corrupt(encode(tone(4), format="FLAC")), "can't be decoded"),
    "corrupt Ogg": (corrupt(encode(tone(4), format="OGG")), "can't be decoded|damaged|lasts"),
    "corrupt MP3": (corrupt(encode(tone(4), format="MP3")), "can't be decoded"),
    "half a FLAC": (encode(tone(4), format="FLAC")[:3_000], "can't be decoded"),
    "digital silence": (encode(np.zeros(36_000)), "silent: .* expected at least -60"),
    "constant": (encode(np.full(36_000, 0.4)), "silent"),
    "dither": (encode(np.random.default_rng(0).integers(-1, 2, 36_000).astype(np.int16)), "silent"),
    "NaN": (encode(NAN, subtype="FLOAT"), "NaN or infinite"),
    "infinite": (encode(INFINITE, subtype="DOUBLE"), "NaN or infinite"),
    "too large for float32": (encode(tone() * 1e300, subtype="DOUBLE"), "NaN or infinite"),
    "unscaled float": (
        encode(tone() * 32_768, subtype="FLOAT"),
        r"peak is 9,83\d, expected samples in \[-1, 1\]",
    ),
    "17 channels": (encode(tone(channels=17)), "17 channels, the limit is 16"),
    "1 kHz": (encode(tone(rate_hz=1_000), 1_000), "1,000 Hz, expected 4,000 to 384,000"),
    "1 MHz": (encode(tone(rate_hz=1_000_000), 1_000_000), "1,000,000 Hz, expected"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_usable_clip_is_refused_with_a_reason(kind):
    data, message = REFUSED[kind]
    with pytest.raises(InvalidReferenceAudio, match=message) as caught:
        read_clip(data)
    assert caught.value.param == "ref_audio"


def test_a_quiet_voice_is_not_silence():
    assert read_clip(encode(tone() * 0.01, subtype="FLOAT")).seconds == 1.5


def test_a_file_over_the_byte_limit_is_refused_unread():
    with pytest.raises(InvalidReferenceAudio, match=r"is 72,044 bytes, the limit is 1,000"):
        read_clip(encode(tone()), ReferenceLimits(max_bytes=1_000))


TEN_MINUTES = np.tile(tone(1).astype(np.float32), 600)


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_ten_minutes_are_refused_by_the_header(format, monkeypatch):
    data = encode(TEN_MINUTES, format=format)
    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(InvalidReferenceAudio, match=r"lasts 600\.\d+ s, expected 1 to 30 s"):
        read_clip(data, ReferenceLimits(max_bytes=64 << 20))


def test_a_bomb_that_hides_its_length_is_decoded_no_further_than_the_limit():
    bomb = flac_without_length(encode(np.zeros((48_000 * 240, 8), np.int16), 48_000, format="FLAC"))
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(InvalidReferenceAudio, match=r"lasts at least 30\.\d+ s, expected 1 to 30 s"):
            read_clip(bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20, "30 s of mono at 48 kHz are 6 MB; all of it would be 370 MB"


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=600), st.sampled_from([b"", b"RIFF", b"fLaC", b"OggS", b"\xff\xfb\x90\x00", b"FORM"])
)
def test_whatever_the_bytes_the_answer_is_a_clip_or_a_refusal(data, magic):
    try:
        clip = read_clip(magic + data)
    except InvalidReferenceAudio:
        return
    assert 1 <= clip.seconds <= 30


@settings(max_examples=30, deadline=None)
@given(st.integers(4, 43), st.binary(min_size=4, max_size=4))
def test_whatever_the_header_the_answer_is_a_clip_or_a_refusal(position, patch):
    data = bytearray(encode(tone(), subtype="PCM_16"))
    data[position : position + 4] = patch
    try:
        clip = read_clip(bytes(data))
    except InvalidReferenceAudio:
        return
    assert np.isfinite(clip.samples).all()


def test_a_header_s_billion_of_samples_costs_nothing():
    data = bytearray(encode(tone(), subtype="PCM_16"))
    data[40:44] = struct.pack("<I", 2 * 10**9)
    assert len(read_clip(bytes(data)).samples) == 36_000


@pytest.mark.parametrize(
    "fields",
    [
        {"min_seconds": 0.0},
        {"max_seconds": 0.5},
        {"max_seconds": 601.0},
        {"max_bytes": 0},
        {"min_rate_hz": 0},
    ],
)
def test_senseless_limits_are_refused(fields):
    with pytest.raises(ValueError, match=r"expected|must be"):
        ReferenceLimits(**fields)


def test_only_mono_is_a_clip():
    with pytest.raises(AssertionError, match="mono"):
        ReferenceClip(np.zeros((2, 24_000), np.float32))
