"""A codec small enough for a thousand decodes a test, and an outbox that only remembers."""

import dataclasses
import zlib
from collections import defaultdict

import numpy as np
import torch

from qwen3tts_core.config import CodecDecoderConfig, TransformerConfig
from qwen3tts_core.model.codec_decoder import CodecDecoder
from qwen3tts_core.model.weights import ShapesOnly, WeightReader
from qwen3tts_core.types import FrameBatch, ReferenceVoice

MINI = CodecDecoderConfig(
    transformer=TransformerConfig(
        hidden_size=12, intermediate_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
        rms_norm_eps=1e-5, rope_theta=100.0,
    ),
    codebook_dim=8, codebook_size=16, latent_dim=10, num_quantizers=3, sliding_window=5, decoder_dim=16,
    upsample_rates=(3, 2), upsampling_ratios=(2, 3), sample_rate_hz=450,
)  # fmt: skip
"""36 samples a frame, 80 ms; grouped heads, other rates than the published ones."""

PUBLISHED = CodecDecoderConfig(
    transformer=TransformerConfig(
        hidden_size=512, intermediate_size=1024, num_layers=8, num_heads=16, num_kv_heads=16, head_dim=64,
        rms_norm_eps=1e-5, rope_theta=10000.0,
    ),
    codebook_dim=512, codebook_size=2048, latent_dim=1024, num_quantizers=16, sliding_window=72,
    decoder_dim=1536, upsample_rates=(8, 5, 4, 3), upsampling_ratios=(2, 2), sample_rate_hz=24000,
)  # fmt: skip


class RandomWeights(WeightReader):
    """Whatever is asked for is there: random, and the same for the same name."""

    def __init__(self, device="cpu", dtype=torch.float32):
        super().__init__(ShapesOnly("random", {}), owned="", device=device, dtype=dtype)

    def take(self, name, *shape, dtype=None):
        generator = torch.Generator().manual_seed(zlib.crc32((self._owned + name).encode()))
        noise = torch.randn(shape, generator=generator) if self.device.type == "cpu" else torch.zeros(shape)
        if ("norm" in name and name.endswith("weight")) or name.endswith((".scale", "gamma")):
            values = 1.0 + 0.1 * noise
        elif name.endswith("cluster_usage"):
            values = noise.abs() + 0.5
        elif name.endswith("embedding_sum"):
            values = 2.0 * noise  # so that a single code is heard
        elif len(shape) == 1:
            values = 0.1 * noise
        else:
            values = 0.5 * noise / int(np.prod(shape[1:])) ** 0.5  # gentle: full scale is far off
        return values.to(self.device, dtype or self.dtype)


def mini_decoder(device="cpu", dtype=torch.float32, **changes):
    return CodecDecoder.load(RandomWeights(device, dtype), dataclasses.replace(MINI, **changes))


def random_codes(num_frames, seed=0, config=MINI):
    """[F, G] int16."""
    shape = (num_frames, config.num_quantizers)
    return np.random.default_rng(seed).integers(0, config.codebook_size, shape).astype(np.int16)


def whole_pcm(decoder, codes):
    """One-piece decode of [F, G] codes: [F * samples_per_frame] float32."""
    return decoder.decode(torch.from_numpy(codes).long()[None])[0].numpy()


def batch_of(codes, first, num_frames, finish=None):
    part = codes[first : first + num_frames]
    return FrameBatch(first, len(part), codes.shape[1], part.tobytes(), finish)


def reference(key, codes):
    return ReferenceVoice(key, b"", codes.tobytes())


class ListOutbox:
    """items: everything flushed, per request, in order."""

    def __init__(self):
        self.items = defaultdict(list)
        self._pending = []

    def put(self, request_id, item):
        self._pending.append((request_id, item))

    def flush(self):
        for request_id, item in self._pending:
            self.items[request_id].append(item)
        self._pending.clear()

    def pcm(self, request_id):
        """The request's audio so far, int16."""
        return np.frombuffer(b"".join(item.pcm for item in self.items[request_id]), "<i2")
