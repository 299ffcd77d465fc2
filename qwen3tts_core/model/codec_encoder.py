"""What was said, as the codec hears it: a clip becomes reference codes, by the codec's Mimi encoder.

The network is transformers' MimiModel without its decoder, in float32; clips go through singly,
because a padded neighbour changes the last frame (spec quirk Q9). Source: spec 1.6 and 5.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import MimiConfig, MimiModel

from qwen3tts_core.audio.clip import CLIP_RATE_HZ
from qwen3tts_core.config import CodecDecoderConfig
from qwen3tts_core.errors import CheckpointMismatch
from qwen3tts_core.model.weights import TensorSource, WeightReader

# transformers 5 applies the config's window of 250 steps, the reference's version didn't (quirk Q6):
# a window no clip fills is none.
_NO_WINDOW = 1 << 30

# Module names moved between transformers 5.17 and 5.24; the checkpoint keeps the older ones.
_MOVED = {
    "encoder.encoder_seanet.": "encoder.",
    "encoder.encoder_transformer.": "encoder_transformer.",
    "encoder.downsample.": "downsample.",
}


class CodecEncoder(nn.Module):
    """Reference audio to codes, as many groups as the codec's decoder reads."""

    def __init__(
        self,
        source: TensorSource,
        encoder: Mapping[str, Any],
        codec: CodecDecoderConfig,
        device: torch.device,
    ) -> None:
        """encoder: the checkpoint's `encoder_config`. Raises CheckpointMismatch for what doesn't fit."""
        super().__init__()
        self.num_groups = codec.num_quantizers
        config = _mimi_config(source.where, encoder, codec)
        with device:
            mimi = MimiModel(config)
        _drop_unused(mimi)
        reader = WeightReader(
            source,
            owned="encoder.",
            elsewhere=("decoder.",),
            known_unused=tuple(_unused_tensors(encoder, config)),
            device=device,
            dtype=torch.float32,
        )
        # `initialized` marks a codebook that training has begun to fill; nothing reads it here.
        needed = {name: w for name, w in mimi.state_dict().items() if not name.endswith(".initialized")}
        weights = {name: reader.take(_name_in_file(name), *w.shape) for name, w in needed.items()}
        reader.finish()
        mimi.load_state_dict(weights, strict=False, assign=True)
        self.mimi = mimi.eval().requires_grad_(False)

    def forward(self, samples: Tensor) -> Tensor:
        """[n] float32 at 24 kHz -> [ceil(n / samples per frame), G] int64, group 0 first."""
        codes: Tensor = self.mimi.encode(samples[None, None], num_quantizers=self.num_groups).audio_codes
        return codes[0].T.contiguous()


def _mimi_config(where: str, encoder: Mapping[str, Any], codec: CodecDecoderConfig) -> MimiConfig:
    trained_levels = encoder.get("num_quantizers", 0)
    try:
        config = MimiConfig(
            **{
                **encoder,
                "num_quantizers": codec.num_quantizers,
                "sliding_window": _NO_WINDOW,
                "decoder_config": None,  # no decoder is built, where the library knows how
            }
        )
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise CheckpointMismatch(where, [f"encoder_config: {error}"]) from error
    expected = {
        "num_quantizers": (
            trained_levels,
            trained_levels >= codec.num_quantizers,
            f"{codec.num_quantizers} or more",
        ),
        "codebook_size": (
            config.codebook_size,
            config.codebook_size == codec.codebook_size,
            codec.codebook_size,
        ),
        "sampling_rate": (config.sampling_rate, config.sampling_rate == CLIP_RATE_HZ, CLIP_RATE_HZ),
        "audio_channels": (config.audio_channels, config.audio_channels == 1, 1),
        "use_causal_conv": (config.use_causal_conv, config.use_causal_conv, True),
        "samples per frame": (
            config.frame_size,
            config.frame_size == codec.samples_per_frame,
            codec.samples_per_frame,
        ),
    }
    problems = [
        f"encoder_config.{key}: expected {wanted}, got {got}"
        for key, (got, fits, wanted) in expected.items()
        if not fits
    ]
    if problems:
        raise CheckpointMismatch(where, problems)
    return config


def _drop_unused(mimi: MimiModel) -> None:
    """Decoder, its transformer, the upsampler, and the projections back from the codebooks."""
    children = dict(mimi.named_children())
    for name in ("decoder", "decoder_transformer", "upsample"):
        if name in children:
            setattr(mimi, name, None)
    for quantizer in mimi.quantizer.children():
        quantizer.output_proj = None


def _name_in_file(name: str) -> str:
    for moved, original in _MOVED.items():
        if name.startswith(moved):
            return original + name.removeprefix(moved)
    return name


def _unused_tensors(encoder: Mapping[str, Any], config: MimiConfig) -> Iterator[str]:
    """Patterns of the encoder's tensors that the reference doesn't use either, or whose result it drops."""
    yield "encoder.quantizer.*.initialized"
    yield "encoder.quantizer.*.output_proj.weight"
    num_semantic = config.num_semantic_quantizers
    for level in range(config.num_quantizers - num_semantic, encoder["num_quantizers"] - num_semantic):
        yield f"encoder.quantizer.acoustic_residual_vector_quantizer.layers.{level}.codebook.*"
