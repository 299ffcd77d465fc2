"""The codec decoder as a sequence of fused kernels: the same model as `codec_decoder.py`, made for a GPU.

`FusedCodecDecoder` is built from a plain `CodecDecoder` in float32, whose weights it repacks once. It
knows which layer follows which, so that each product also does what comes next: bias, residual, the
next layer's Snake, the next layer's tail. How anything is computed is `CodecKernels`' affair.

Two formats (ops/codec_interface.py): `front` for everything up to the convolution stack, 5 % of the
work, and `stack` for the rest. In half precision most of the error would come from the front, through
which every sample passes, so there it stays exact.

Shape letters as in ops/codec_interface.py. Source: spec 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qwen3tts_core.model import codec_decoder as plain
from qwen3tts_core.model.codec_state import CodecState, Tail
from qwen3tts_core.model.codec_transformer import TransformerLayer
from qwen3tts_core.ops.codec_interface import (
    ArenaRows,
    CodecKernels,
    CodecStep,
    ConvWeights,
    Format,
    Snake,
    TailKind,
    TailLayout,
    TailSpan,
    pack,
)

_EXACT = Format(torch.float16, 2)


@dataclass(frozen=True, slots=True)
class Precision:
    """How a `codec_dtype` is computed. residual: what the stack's residual stream is stored in."""

    front: Format
    stack: Format
    residual: torch.dtype


PRECISIONS = {
    torch.float32: Precision(_EXACT, _EXACT, torch.float32),
    torch.float16: Precision(_EXACT, Format(torch.float16, 1), torch.float32),
    torch.bfloat16: Precision(_EXACT, Format(torch.bfloat16, 1), torch.float32),
}


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """qkv and gate_up hold their norm's weight, out and down their branch's scale."""

    qkv: ConvWeights
    out: ConvWeights
    gate_up: ConvWeights
    down: ConvWeights
    num_heads: int
    eps: float
    ring: TailSpan


@dataclass(frozen=True, slots=True, eq=False)
class _Upsample:
    """A transposed conv without overlap and its ConvNeXt block; down holds gamma."""

    conv: ConvWeights
    depthwise: Tensor
    depthwise_bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    up: ConvWeights
    down: ConvWeights
    tail: TailSpan


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    act: Snake
    first: ConvWeights
    between: Snake
    second: ConvWeights
    tail: TailSpan


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    act: Snake
    upsample: ConvWeights
    tail: TailSpan
    units: list[_Unit]


@dataclass(slots=True)
class _Spans:
    """Gives each layer its place in a stream's row. Rings come last."""

    tails: list[Tail] = field(default_factory=list)
    spans: list[TailSpan] = field(default_factory=list)
    _offset: int = 0

    def add(self, length: int, channels: int, rate: int, kind: TailKind) -> TailSpan:
        span = TailSpan(self._offset, length, channels, rate, kind)
        self.tails.append(Tail(channels, length))
        self.spans.append(span)
        self._offset += span.size
        return span


class FusedCodecDecoder:
    """See `CodecDecoder`, whose methods these are. `dtype` is what was asked for; the state is float32."""

    def __init__(self, decoder: plain.CodecDecoder, kernels: CodecKernels, precision: Precision) -> None:
        assert decoder.dtype == torch.float32, "weights are rounded once, from float32"
        self.config, self.device, self.kernels = decoder.config, decoder.device, kernels
        self._front, self._stack, self._residual = precision.front, precision.stack, precision.residual
        config, front, stack = decoder.config, precision.front, precision.stack
        spans = _Spans()

        self._table = decoder.quantizer.table
        self._pre_conv, self._pre_tail = _conv(decoder.pre_conv, front, spans, 1, "front")
        rate = 1
        self._upsamples: list[_Upsample] = []
        for i in range(0, len(decoder.upsample), 2):
            conv, block = decoder.upsample[i], decoder.upsample[i + 1]
            assert isinstance(conv, plain.CausalUpsample)
            assert isinstance(block, plain.ConvNeXtBlock)
            rate *= conv.stride
            width = conv.weight.shape[1]
            self._upsamples.append(
                _Upsample(
                    conv=_transposed(conv, front),
                    depthwise=block.dwconv.weight[:, 0].T.contiguous(),
                    depthwise_bias=block.dwconv.bias,
                    norm_weight=block.norm_weight,
                    norm_bias=block.norm_bias,
                    up=pack(block.up, block.up_bias, front),
                    down=pack(block.gamma[:, None] * block.down, block.gamma * block.down_bias, front),
                    tail=spans.add(block.dwconv.tail.length, width, rate, "wide"),
                )
            )
        self._conv_in, self._in_tail = _conv(decoder.conv_in, front, spans, rate, "front")
        self._blocks: list[_Block] = []
        for module in decoder.blocks:
            assert isinstance(module, plain.DecoderBlock)
            tail = spans.add(module.upsample.tail.length, module.upsample.weight.shape[0], rate, "stack")
            rate *= module.upsample.stride
            units = []
            for unit in module.units:
                assert isinstance(unit, plain.ResidualUnit)
                first, unit_tail = _conv(unit.conv1, stack, spans, rate, "stack")
                second = pack(unit.conv2.weight[:, :, 0], unit.conv2.bias, stack)
                units.append(_Unit(_snake(unit.act1), first, _snake(unit.act2), second, unit_tail))
            self._blocks.append(_Block(_snake(module.act), _transposed(module.upsample, stack), tail, units))
        last = decoder.conv_out
        self._act_out = _snake(decoder.act_out)
        self._wave_weights = last.weight[0].T.contiguous()
        self._wave_bias = float(last.bias)
        self._wave_tail = spans.add(last.tail.length, last.weight.shape[1], rate, "stack")
        self._read_transformer(decoder, spans)
        self._tails = spans.tails
        self._layout = TailLayout(spans.spans, front, stack, decoder.device)
        assert rate == config.samples_per_frame

    def _read_transformer(self, decoder: plain.CodecDecoder, spans: _Spans) -> None:
        model, config = decoder.transformer, decoder.config.transformer
        self._project_in = pack(model.project_in, model.bias_in, self._front)
        self._layers: list[_Layer] = []
        for layer in model.layers:
            assert isinstance(layer, TransformerLayer)
            attention = layer.attention
            gate, up = (layer.gate_up * layer.mlp_norm).chunk(2)
            self._layers.append(
                _Layer(
                    qkv=pack(attention.qkv * layer.attention_norm, None, self._front),
                    out=pack(layer.attention_scale[:, None] * attention.out, None, self._front),
                    gate_up=pack(torch.stack([gate, up], dim=1).flatten(0, 1), None, self._front),
                    down=pack(layer.mlp_scale[:, None] * layer.down, None, self._front),
                    num_heads=config.num_heads,
                    eps=layer.eps,
                    ring=spans.add(attention.tail.length, attention.tail.channels, 1, "ring"),
                )
            )
        self._project_out = pack(model.project_out * model.norm, model.bias_out, self._front)
        self._norm_eps = model.eps
        half = torch.arange(0, config.head_dim, 2, device=decoder.device).float() / config.head_dim
        self._inverse_frequency = config.rope_theta**-half

    def prepare(self, steps: Sequence[Callable[[], object]]) -> None:
        """See `CodecKernels.prepare`."""
        self.kernels.prepare(steps)

    @property
    def bytes_per_frame(self) -> int:
        """About what a step holds at once for each of its frames: planes and residual, of a unit's input and output."""
        planes = self._stack.planes * self._stack.dtype.itemsize
        return 2 * self.config.widest_stage * (planes + self._residual.itemsize)

    # ------------------------------------------------------------ state
    def new_state(self, num_rows: int) -> CodecState:
        """An arena of fresh rows on the model's device."""
        return CodecState(self._tails, num_rows, device=self.device, dtype=torch.float32)

    # ------------------------------------------------------------ decoding
    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Tensor:
        """See `CodecDecoder.decode`."""
        step = self.kernels.begin_fresh(self._layout, len(codes), codes.shape[1])
        return self._wave(step, codes).clamp(-1.0, 1.0)

    @torch.inference_mode()
    def decode_step(self, codes: Tensor, state: CodecState, rows: Tensor, num_valid: Tensor) -> Tensor:
        """See `CodecDecoder.decode_step`."""
        return self._wave(self._begin(codes, state, rows, num_valid), codes).clamp(-1.0, 1.0)

    @torch.inference_mode()
    def decode_samples(self, codes: Tensor) -> Tensor:
        """`decode`, quantised: int16."""
        step = self.kernels.begin_fresh(self._layout, len(codes), codes.shape[1])
        return self._samples(step, codes)

    @torch.inference_mode()
    def decode_step_samples(
        self, codes: Tensor, state: CodecState, rows: Tensor, num_valid: Tensor
    ) -> Tensor:
        """`decode_step`, quantised: int16."""
        return self._samples(self._begin(codes, state, rows, num_valid), codes)

    def _begin(self, codes: Tensor, state: CodecState, rows: Tensor, num_valid: Tensor) -> CodecStep:
        arena = ArenaRows(state.values, state.positions, rows.contiguous(), num_valid.contiguous())
        return self.kernels.begin(self._layout, arena, codes.shape[1])

    def _wave(self, step: CodecStep, codes: Tensor) -> Tensor:
        x = self._activations(step, codes)
        return self.kernels.wave(step, x, self._wave_weights, self._wave_bias, self._wave_tail)

    def _samples(self, step: CodecStep, codes: Tensor) -> Tensor:
        x = self._activations(step, codes)
        return self.kernels.samples(step, x, self._wave_weights, self._wave_bias, self._wave_tail)

    def _activations(self, step: CodecStep, codes: Tensor) -> Tensor:
        """Everything but the last conv: planes [P, samples, C]."""
        conv, front = self.kernels.conv, self._front
        x = self.kernels.lookup(step, codes.contiguous(), self._table, front)
        x = conv(step, x, self._pre_conv, tail=self._pre_tail, out=front).narrow
        x = self._transform(step, x)
        for up in self._upsamples:
            h = conv(step, x, up.conv, raw=torch.float32).wide
            x = self.kernels.depthwise_norm(
                step, h, up.depthwise, up.depthwise_bias, up.norm_weight, up.norm_bias,
                plain.CONVNEXT_EPS, up.tail, front,
            )  # fmt: skip
            x = conv(step, x, up.up, activation="gelu", out=front).narrow
            x = conv(step, x, up.down, residual=h, out=front).narrow
        x = conv(
            step, x, self._conv_in, tail=self._in_tail, activation=self._blocks[0].act, out=self._stack
        ).narrow
        return self._convolve(step, x)

    def _transform(self, step: CodecStep, x: Tensor) -> Tensor:
        conv, front, wide = self.kernels.conv, self._front, torch.float32
        rope = self.kernels.rope(step, self._inverse_frequency)
        h = conv(step, x, self._project_in, out=front, raw=wide, sums=True)
        for layer in self._layers:
            qkv = conv(step, h.narrow, layer.qkv, raw=wide, norm=_norm(h.sums, layer.eps)).wide
            mixed = self.kernels.attention(step, qkv, rope, layer.ring, layer.num_heads, front)
            h = conv(step, mixed, layer.out, residual=h.raw, out=front, raw=wide, sums=True)
            gated = conv(
                step, h.narrow, layer.gate_up, activation="gated", out=front, norm=_norm(h.sums, layer.eps)
            ).narrow
            h = conv(step, gated, layer.down, residual=h.raw, out=front, raw=wide, sums=True)
        return conv(step, h.narrow, self._project_out, out=front, norm=_norm(h.sums, self._norm_eps)).narrow

    def _convolve(self, step: CodecStep, x: Tensor) -> Tensor:
        """The blocks. Each layer's output is what the next one reads: Snake is through already."""
        block_acts = [*(block.act for block in self._blocks[1:]), self._act_out]
        for block, act_after in zip(self._blocks, block_acts, strict=True):
            made = self.kernels.conv(
                step, x, block.upsample, tail=block.tail,
                activation=block.units[0].act, out=self._stack, raw=self._residual,
            )  # fmt: skip
            acts = [*(unit.act for unit in block.units[1:]), act_after]
            for unit, act in zip(block.units, acts, strict=True):
                made = self.kernels.residual_unit(
                    step, made.narrow, made.wide, unit.first, unit.between, unit.second, tail=unit.tail,
                    activation=act, out=self._stack, raw=None if act is act_after else self._residual,
                )  # fmt: skip
            x = made.narrow
        return x


def _norm(sums: Tensor | None, eps: float) -> tuple[Tensor, float]:
    assert sums is not None
    return sums, eps


def _snake(module: plain.Snake) -> Snake:
    return Snake(module.frequency[:, 0].contiguous(), module.gain[:, 0].contiguous())


def _conv(
    module: plain.CausalConv, form: Format, spans: _Spans, rate: int, kind: TailKind
) -> tuple[ConvWeights, TailSpan]:
    """Weights [N, C, taps] of a causal conv, and its tail."""
    weights = pack(module.weight.transpose(1, 2), module.bias, form, dilation=module.dilation)
    return weights, spans.add(weights.reach, weights.num_in, rate, kind)


def _transposed(module: plain.CausalUpsample, form: Format) -> ConvWeights:
    """Weights [C, C', kernel]: output j of an input sees W[..., j] of it and W[..., j + stride] of the one before."""
    num_in, num_out, kernel = module.weight.shape
    taps = kernel // module.stride
    weight = module.weight.view(num_in, num_out, taps, module.stride).flip(2)  # the oldest tap first
    weight = weight.permute(3, 1, 2, 0).reshape(module.stride * num_out, taps, num_in)
    return pack(weight, module.bias, form, num_out=num_out)
