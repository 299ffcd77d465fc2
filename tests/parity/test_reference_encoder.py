"""Voice clone, the reference's numbers: resampling, mel, x-vector and codes of `base`.

Tolerances are those of golden/seed0/README.md: 1e-4 (another FFT or convolution library may need it), codes equal.
"""

import io
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from qwen3tts_core.audio.clip import ReferenceClip, read_clip
from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.engine.reference_encoder import open_reference_encoder
from qwen3tts_core.model.codec_encoder import CodecEncoder
from qwen3tts_core.model.speaker_encoder import SpeakerEncoder, log_mel
from qwen3tts_core.model.weights import SafetensorsFolder

BASE = Path(__file__).parent / "golden" / "seed0" / "base"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config():
    return CheckpointConfig.from_checkpoint(BASE)


@pytest.fixture(scope="module")
def golden():
    with np.load(BASE.with_suffix(".npz")) as arrays:
        return {name: arrays[name] for name in arrays.files if name.startswith(("enc/", "spk/"))}


@pytest.fixture(scope="module")
def speaker(config):
    return SpeakerEncoder(SafetensorsFolder(BASE), config.speaker_encoder, CPU)


@pytest.fixture(scope="module")
def codec(config):
    return CodecEncoder(SafetensorsFolder(BASE / "speech_tokenizer"), config.codec_encoder, config.codec, CPU)


@pytest.fixture
def clip(golden):
    return torch.from_numpy(golden["enc/clip_int16"].astype(np.float32) / 32768)


def assert_near(found, expected):
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-4)


def test_log_mel_is_the_reference_s(speaker, golden, clip):
    assert_near(log_mel(clip, speaker.filterbank).T, golden["spk/mel"])


def test_every_stage_of_the_speaker_encoder_is_the_reference_s(speaker, golden):
    mel = torch.from_numpy(golden["spk/mel"].T.copy())
    block0 = speaker.first(mel).relu()
    assert_near(block0, golden["spk/block0"])
    outputs = [speaker.blocks[0](block0)]
    assert_near(outputs[0], golden["spk/block1"])
    for block in speaker.blocks[1:]:
        outputs.append(block(outputs[-1]))
    mfa = speaker.mfa(torch.cat(outputs)).relu()
    assert_near(mfa, golden["spk/mfa"])
    assert_near(speaker.asp(mfa), golden["spk/pooled"])
    assert_near(speaker.embed_mel(mel), golden["spk/xvector"])


def test_codes_are_the_reference_s_beyond_the_config_s_attention_window(codec, config, golden, clip):
    steps = golden["enc/conv"].shape[1]
    assert steps > 2 * config.codec_encoder["sliding_window"], "a short clip would prove nothing"
    np.testing.assert_array_equal(codec(clip), golden["enc/codes"])


@pytest.mark.parametrize("num_samples", [700, 9599, 9600, 9601])
def test_codes_of_short_clips_and_frame_edges_are_the_reference_s(codec, golden, clip, num_samples):
    np.testing.assert_array_equal(codec(clip[:num_samples]), golden[f"enc/codes_first_{num_samples}"])


def test_a_stereo_file_of_another_rate_is_read_as_the_reference_reads_it(golden):
    file = io.BytesIO()
    soundfile.write(file, golden["enc/stereo16k_int16"], 16_000, format="WAV", subtype="PCM_16")
    np.testing.assert_allclose(
        read_clip(file.getvalue()).samples, golden["enc/stereo16k_resampled"], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("samples", "codes", "x_vector"),
    [
        ("enc/clip_int16", "enc/codes", "spk/xvector"),
        ("enc/stereo16k_resampled", "enc/stereo16k_codes", "spk/stereo16k_xvector"),
    ],
)
def test_a_voice_carries_the_reference_s_codes_and_x_vector(config, golden, samples, codes, x_vector):
    wave = golden[samples]
    if wave.dtype == np.int16:
        wave = wave.astype(np.float32) / 32768
    voice = open_reference_encoder(BASE, config).encode(ReferenceClip(wave), in_context=True)
    np.testing.assert_array_equal(np.frombuffer(voice.codes, "<i2").reshape(-1, 16), golden[codes])
    np.testing.assert_allclose(np.frombuffer(voice.x_vector, "<f4"), golden[x_vector], rtol=0, atol=1e-4)
