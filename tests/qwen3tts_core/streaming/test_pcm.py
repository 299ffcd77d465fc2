"""Samples as bytes, and the WAV container as others read it."""

import io
import wave

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.errors import EngineFault
from qwen3tts_core.streaming.pcm import (
    FULL_SCALE,
    NOT_A_NUMBER,
    duration_s,
    num_pcm_bytes,
    pcm16_from_float,
    samples_to_bytes,
    wav_file,
    wav_header,
)


def samples(*values):
    return np.frombuffer(pcm16_from_float(np.array(values, np.float32)), "<i2").tolist()


def test_full_scale_is_symmetric_and_louder_is_clamped():
    assert samples(0.0, 1.0, -1.0) == [0, 32767, -32767]
    assert samples(1.5, -7.0, np.inf, -np.inf) == [32767, -32767, 32767, -32767]


def test_rounding_is_to_the_nearest_ties_to_even():
    steps = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 0.49, -0.51], np.float64) / FULL_SCALE
    assert np.frombuffer(pcm16_from_float(steps), "<i2").tolist() == [0, 2, 2, 0, -2, 0, -1]


def test_nan_is_a_fault_and_never_silence():
    with pytest.raises(EngineFault, match="sample 2"):
        pcm16_from_float(np.array([0.0, 0.1, np.nan], np.float32))
    with pytest.raises(EngineFault, match="sample 1"):
        samples_to_bytes(np.array([0, NOT_A_NUMBER, 3], np.int16))


@given(values=st.lists(st.floats(-2, 2, width=32), max_size=50))
def test_no_number_is_taken_for_not_a_number(values):
    assert NOT_A_NUMBER not in samples(*values)


def test_sizes_and_durations():
    assert num_pcm_bytes(25, 1920) == 96_000
    assert duration_s(96_000, 24_000) == 2.0


@given(
    pcm=st.binary(max_size=100).map(lambda data: data[: len(data) // 2 * 2]),
    rate=st.sampled_from([24000, 48000]),
)
def test_a_wav_file_opens_elsewhere_with_true_sizes(pcm, rate):
    file = wav_file(pcm, rate)
    assert len(file) == 44 + len(pcm)
    assert int.from_bytes(file[4:8], "little") == len(file) - 8
    with wave.open(io.BytesIO(file)) as opened:
        assert opened.getparams()[:4] == (1, 2, rate, len(pcm) // 2)
        assert opened.readframes(len(pcm)) == pcm


def test_a_streaming_header_says_that_the_size_is_unknown():
    header = wav_header(24000)
    assert len(header) == 44
    assert header[4:8] == header[40:44] == b"\xff\xff\xff\xff"
    assert header[:4] + header[8:40] == wav_header(24000, 0)[:4] + wav_header(24000, 0)[8:40]


def test_a_wav_file_that_can_t_exist_is_refused():
    wav_header(24000, 0xFFFFFFFF - 38)
    with pytest.raises(ValueError, match="4 GiB"):
        wav_header(24000, 0xFFFFFFFF - 36)
