"""The published checkpoints as names and shapes: every tensor of each is used, and nothing else is asked for.

Meta tensors: no weights, no memory. (tests/qwen3tts_core/model has what happens when one is wrong.)
"""

import pytest
import torch

from qwen3tts_core.errors import CheckpointMismatch
from qwen3tts_core.model import codec_decoder
from qwen3tts_core.model.codec_decoder import open_codec_decoder
from qwen3tts_core.model.codec_encoder import CodecEncoder
from qwen3tts_core.model.speaker_encoder import SpeakerEncoder
from qwen3tts_core.model.talker import Talker
from qwen3tts_core.model.weights import ShapesOnly
from qwen3tts_core.ops.reference import ReferenceOps
from tests.parity import full_size

META = torch.device("meta")
GIGA = 10**9
NUM_TALKER_WEIGHTS = {"0b6": (0.5 * GIGA, 0.8 * GIGA), "1b7": (1.4 * GIGA, 2.0 * GIGA)}
"""Of talker and code predictor without the text side, whose table is folded."""


def open_talker(source, config):
    return Talker(source, config, num_positions=64, ops=ReferenceOps(), device=META, dtype=torch.bfloat16)


@pytest.fixture(params=full_size.VARIANTS)
def variant(request):
    return request.param


@pytest.fixture
def config(variant, tmp_path):
    return full_size.read_config(variant, tmp_path)


def test_talker_and_code_predictor_use_every_tensor_of_every_checkpoint(variant, config):
    talker = open_talker(full_size.model_source(variant), config)
    num_weights = sum(parameter.numel() for parameter in talker.parameters()) - talker.text_table.numel()
    least, most = NUM_TALKER_WEIGHTS[variant[:3]]
    assert least < num_weights < most, "something was built twice, or not at all"
    has_projection = talker.width != config.code_predictor.transformer.hidden_size
    assert has_projection == variant.startswith("1b7")


@pytest.mark.parametrize("part", ["talker.model.layers.3.mlp.up_proj.weight", "talker.codec_head.weight"])
def test_a_talker_without_one_tensor_does_not_start(variant, config, part):
    shapes = dict(full_size.read_manifest(variant)["model"])
    del shapes[part]
    with pytest.raises(CheckpointMismatch, match=part.replace(".", r"\.")):
        open_talker(ShapesOnly("x", shapes), config)


def test_the_speaker_encoder_is_in_the_base_checkpoints_and_uses_the_rest(variant, config):
    source = full_size.model_source(variant)
    rest = [name for name in source.shapes() if not name.startswith("talker.")]
    if config.model_type != "base":
        assert rest == []
        assert config.speaker_encoder is None
        return
    encoder = SpeakerEncoder(source, config.speaker_encoder, META)
    assert encoder.fc.weight.shape[0] == config.talker.transformer.hidden_size
    assert {name.split(".")[0] for name in rest} == {"speaker_encoder"}


def test_codec_decoder_and_encoder_use_every_tensor_between_them(variant, config, monkeypatch, tmp_path):
    monkeypatch.setattr(codec_decoder, "SafetensorsFolder", lambda folder: full_size.codec_source())
    decoder = open_codec_decoder(tmp_path, config.codec, META)
    assert decoder.config.samples_per_frame == 1920
    encoder = CodecEncoder(full_size.codec_source(), config.codec_encoder, config.codec, META)
    assert encoder.num_groups == 16
    owners = {name.split(".")[0] for name in full_size.codec_source().shapes()}
    assert owners == {"decoder", "encoder"}
