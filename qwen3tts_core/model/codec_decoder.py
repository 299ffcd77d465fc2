"""The codec decoder: frames of codes to 24 kHz PCM, whole or piece by piece.

Dequantise, a causal conv, a transformer with a sliding window, two upsamplings with ConvNeXt
blocks, then a stack of Snake convolutions up to the sample rate. Everything is causal: samples of
frame f depend on frames up to f only. Knows nothing of queues, batches of requests or PCM16.
Source: spec 4 (layers 4.1, state 4.4) and 1.6 (tensors).

Shape letters: B rows, F frames, G code groups, C channels, T time steps at some layer's rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from qwen3tts_core.config import CodecDecoderConfig
from qwen3tts_core.model.codec_state import CodecState, NoPast, Past, RowsPast, Tail
from qwen3tts_core.model.codec_transformer import WindowTransformer, take_linear
from qwen3tts_core.model.layers import frozen
from qwen3tts_core.model.weights import SafetensorsFolder, WeightReader
from qwen3tts_core.streaming.pcm import quantize

# Sizes that no config names (spec 4.1).
_PRE_CONV_KERNEL = 3
_KERNEL = 7  # every other conv that looks back
_DILATIONS = (1, 3, 9)
_CONVNEXT_EXPANSION = 4
CONVNEXT_EPS = 1e-6
_CODEBOOK_EPS = 1e-5
_SNAKE_EPS = 1e-9


class Dequantizer(nn.Module):
    """Codes to the sum of their codebook vectors.

    table: [G, codebook_size, codebook_dim] float32, each codebook already through its output
    projection, so that a frame is G gathers and a sum.
    """

    def __init__(self, reader: WeightReader, config: CodecDecoderConfig) -> None:
        super().__init__()
        num_rest = config.num_quantizers - 1
        books = [_projected_codebook(reader.within("rvq_first."), 0, config)]
        books += [_projected_codebook(reader.within("rvq_rest."), i, config) for i in range(num_rest)]
        self.table = frozen(torch.stack(books))
        self.group = nn.Buffer(torch.arange(config.num_quantizers, device=self.table.device))

    def forward(self, codes: Tensor) -> Tensor:
        """[B, F, G] int64 -> [B, codebook_dim, F] float32."""
        return self.table[self.group, codes].sum(dim=2).transpose(1, 2)


def _projected_codebook(reader: WeightReader, layer: int, config: CodecDecoderConfig) -> Tensor:
    width, dtype = config.codebook_dim // 2, torch.float32
    prefix = f"vq.layers.{layer}._codebook"
    total = reader.take(f"{prefix}.embedding_sum", config.codebook_size, width, dtype=dtype)
    usage = reader.take(f"{prefix}.cluster_usage", config.codebook_size, dtype=dtype)
    project = reader.take("output_proj.weight", config.codebook_dim, width, 1, dtype=dtype)[:, :, 0]
    return (total / usage.clamp(min=_CODEBOOK_EPS)[:, None]) @ project.T


class CausalConv(nn.Module):
    """A conv that sees its last (kernel - 1) * dilation inputs and no later one. [B, C, T] -> [B, C', T]."""

    def __init__(
        self,
        reader: WeightReader,
        num_in: int,
        num_out: int,
        kernel: int,
        *,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.weight = frozen(reader.take("conv.weight", num_out, num_in // groups, kernel))
        self.bias = frozen(reader.take("conv.bias", num_out))
        self.dilation, self.groups = dilation, groups
        self.tail = Tail(num_in, (kernel - 1) * dilation)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        x = past.extend(self.tail, x)
        return functional.conv1d(x, self.weight, self.bias, dilation=self.dilation, groups=self.groups)


class CausalUpsample(nn.Module):
    """Transposed conv, `stride` outputs per input; the kernel is 1 or 2 strides long.

        x[n-1] ──┬── stride ──┐                y[n * stride + j] = bias + W[:, :, j] x[n]
        x[n]     │   overlap  ├── stride ──┐                  + W[:, :, j + stride] x[n-1]

    [B, C, T] -> [B, C', T * stride]
    """

    def __init__(self, reader: WeightReader, num_in: int, num_out: int, *, stride: int, kernel: int) -> None:
        super().__init__()
        self.weight = frozen(reader.take("conv.weight", num_in, num_out, kernel))
        self.bias = frozen(reader.take("conv.bias", num_out))
        self.stride = stride
        self.tail = Tail(num_in, kernel // stride - 1)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        y = functional.conv_transpose1d(past.extend(self.tail, x), self.weight, self.bias, stride=self.stride)
        start = self.tail.length * self.stride  # what only the tail made was put out before
        return y[..., start : start + x.shape[-1] * self.stride]


class Snake(nn.Module):
    """x + sin²(x · exp(alpha)) / (exp(beta) + 1e-9), per channel, in float32."""

    def __init__(self, reader: WeightReader, num_channels: int) -> None:
        super().__init__()
        alpha = reader.take("alpha", num_channels, dtype=torch.float32)
        beta = reader.take("beta", num_channels, dtype=torch.float32)
        self.frequency = frozen(alpha.exp()[:, None])
        self.gain = frozen(1.0 / (beta.exp() + _SNAKE_EPS)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.gain * (x * self.frequency).sin().square()).to(x.dtype)


class ConvNeXtBlock(nn.Module):
    """x + gamma · MLP(LayerNorm(depthwise conv of x)), at one rate. [B, C, T] -> [B, C, T]."""

    def __init__(self, reader: WeightReader, width: int) -> None:
        super().__init__()
        inner = _CONVNEXT_EXPANSION * width
        self.dwconv = CausalConv(reader.within("dwconv."), width, width, _KERNEL, groups=width)
        self.norm_weight = frozen(reader.take("norm.weight", width))
        self.norm_bias = frozen(reader.take("norm.bias", width))
        self.up, self.up_bias = take_linear(reader.within("pwconv1."), width, inner)
        self.down, self.down_bias = take_linear(reader.within("pwconv2."), inner, width)
        self.gamma = frozen(reader.take("gamma", width))

    def forward(self, x: Tensor, past: Past) -> Tensor:
        h = self.dwconv(x, past).transpose(1, 2)
        h = functional.layer_norm(h, h.shape[-1:], self.norm_weight, self.norm_bias, CONVNEXT_EPS)
        h = functional.gelu(functional.linear(h, self.up, self.up_bias))
        h = self.gamma * functional.linear(h, self.down, self.down_bias)
        return x + h.transpose(1, 2)


class ResidualUnit(nn.Module):
    """x + conv1(Snake(conv7(Snake(x)))), the 7-wide one dilated. [B, C, T] -> [B, C, T]."""

    def __init__(self, reader: WeightReader, width: int, dilation: int) -> None:
        super().__init__()
        self.act1 = Snake(reader.within("act1."), width)
        self.conv1 = CausalConv(reader.within("conv1."), width, width, _KERNEL, dilation=dilation)
        self.act2 = Snake(reader.within("act2."), width)
        self.conv2 = CausalConv(reader.within("conv2."), width, width, 1)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        h: Tensor = self.conv1(self.act1(x), past)
        h = self.conv2(self.act2(h), past)
        return x + h


class DecoderBlock(nn.Module):
    """Snake, upsample by `rate`, three residual units. [B, C, T] -> [B, C', T * rate]."""

    def __init__(self, reader: WeightReader, num_in: int, num_out: int, rate: int) -> None:
        super().__init__()
        self.act = Snake(reader.within("block.0."), num_in)
        self.upsample = CausalUpsample(
            reader.within("block.1."), num_in, num_out, stride=rate, kernel=2 * rate
        )
        self.units = nn.ModuleList(
            ResidualUnit(reader.within(f"block.{2 + i}."), num_out, dilation)
            for i, dilation in enumerate(_DILATIONS)
        )

    def forward(self, x: Tensor, past: Past) -> Tensor:
        x = self.upsample(self.act(x), past)
        for unit in self.units:
            x = unit(x, past)
        return x


class CodecDecoder(nn.Module):
    """The decoder of one checkpoint, in one dtype on one device. Holds no stream's state."""

    def __init__(self, reader: WeightReader, config: CodecDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.device, self.dtype = reader.device, reader.dtype
        latent, width = config.latent_dim, config.decoder_dim
        self.quantizer = Dequantizer(reader.within("quantizer."), config)
        self.pre_conv = CausalConv(reader.within("pre_conv."), config.codebook_dim, latent, _PRE_CONV_KERNEL)
        self.transformer = WindowTransformer(reader.within("pre_transformer."), config)
        self.upsample = nn.ModuleList()
        for i, ratio in enumerate(config.upsampling_ratios):
            inner = reader.within(f"upsample.{i}.")
            self.upsample.append(
                CausalUpsample(inner.within("0."), latent, latent, stride=ratio, kernel=ratio)
            )
            self.upsample.append(ConvNeXtBlock(inner.within("1."), latent))
        self.conv_in = CausalConv(reader.within("decoder.0."), latent, width, _KERNEL)
        self.blocks = nn.ModuleList()
        for i, rate in enumerate(config.upsample_rates, start=1):
            self.blocks.append(DecoderBlock(reader.within(f"decoder.{i}."), width, width // 2, rate))
            width //= 2
        last = len(self.blocks) + 1
        self.act_out = Snake(reader.within(f"decoder.{last}."), width)
        self.conv_out = CausalConv(reader.within(f"decoder.{last + 1}."), width, 1, _KERNEL)

    @classmethod
    def load(cls, reader: WeightReader, config: CodecDecoderConfig) -> CodecDecoder:
        """Take every tensor from `reader`, whose `finish` is the caller's."""
        return cls(reader, config)

    # ------------------------------------------------------------ state
    @property
    def tails(self) -> list[Tail]:
        """Every layer's memory, in one fixed order."""
        tails = (getattr(module, "tail", None) for module in self.modules())
        return [tail for tail in tails if isinstance(tail, Tail)]

    def new_state(self, num_rows: int) -> CodecState:
        """An arena of fresh rows on the model's device."""
        return CodecState(self.tails, num_rows, device=self.device, dtype=self.dtype)

    # ------------------------------------------------------------ decoding
    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Tensor:
        """Frames from the start of a stream, in one piece.

        codes: [B, F, G] int64, each in [0, codebook_size), not checked here; F at least 1. Rows of
        different length are padded on the right with any valid code. Attention costs F² memory.
        Returns [B, F * samples_per_frame] float32 in [-1, 1].
        """
        return self._pcm(codes, NoPast(len(codes), codes.device))

    @torch.inference_mode()
    def decode_step(self, codes: Tensor, state: CodecState, rows: Tensor, num_valid: Tensor) -> Tensor:
        """Continue the streams in `rows` of the arena by `num_valid` frames each.

        codes: [B, F, G] int64 as for `decode`; frames from num_valid on are padding, whose samples
        mean nothing and which the state never sees. state: changed in place. rows: [B] int64,
        different but for rows with num_valid 0. num_valid: [B] int64 in [0, F].
        Returns [B, F * samples_per_frame] float32 in [-1, 1]. Reads nothing on the host and branches
        on shapes alone: a CUDA graph can capture it.
        """
        past = RowsPast(state, rows, num_valid, codes.shape[1])
        pcm = self._pcm(codes, past)
        past.commit()
        return pcm

    def decode_samples(self, codes: Tensor) -> Tensor:
        """`decode`, quantised: int16."""
        return quantize(self.decode(codes))

    def decode_step_samples(
        self, codes: Tensor, state: CodecState, rows: Tensor, num_valid: Tensor
    ) -> Tensor:
        """`decode_step`, quantised: int16."""
        return quantize(self.decode_step(codes, state, rows, num_valid))

    def prepare(self, steps: Sequence[Callable[[], object]]) -> None:
        """Before the first of these steps: nothing to compile here."""

    @property
    def bytes_per_frame(self) -> int:
        """About what a step holds at once for each of its frames: input, residual, output and a tail's join."""
        return 4 * self.config.widest_stage * self.dtype.itemsize

    def _pcm(self, codes: Tensor, past: Past) -> Tensor:
        x = codes
        for _, output in self.stages(codes, past):
            x = output
        return x[:, 0].float().clamp(-1.0, 1.0)

    def stages(self, codes: Tensor, past: Past) -> Iterator[tuple[str, Tensor]]:
        """The model itself: each stage's name and output [B, C, T]; the last is the unclamped wave, C = 1."""
        x = self.quantizer(codes).to(self.dtype)
        yield "quantized", x
        x = self.pre_conv(x, past)
        yield "pre_conv", x
        x = self.transformer(x, past)
        yield "transformer", x
        for i in range(0, len(self.upsample), 2):
            x = self.upsample[i + 1](self.upsample[i](x, past), past)
        yield "upsampled", x
        x = self.conv_in(x, past)
        yield "decoder_0", x
        for i, block in enumerate(self.blocks, start=1):
            x = block(x, past)
            yield f"decoder_{i}", x
        yield "wav", self.conv_out(self.act_out(x), past)


def open_codec_decoder(
    checkpoint: Path,
    config: CodecDecoderConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> CodecDecoder:
    """Load the decoder of a checkpoint folder.

    Raises CheckpointMismatch listing every tensor that is missing, misshapen or left over.
    """
    reader = WeightReader(
        SafetensorsFolder(checkpoint / "speech_tokenizer"),
        owned="decoder.",
        elsewhere=("encoder.",),
        known_unused=("decoder.quantizer.rvq_*.input_proj.weight",),  # the encoder's direction (spec 1.6)
        device=device,
        dtype=dtype,
    )
    decoder = CodecDecoder.load(reader, config)
    reader.finish()
    return decoder
