"""The speaker encoder's own promises; its numbers are compared in tests/parity/test_reference_encoder.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qwen3tts_core.config import SpeakerEncoderConfig
from qwen3tts_core.errors import CheckpointMismatch
from qwen3tts_core.model.speaker_encoder import HOP, SpeakerEncoder, log_mel, slaney_filterbank
from qwen3tts_core.model.weights import ShapesOnly
from tests.parity import full_size

META = torch.device("meta")


@pytest.mark.parametrize("variant", ["0b6_base", "1b7_base"])
def test_the_published_tensors_are_all_used_and_all_there(variant, tmp_path):
    config = full_size.read_config(variant, tmp_path).speaker_encoder
    encoder = SpeakerEncoder(full_size.model_source(variant), config, META)
    assert encoder.fc.weight.shape == (config.embedding_dim, 3072, 1)


@pytest.mark.parametrize("change", ["missing", "shape", "unused"])
def test_a_wrong_tensor_is_named(change, tmp_path):
    config = full_size.read_config("0b6_base", tmp_path).speaker_encoder
    shapes = full_size.read_manifest("0b6_base")["model"]
    name = "speaker_encoder.blocks.2.se_block.conv1.bias"
    if change == "missing":
        del shapes[name]
    elif change == "shape":
        shapes[name] = [64]
    else:
        name = "speaker_encoder.blocks.9.conv.bias"
        shapes[name] = [512]
    with pytest.raises(CheckpointMismatch, match=name.replace(".", r"\.")):
        SpeakerEncoder(ShapesOnly("x", shapes), config, META)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sample_rate_hz": 16_000}, "sample_rate"),
        ({"channels": (512, 512)}, "enc_channels"),
        ({"channels": (512, 256, 512, 512, 1536)}, "enc_channels"),
        ({"res2net_scale": 7}, "enc_res2net_scale"),
        ({"kernel_sizes": (4, 3, 3, 3, 1)}, "enc_kernel_sizes"),
    ],
)
def test_a_config_this_network_cannot_have_is_refused(change, named):
    config = replace(SpeakerEncoderConfig(embedding_dim=64, sample_rate_hz=24_000), **change)
    with pytest.raises(CheckpointMismatch, match=named):
        SpeakerEncoder(ShapesOnly("x", {}), config, META)


def test_filters_are_triangles_of_area_one_on_slaney_s_scale():
    bank = slaney_filterbank(128).double().numpy()
    hz_per_bin = 24_000 / 1024
    peaks_hz = bank.argmax(axis=1) * hz_per_bin
    # a bin is 23 Hz wide: it samples the wide high filters well, the narrow low ones roughly
    np.testing.assert_allclose(bank[64:].sum(axis=1) * hz_per_bin, 1, atol=0.05)
    assert (np.diff(peaks_hz) >= 0).all()
    below = peaks_hz[peaks_hz < 900]
    np.testing.assert_allclose(np.diff(below).mean(), np.diff(below[:12]).mean(), rtol=0.1)  # linear
    above = np.log(peaks_hz[peaks_hz > 4000])
    np.testing.assert_allclose(
        np.diff(above)[:10].mean(), np.diff(above)[-10:].mean(), rtol=0.1
    )  # logarithmic
    assert 12_000 - peaks_hz[-1] < 500


@pytest.mark.parametrize("num_samples", [385, 511, 512, 513, 24_000])
def test_n_samples_make_n_over_256_frames(num_samples):
    mel = log_mel(torch.rand(num_samples) - 0.5, slaney_filterbank(128))
    assert mel.shape == (128, num_samples // HOP)
    assert mel.isfinite().all()


def test_silence_has_the_mel_floor():
    assert log_mel(torch.zeros(4800), slaney_filterbank(128)).max() < np.log(1e-4)
