"""The codec in its trainable form: the decoder under its official names, and an encoder for training only.

`qwen3tts_core.model.codec_decoder` computes the same from frozen, folded weights; a test holds the
two together. This one's `state_dict` *is* the official layout, without the prefix `decoder.`.
Source: spec 4.1 (layers), 1.6 (names). The encoder is our own: it may look ahead, and no checkpoint holds it.

Shape letters: B rows, F frames, C channels, T steps at some layer's rate, D width.

Convolutions run as images of height one, which may lie in memory with channels innermost; one-dimensional
ones may not, and cuDNN then spends a fifth of the time on turning them there and back (measured).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from checkpoints.speaking.recipe.layers import Mlp, RmsNorm, rope_angles, rotate
from checkpoints.speaking.recipe.layout import SAMPLES_PER_FRAME
from checkpoints.speaking.recipe.mel import Mel
from checkpoints.speaking.recipe.rvq import SplitQuantizer
from qwen3tts_core.config import CodecDecoderConfig, TransformerConfig

_KERNEL, _DILATIONS = 7, (1, 3, 9)
_LAYER_SCALE = 0.1  # at the start; the published 0.01 is for much deeper stacks
_SNAKE_EPS = 1e-9


class CausalConv(nn.Module):
    def __init__(self, num_in: int, num_out: int, kernel: int, *, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(num_in, num_out, kernel, dilation=dilation, groups=groups)
        self.reach = (kernel - 1) * dilation

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        rows = functional.pad(x[:, :, None], (self.reach, 0))
        y = functional.conv2d(
            rows, conv.weight[:, :, None], conv.bias, dilation=(1, *conv.dilation), groups=conv.groups
        )
        return y[:, :, 0]


class CausalUpsample(nn.Module):
    """Transposed conv without what would reach beyond the last input."""

    def __init__(self, num_in: int, num_out: int, *, stride: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(num_in, num_out, kernel, stride=stride)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        y = functional.conv_transpose2d(
            x[:, :, None], conv.weight[:, :, None], conv.bias, stride=(1, self.stride)
        )
        return y[:, :, 0, : x.shape[-1] * self.stride]


class Snake(nn.Module):
    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(num_channels))
        self.beta = nn.Parameter(torch.zeros(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            from checkpoints.speaking.recipe.snake_kernel import fused_snake  # only here: needs Triton

            return fused_snake(x, self.alpha, self.beta, _SNAKE_EPS)
        frequency, gain = self.alpha.exp()[:, None], 1.0 / (self.beta.exp() + _SNAKE_EPS)[:, None]
        return (x + gain * (x * frequency).sin().square()).to(x.dtype)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(width, width, _KERNEL, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), _LAYER_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.dwconv(x).transpose(1, 2))
        h = self.gamma * self.pwconv2(functional.gelu(self.pwconv1(h)))
        return x + h.transpose(1, 2)


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), _LAYER_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class Attention(nn.Module):
    """Over a band of frames: `visible` [F, F] says which."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim, self.repeats = config.head_dim, config.num_heads // config.num_kv_heads
        self.q_proj = nn.Linear(config.hidden_size, rows, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_rows, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_rows, bias=False)
        self.o_proj = nn.Linear(rows, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (p(x).view(heads).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, *rope), rotate(k, *rope)
        k, v = k.repeat_interleave(self.repeats, dim=1), v.repeat_interleave(self.repeats, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=visible)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class TransformerLayer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.mlp = Mlp(width, config.intermediate_size)
        self.input_layernorm = RmsNorm(width, eps=eps)
        self.post_attention_layernorm = RmsNorm(width, eps=eps)
        self.self_attn_layer_scale = _Scale(width)
        self.mlp_layer_scale = _Scale(width)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), rope, visible))
        y: Tensor = x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return y


class WindowTransformer(nn.Module):
    """[B, C, F] -> [B, C, F]; frame f sees the last `window` frames, itself among them."""

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        transformer, width = config.transformer, config.transformer.hidden_size
        self.window, self.head_dim = config.sliding_window, transformer.head_dim
        self.theta = transformer.rope_theta
        self.input_proj = nn.Linear(config.latent_dim, width)
        self.layers = nn.ModuleList(TransformerLayer(transformer) for _ in range(transformer.num_layers))
        self.norm = RmsNorm(width, eps=transformer.rms_norm_eps)
        self.output_proj = nn.Linear(width, config.latent_dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.input_proj(x.transpose(1, 2))
        behind = _behind(h.shape[1], h.device)
        rope = rope_angles(h.shape[1], self.head_dim, self.theta, h.device)
        for layer in self.layers:
            h = layer(h, rope, (behind >= 0) & (behind < self.window))
        out: Tensor = self.output_proj(self.norm(h)).transpose(1, 2)
        return out


class ResidualUnit(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.act2 = Snake(width), Snake(width)
        self.conv1 = CausalConv(width, width, _KERNEL, dilation=dilation)
        self.conv2 = CausalConv(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.conv2(self.act2(self.conv1(self.act1(x))))
        return y


class DecoderBlock(nn.Module):
    def __init__(self, num_in: int, num_out: int, rate: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            Snake(num_in),
            CausalUpsample(num_in, num_out, stride=rate, kernel=2 * rate),
            *(ResidualUnit(num_out, dilation) for dilation in _DILATIONS),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return y


class TrainableDecoder(nn.Module):
    """Quantised latents to samples; `quantizer` makes the latents from the encoder's."""

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        latent, width = config.latent_dim, config.decoder_dim
        self.quantizer = SplitQuantizer(config.num_quantizers, config.codebook_size, config.codebook_dim)
        self.pre_conv = CausalConv(config.codebook_dim, latent, 3)
        self.pre_transformer = WindowTransformer(config)
        self.upsample = nn.ModuleList(
            nn.Sequential(CausalUpsample(latent, latent, stride=ratio, kernel=ratio), ConvNeXtBlock(latent))
            for ratio in config.upsampling_ratios
        )
        stages: list[nn.Module] = [CausalConv(latent, width, _KERNEL)]
        for rate in config.upsample_rates:
            stages.append(DecoderBlock(width, width // 2, rate))
            width //= 2
        self.decoder = nn.Sequential(*stages, Snake(width), CausalConv(width, 1, _KERNEL))

    def first_half(self, quantized: Tensor) -> Tensor:
        """[B, C, F] -> [B, latent, 4 F]: all that is no convolution stack, at 50 Hz."""
        h: Tensor = self.pre_transformer(self.pre_conv(quantized))
        for stage in self.upsample:
            h = stage(h)
        return h

    def wave(self, h: Tensor) -> Tensor:
        """[B, latent, 4 F] -> [B, F * 1920], unclamped."""
        inner = h.transpose(1, 2).contiguous().transpose(1, 2)  # channels innermost, from here to the samples
        return self.decoder(inner)[:, 0]  # type: ignore[no-any-return]

    def codes_to_wave(self, codes: Tensor) -> Tensor:
        """[B, F, G] int64 -> [B, F * 1920]."""
        first, rest = self.quantizer.rvq_first, self.quantizer.rvq_rest
        quantized = first.output_proj(first.books[0].rows[codes[..., 0]].transpose(1, 2))
        total = sum(book.rows[codes[..., g]] for g, book in enumerate(rest.books, start=1))
        assert isinstance(total, Tensor)
        return self.wave(self.first_half(quantized + rest.output_proj(total.transpose(1, 2))))


class MelEncoder(nn.Module):
    """Samples to latents: log-mel at 50 Hz, convolutions, a stride of 4, attention to both sides.

    [B, F * 1920] -> [B, C, F]. Attention reaches `reach` frames, so that what crops of two seconds have
    taught holds for any length.
    """

    reach = 12

    def __init__(self, config: CodecDecoderConfig, width: int, num_layers: int = 3) -> None:
        super().__init__()
        heads = max(1, width // 64)
        stack = TransformerConfig(width, 2 * width, num_layers, heads, heads, width // heads, 1e-5, 10_000.0)
        self.head_dim, self.theta = stack.head_dim, stack.rope_theta
        self.mel = Mel(1024, SAMPLES_PER_FRAME // 4, 80)
        self.conv_in = nn.Conv1d(80, width, 5, padding=2)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.down = nn.Conv1d(width, width, 8, stride=4, padding=2)
        self.layers = nn.ModuleList(TransformerLayer(stack) for _ in range(num_layers))
        self.conv_out = nn.Conv1d(width, config.codebook_dim, 1)

    def forward(self, wave: Tensor) -> Tensor:
        num_frames = wave.shape[-1] // SAMPLES_PER_FRAME
        bands = self.mel(wave)[..., : 4 * num_frames]
        x = functional.gelu(self.conv_in((bands + 5) / 3))
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + functional.gelu(conv(norm(x.transpose(1, 2)).transpose(1, 2)))
        x = self.down(x).transpose(1, 2)
        rope = rope_angles(num_frames, self.head_dim, self.theta, x.device)
        visible = _behind(num_frames, x.device).abs() <= self.reach
        for layer in self.layers:
            x = layer(x, rope, visible)
        latent = self.conv_out(x.transpose(1, 2))
        # One scale for all: the books then never chase a growing latent.
        return functional.layer_norm(latent.transpose(1, 2), latent.shape[1:2]).transpose(1, 2)


class TrainingHeads(nn.Module):
    """Thrown away after training: log-mel at 100 Hz from the decoder's first half, phones from the first book."""

    num_bands = 80

    def __init__(self, config: CodecDecoderConfig, num_phones: int, labels_per_frame: int) -> None:
        super().__init__()
        self.mel = nn.Conv1d(config.latent_dim, 2 * self.num_bands, 3, padding=1)
        self.phones = nn.Linear(config.codebook_dim, labels_per_frame * num_phones)
        self.num_phones = num_phones

    def mel_bands(self, h: Tensor) -> Tensor:
        """[B, latent, 4 F] -> [B, bands, 8 F]."""
        pairs = self.mel(h).unflatten(1, (2, self.num_bands))
        return pairs.permute(0, 2, 3, 1).flatten(2) * 2 - 5  # type: ignore[no-any-return]

    def phone_logits(self, first_branch: Tensor) -> Tensor:
        """[B, C, F] -> [B, F * labels, phones]."""
        logits = self.phones(first_branch.transpose(1, 2))
        return logits.unflatten(2, (-1, self.num_phones)).flatten(1, 2)  # type: ignore[no-any-return]


class Codec(nn.Module):
    """All that the codec's training changes, the discriminators aside."""

    def __init__(
        self, config: CodecDecoderConfig, encoder_width: int, num_phones: int, labels_per_frame: int
    ) -> None:
        super().__init__()
        self.encoder = MelEncoder(config, encoder_width)
        self.decoder = TrainableDecoder(config)
        self.heads = TrainingHeads(config, num_phones, labels_per_frame)

    @torch.no_grad()
    def encode(self, wave: Tensor) -> Tensor:
        """[B, F * 1920] -> codes [B, F, G] int64."""
        codes: Tensor = self.decoder.quantizer(self.encoder(wave))[2]
        return codes


def _behind(num_frames: int, device: torch.device) -> Tensor:
    """[F, F]: how far key j lies behind query i."""
    frame = torch.arange(num_frames, device=device)
    return frame[:, None] - frame
