"""The codec encoder's own promises; its codes are compared in tests/parity/test_reference_encoder.py."""

from pathlib import Path

import pytest
import torch

from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.errors import CheckpointMismatch
from qwen3tts_core.model.codec_encoder import CodecEncoder
from qwen3tts_core.model.weights import SafetensorsFolder, ShapesOnly
from tests.parity import full_size

META = torch.device("meta")
BASE = Path(__file__).parents[2] / "parity" / "golden" / "seed0" / "base"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return full_size.read_config("0b6_base", tmp_path_factory.mktemp("config"))


def test_the_published_tensors_are_all_used_or_known_to_be_unused(published):
    encoder = CodecEncoder(full_size.codec_source(), published.codec_encoder, published.codec, META)
    num_weights = sum(tensor.numel() for tensor in encoder.state_dict().values())
    assert 40e6 < num_weights < 60e6, "a decoder was built, or an encoder wasn't"


@pytest.mark.parametrize(
    "name",
    [
        "encoder.encoder.layers.4.block.3.conv.bias",
        "encoder.encoder_transformer.layers.7.mlp.fc2.weight",
        "encoder.downsample.conv.weight",
        "encoder.quantizer.semantic_residual_vector_quantizer.input_proj.weight",
        "encoder.quantizer.acoustic_residual_vector_quantizer.layers.14.codebook.embed_sum",
    ],
)
def test_a_missing_tensor_is_named(published, name):
    shapes = full_size.read_manifest("codec")
    del shapes[name]
    with pytest.raises(CheckpointMismatch, match=name.replace(".", r"\.")):
        CodecEncoder(ShapesOnly("x", shapes), published.codec_encoder, published.codec, META)


def test_tensors_that_nobody_reads_may_be_absent(published):
    shapes = {
        name: shape
        for name, shape in full_size.read_manifest("codec").items()
        if not name.endswith((".initialized", "output_proj.weight")) and ".layers.30." not in name
    }
    CodecEncoder(ShapesOnly("x", shapes), published.codec_encoder, published.codec, META)


@pytest.mark.parametrize(
    "name",
    [
        "encoder.encoder.layers.15.conv.bias",
        "encoder.quantizer.acoustic_residual_vector_quantizer.layers.31.codebook.embed_sum",
        "encoder.quantizer.semantic_residual_vector_quantizer.layers.1.codebook.embed_sum",
        "encoder.decoder.layers.0.conv.weight",
    ],
)
def test_a_tensor_nobody_uses_is_named(published, name):
    shapes = {**full_size.read_manifest("codec"), name: [1]}
    with pytest.raises(CheckpointMismatch, match=name.replace(".", r"\.")):
        CodecEncoder(ShapesOnly("x", shapes), published.codec_encoder, published.codec, META)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_quantizers": 15}, "num_quantizers"),
        ({"codebook_size": 1024}, "codebook_size"),
        ({"sampling_rate": 16_000}, "sampling_rate"),
        ({"upsampling_ratios": [8, 6, 5, 2]}, "samples per frame"),
        ({"use_causal_conv": False}, "use_causal_conv"),
        ({"num_filters": "many"}, "num_filters"),
    ],
)
def test_an_encoder_config_that_does_not_fit_the_codec_is_refused(published, change, named):
    with pytest.raises(CheckpointMismatch, match=named):
        CodecEncoder(full_size.codec_source(), {**published.codec_encoder, **change}, published.codec, META)


def test_a_clip_makes_one_frame_per_1920_samples_rounded_up():
    config = CheckpointConfig.from_checkpoint(BASE)
    source = SafetensorsFolder(BASE / "speech_tokenizer")
    encoder = CodecEncoder(source, config.codec_encoder, config.codec, torch.device("cpu"))
    noise = torch.rand(5 * 1920 + 1) - 0.5
    for num_samples, num_frames in [
        (1, 1),
        (1919, 1),
        (1920, 1),
        (1921, 2),
        (5 * 1920, 5),
        (5 * 1920 + 1, 6),
    ]:
        codes = encoder(noise[:num_samples])
        assert codes.shape == (num_frames, 16)
        assert codes.dtype == torch.int64
        assert codes.min() >= 0
        assert codes.max() < config.codec.codebook_size
