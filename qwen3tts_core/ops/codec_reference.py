"""`CodecKernels` in plain PyTorch: the meaning of each kernel, and its yardstick. Runs anywhere.

Arithmetic in float32; a value leaves through the format that was asked for, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from qwen3tts_core.ops.codec_interface import (
    Activation,
    ArenaRows,
    CodecStep,
    ConvOut,
    ConvWeights,
    Format,
    Snake,
    TailLayout,
    TailSpan,
)


class ReferenceCodecKernels:
    """The definition of `CodecKernels`."""

    name = "reference"

    def prepare(self, steps: Sequence[Callable[[], object]]) -> None:
        """Nothing is compiled here."""

    # ------------------------------------------------------------ rows
    def begin(self, layout: TailLayout, arena: ArenaRows, num_frames: int) -> CodecStep:
        position = arena.positions[arena.rows]
        wide = arena.values.new_zeros(len(position), layout.num_copied)
        for span in layout.spans:
            if span.kind != "ring" and span.length:
                old = _ordered(arena, position, span)
                wide[:, span.offset : span.offset + span.size] = old.flatten(1)
        return self._step(layout, position, wide, num_frames, arena)

    def begin_fresh(self, layout: TailLayout, num_rows: int, num_frames: int) -> CodecStep:
        wide = torch.zeros(num_rows, layout.num_copied, device=layout.device)
        position = torch.zeros(num_rows, dtype=torch.int64, device=layout.device)
        return self._step(layout, position, wide, num_frames, None)

    def _step(
        self, layout: TailLayout, position: Tensor, wide: Tensor, num_frames: int, arena: ArenaRows | None
    ) -> CodecStep:
        front, stack = layout.front.split(wide), layout.stack.split(wide)
        return CodecStep(len(position), num_frames, position, wide, front, stack, arena)

    # ------------------------------------------------------------ layers
    def lookup(self, step: CodecStep, codes: Tensor, table: Tensor, form: Format) -> Tensor:
        groups = torch.arange(len(table), device=codes.device)
        return form.split(table[groups, codes].sum(dim=2).flatten(0, 1))

    def conv(
        self,
        step: CodecStep,
        x: Tensor,
        weights: ConvWeights,
        *,
        tail: TailSpan | None = None,
        residual: Tensor | None = None,
        activation: Activation = None,
        out: Format | None = None,
        raw: torch.dtype | None = None,
        norm: tuple[Tensor, float] | None = None,
        sums: bool = False,
    ) -> ConvOut:
        inputs = _with_tail(step, x, tail)  # [B, reach + T, C]
        num_steps = inputs.shape[1] - weights.reach
        taps = [inputs[:, at * weights.dilation :][:, :num_steps] for at in range(weights.taps)]
        columns = torch.cat(taps, dim=-1).flatten(0, 1)
        value = columns @ _sum(weights.planes).T * weights.inv_scale
        if norm is not None:
            squares, eps = norm
            value = value * torch.rsqrt(squares.sum(dim=1) / weights.num_in + eps)[:, None]
        if weights.bias is not None:
            value = value + weights.bias.repeat(weights.stride)
        if residual is not None:
            value = value + residual.float()
        made = ConvOut(
            raw=None if raw is None else value.to(raw).view(-1, weights.num_out),
            planes=None,
            sums=value.square().sum(dim=1, keepdim=True) if sums else None,
        )
        if activation == "gated":
            gate, up = value[:, ::2], value[:, 1::2]
            value = functional.silu(gate) * up
        else:
            value = value.view(-1, weights.num_out)
            if isinstance(activation, Snake):
                value = _snake(value, activation)
            elif activation == "gelu":
                value = functional.gelu(value)
        if out is not None:
            made.planes = out.split(value)
        return made

    def residual_unit(
        self,
        step: CodecStep,
        x: Tensor,
        residual: Tensor,
        first: ConvWeights,
        between: Snake,
        second: ConvWeights,
        *,
        tail: TailSpan,
        activation: Snake,
        out: Format,
        raw: torch.dtype | None,
    ) -> ConvOut:
        h = self.conv(step, x, first, tail=tail, activation=between, out=Format(x.dtype, len(x))).narrow
        return self.conv(step, h, second, residual=residual, activation=activation, out=out, raw=raw)

    def depthwise_norm(
        self, step: CodecStep, x: Tensor, weight: Tensor, bias: Tensor,
        norm_weight: Tensor, norm_bias: Tensor, eps: float, tail: TailSpan, form: Format,
    ) -> Tensor:  # fmt: skip
        inputs = _with_tail(step, x[None], tail).transpose(1, 2)
        h = functional.conv1d(inputs, weight.T[:, None], bias, groups=weight.shape[1]).transpose(1, 2)
        h = functional.layer_norm(h, h.shape[-1:], norm_weight, norm_bias, eps)
        return form.split(h.flatten(0, 1))

    def rope(self, step: CodecStep, inverse_frequency: Tensor) -> tuple[Tensor, Tensor]:
        frames = torch.arange(step.num_frames, device=inverse_frequency.device)
        angles = (step.position[:, None] + frames)[:, :, None].float() * inverse_frequency
        return angles.cos().flatten(0, 1), angles.sin().flatten(0, 1)

    def attention(
        self, step: CodecStep, qkv: Tensor, rope: tuple[Tensor, Tensor], ring: TailSpan, num_heads: int,
        form: Format,
    ) -> Tensor:  # fmt: skip
        past, num_frames, head_dim = ring.length, step.num_frames, 2 * rope[0].shape[1]
        heads = qkv.view(step.num_rows, num_frames, -1, head_dim)
        num_kv_heads = (heads.size(2) - num_heads) // 2
        frames = torch.arange(num_frames, device=qkv.device)
        cos, sin = (table.view(step.num_rows, num_frames, 1, -1) for table in rope)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        old = qkv.new_zeros(step.num_rows, past, 2 * num_kv_heads, head_dim)
        if step.arena is not None and past:
            old = _ordered(step.arena, step.position, ring).view_as(old)
        new = torch.cat([k, v], dim=2)
        k, v = torch.cat([old, new], dim=1).chunk(2, dim=2)
        query = frames[:, None]
        key = torch.arange(past + num_frames, device=qkv.device)
        visible = (key >= query) & (key <= query + past)
        visible = visible & (key >= past - step.position[:, None])[:, None, :]
        group = num_heads // num_kv_heads
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k.repeat_interleave(group, dim=2)) * head_dim**-0.5
        shares = scores.masked_fill(~visible[:, None], float("-inf")).softmax(dim=-1)
        mixed = torch.einsum("bhqk,bkhe->bqhe", shares, v.repeat_interleave(group, dim=2))
        if past:
            _keep(step, new.flatten(0, 1), ring)
        return form.split(mixed.flatten(2).flatten(0, 1))

    def wave(self, step: CodecStep, x: Tensor, weights: Tensor, bias: float, tail: TailSpan) -> Tensor:
        inputs = _with_tail(step, x, tail).transpose(1, 2)
        wave = functional.conv1d(inputs, weights.T[None])[:, 0] + bias
        if step.arena is not None:
            step.arena.positions.index_copy_(0, step.arena.rows, step.position + step.arena.num_valid)
        return wave

    def samples(self, step: CodecStep, x: Tensor, weights: Tensor, bias: float, tail: TailSpan) -> Tensor:
        wave = self.wave(step, x, weights, bias, tail).clamp(-1.0, 1.0)
        return (wave * 32767).round().nan_to_num(nan=-32768).short()  # streaming/pcm.py, `quantize`


def _sum(planes: Tensor) -> Tensor:
    return planes.float().sum(dim=0)


def _snake(x: Tensor, snake: Snake) -> Tensor:
    return x + snake.gain * (x * snake.frequency).sin().square()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-form rotary embedding. x: [B, F, heads, E]; cos, sin: [B, F, 1, E / 2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _ring(arena: ArenaRows, span: TailSpan) -> Tensor:
    """A span in every row, the same memory: [all rows, length, channels]."""
    part = arena.values[:, span.offset : span.offset + span.size]
    return part.view(len(part), span.length, span.channels)


def _ordered(arena: ArenaRows, position: Tensor, span: TailSpan) -> Tensor:
    """The step's tails in order of time, zeros before the streams' start: [B, length, channels]."""
    time = position[:, None] * span.rate - span.length + torch.arange(span.length, device=position.device)
    values = _ring(arena, span)[arena.rows[:, None], time.clamp(min=0) % span.length]
    return values.masked_fill((time < 0)[:, :, None], 0.0)


def _with_tail(step: CodecStep, x: Tensor, tail: TailSpan | None) -> Tensor:
    """Planes [P, M, C] -> [B, length + T, C] float32, the tail in front; the arena gets the new tail."""
    value = _sum(x).view(step.num_rows, -1, x.shape[-1])
    if tail is None:
        return value
    _keep(step, value, tail)
    flat = step.wide if tail.kind == "wide" else _sum(step.tails(tail))
    old = flat[:, tail.offset : tail.offset + tail.size].view(step.num_rows, tail.length, tail.channels)
    return torch.cat([old, value], dim=1)


def _keep(step: CodecStep, value: Tensor, keep: TailSpan) -> None:
    """The last valid steps of value [B, T, C], or [B * T, …], into the ring of each row."""
    arena = step.arena
    if arena is None or not keep.length:
        return
    value = value.reshape(step.num_rows, -1, keep.channels)
    ring = _ring(arena, keep)
    now = torch.arange(keep.length, device=value.device)
    # Place p of the ring gets the last valid step at a time that is p modulo the length, if this step has one.
    end = (step.position + arena.num_valid)[:, None] * keep.rate
    time = end - 1 - (end - 1 - now) % keep.length
    at = time - step.position[:, None] * keep.rate
    rows = torch.arange(step.num_rows, device=value.device)[:, None]
    fresh = value[rows, at.clamp(min=0)]
    ring[arena.rows] = torch.where((at >= 0)[:, :, None], fresh, ring[arena.rows])
