"""`CodecKernels` on a GPU: launches the Triton kernels of `codec_triton.py`.

pdl: kernels overlap (ops/cuda/pdl.py); off before Hopper and where the interpreter runs them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor

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
from qwen3tts_core.ops.cuda import codec_triton as kernels
from qwen3tts_core.ops.cuda.codec_tiles import choose_conv_tile, choose_unit_tile
from qwen3tts_core.ops.cuda.linear import launch_options


class TritonCodecKernels:
    """See `CodecKernels`."""

    name = "triton"

    def __init__(self, device: torch.device, *, num_processors: int, pdl: bool = True) -> None:
        self._device, self._num_processors, self._pdl = device, num_processors, pdl
        self._options = {"PDL": pdl, **launch_options(pdl)}
        self._is_compiling = False

    def prepare(self, steps: Sequence[Callable[[], object]]) -> None:
        # Compilers spend their time outside the interpreter's lock, so threads do. The binaries stay on
        # disk (~/.triton), so that only the first start on a machine takes long.
        self._is_compiling = True
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
                for step in steps:
                    step()
        finally:
            self._is_compiling = False

    def _launch(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], **options: Any) -> None:
        if self._is_compiling:
            kernel.warmup(*args, grid=grid, **options, **self._options)
        else:
            kernel[grid](*args, **options, **self._options)

    # ------------------------------------------------------------ rows
    def begin(self, layout: TailLayout, arena: ArenaRows, num_frames: int) -> CodecStep:
        num_rows, width = len(arena.rows), layout.num_copied
        step = CodecStep(
            num_rows,
            num_frames,
            position=torch.empty(num_rows, dtype=torch.int64, device=self._device),
            wide=self._empty(torch.float32, num_rows, width),
            front=self._empty(layout.front.dtype, layout.front.planes, num_rows, width),
            stack=self._empty(layout.stack.dtype, layout.stack.planes, num_rows, width),
            arena=arena,
        )
        self._launch(
            kernels.begin_kernel, (len(layout.lines), num_rows),
            (
                layout.lines, arena.values, arena.positions, arena.rows,
                step.position, step.wide, step.front, step.stack,
                arena.values.shape[1], width, num_rows * width,
            ),
            FRONT_PLANES=layout.front.planes, STACK_PLANES=layout.stack.planes,
            BLOCK_C=triton.next_power_of_2(layout.max_channels), num_warps=4,
        )  # fmt: skip
        return step

    def begin_fresh(self, layout: TailLayout, num_rows: int, num_frames: int) -> CodecStep:
        def zeros(dtype: torch.dtype, planes: int) -> Tensor:
            return torch.zeros(planes, layout.max_reach, dtype=dtype, device=self._device)

        return CodecStep(
            num_rows, num_frames,
            position=torch.zeros(num_rows, dtype=torch.int64, device=self._device),
            wide=zeros(torch.float32, 1)[0],
            front=zeros(layout.front.dtype, layout.front.planes),
            stack=zeros(layout.stack.dtype, layout.stack.planes),
        )  # fmt: skip

    def _empty(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    # ------------------------------------------------------------ layers
    def lookup(self, step: CodecStep, codes: Tensor, table: Tensor, form: Format) -> Tensor:
        num_groups, num_codes, width = table.shape
        num_rows = step.num_rows * step.num_frames
        out = self._empty(form.dtype, form.planes, num_rows, width)
        block = min(256, triton.next_power_of_2(width))
        self._launch(
            kernels.lookup_kernel, (num_rows, triton.cdiv(width, block)),
            (
                codes, table, out, width, num_codes, out.stride(0),
            ),
            G=num_groups, OUT_PLANES=form.planes, BLOCK_C=block, num_warps=2,
        )  # fmt: skip
        return out

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
        planes, num_rows, num_in = x.shape
        n = weights.planes.shape[1]
        tile = choose_conv_tile(num_rows, n, num_in, planes, num_processors=self._num_processors)
        n_tiles = triton.cdiv(n, tile.block_n)
        width = n // 2 if activation == "gated" else n
        snake = activation if isinstance(activation, Snake) else None
        assert norm is None or norm[0].shape[1] <= kernels.MAX_SUMS.value
        made = ConvOut(
            raw=None if raw is None else self._empty(raw, num_rows, n),
            planes=None if out is None else self._empty(out.dtype, out.planes, num_rows, width),
            sums=self._empty(torch.float32, num_rows, n_tiles) if sums else None,
        )
        num_tiles = triton.cdiv(num_rows, tile.block_m) * n_tiles
        keepers = _num_keepers(step, tail)
        self._launch(
            kernels.conv_kernel, (num_tiles + keepers * step.num_rows,),
            (
                x, _tail(step, tail, x), weights.planes,
                _or(weights.bias, x), _or(residual, x),
                snake.frequency if snake else x, snake.gain if snake else x, norm[0] if norm else x,
                _or(made.raw, x), _or(made.planes, x), _or(made.sums, x),
                *_arena(step, x), num_tiles, keepers,
                num_rows, num_rows // step.num_rows, n, num_in, weights.taps, weights.dilation,
                weights.num_out, weights.inv_scale,
                norm[1] if norm else 0.0, norm[0].shape[1] if norm else 0,
                x.stride(0), _tail(step, tail, x).stride(0), weights.planes.stride(0),
                made.planes.stride(0) if made.planes is not None else 0,
                *_tail_place(step, tail), *_kept(step, tail),
            ),
            PLANES=planes, OUT_PLANES=out.planes if out else 0,
            ACTIVATION=_activation_code(activation),
            HAS_BIAS=weights.bias is not None, HAS_RESIDUAL=residual is not None, HAS_RAW=raw is not None,
            HAS_NORM=norm is not None, HAS_SUMS=sums, HAS_KEEP=keepers > 0, N_STEPS=weights.stride > 1,
            EVEN_C=num_in % tile.block_k == 0,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, PREFETCH=tile.prefetch,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return _by_steps(made, weights)

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
        planes, num_rows, width = x.shape
        tile = choose_unit_tile(num_rows, width, planes, num_processors=self._num_processors)
        if tile is None:
            form = Format(x.dtype, planes)
            h = self.conv(step, x, first, tail=tail, activation=between, out=form).narrow
            return self.conv(step, h, second, residual=residual, activation=activation, out=out, raw=raw)
        made = ConvOut(
            raw=None if raw is None else self._empty(raw, num_rows, width),
            planes=self._empty(out.dtype, out.planes, num_rows, width),
            sums=None,
        )
        assert first.bias is not None
        assert second.bias is not None
        num_tiles, keepers = triton.cdiv(num_rows, tile.block_m), _num_keepers(step, tail)
        self._launch(
            kernels.unit_kernel, (num_tiles + keepers * step.num_rows,),
            (
                x, _tail(step, tail, x), residual,
                first.planes, first.bias, between.frequency, between.gain,
                second.planes, second.bias, activation.frequency, activation.gain,
                _or(made.raw, x), made.narrow, *_arena(step, x), num_tiles, keepers,
                num_rows, num_rows // step.num_rows, width, first.taps, first.dilation,
                first.inv_scale, second.inv_scale,
                x.stride(0), _tail(step, tail, x).stride(0), first.planes.stride(0), second.planes.stride(0),
                made.narrow.stride(0), *_tail_place(step, tail), *_kept(step, tail),
            ),
            PLANES=planes, OUT_PLANES=out.planes, HAS_RAW=raw is not None, HAS_KEEP=keepers > 0,
            EVEN_C=width % tile.block_k == 0,
            BLOCK_M=tile.block_m, N0=tile.n0, N1=tile.n1, BLOCK_K=tile.block_k, PREFETCH=tile.prefetch,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return made

    def depthwise_norm(
        self, step: CodecStep, x: Tensor, weight: Tensor, bias: Tensor,
        norm_weight: Tensor, norm_bias: Tensor, eps: float, tail: TailSpan, form: Format,
    ) -> Tensor:  # fmt: skip
        num_rows, width = x.shape
        out = self._empty(form.dtype, form.planes, num_rows, width)
        self._launch(
            kernels.depthwise_norm_kernel, (num_rows,),
            (
                x, step.wide, weight, bias, norm_weight, norm_bias, out, *_arena(step, x),
                num_rows // step.num_rows, width, *_tail_place(step, tail), out.stride(0), *_kept(step, tail), eps,
            ),
            TAPS=len(weight), OUT_PLANES=form.planes, HAS_KEEP=step.arena is not None, BLOCK_C=triton.next_power_of_2(width),
            num_warps=4,
        )  # fmt: skip
        return out

    def rope(self, step: CodecStep, inverse_frequency: Tensor) -> tuple[Tensor, Tensor]:
        num_rows, half = step.num_rows * step.num_frames, len(inverse_frequency)
        cos, sin = (self._empty(torch.float32, num_rows, half) for _ in range(2))
        self._launch(
            kernels.rope_kernel, (num_rows,),
            (
                inverse_frequency, cos, sin, step.position, step.num_frames, half,
            ),
            HALF=triton.next_power_of_2(half), num_warps=1,
        )  # fmt: skip
        return cos, sin

    def attention(
        self, step: CodecStep, qkv: Tensor, rope: tuple[Tensor, Tensor], ring: TailSpan, num_heads: int,
        form: Format,
    ) -> Tensor:  # fmt: skip
        head_dim = 2 * rope[0].shape[1]
        num_kv_heads = (qkv.shape[1] // head_dim - num_heads) // 2
        out = self._empty(form.dtype, form.planes, len(qkv), num_heads * head_dim)
        is_short = step.num_frames <= 16
        block_q = 16 if is_short else 32
        has_arena = step.arena is not None and ring.length > 0
        splits = 1 if step.arena is not None else triton.cdiv(step.num_frames, block_q)
        self._launch(
            kernels.attention_kernel, (step.num_rows * num_kv_heads, splits),
            (
                qkv, *rope, out, *_arena(step, qkv),
                step.num_frames, out.stride(0), *_kept(step, ring)[:2], splits, head_dim**-0.5,
            ),
            H=num_heads, KVH=num_kv_heads, E=head_dim, PAST=ring.length,
            HALF=max(16, triton.next_power_of_2(head_dim // 2)),
            FULL=max(16, triton.next_power_of_2(head_dim)), BLOCK_Q=block_q, BLOCK_T=64 if is_short else 32,
            OUT_PLANES=form.planes, HAS_ARENA=has_arena, num_warps=4, num_stages=2,
        )  # fmt: skip
        return out

    def wave(self, step: CodecStep, x: Tensor, weights: Tensor, bias: float, tail: TailSpan) -> Tensor:
        return self._wave(step, x, weights, bias, tail, torch.float32)

    def samples(self, step: CodecStep, x: Tensor, weights: Tensor, bias: float, tail: TailSpan) -> Tensor:
        return self._wave(step, x, weights, bias, tail, torch.int16)

    def _wave(
        self, step: CodecStep, x: Tensor, weights: Tensor, bias: float, tail: TailSpan, dtype: torch.dtype
    ) -> Tensor:
        planes, num_rows, width = x.shape
        out = self._empty(dtype, step.num_rows, num_rows // step.num_rows)
        tails, block_m = step.tails(tail), 32
        num_tiles, keepers = triton.cdiv(num_rows, block_m), _num_keepers(step, tail)
        self._launch(
            kernels.wave_kernel, (num_tiles + keepers * step.num_rows,),
            (
                x, tails, weights, out, step.arena.positions if step.arena else x, *_arena(step, x), num_tiles, keepers,
                num_rows, num_rows // step.num_rows, width, bias,
                x.stride(0), tails.stride(0), *_tail_place(step, tail), *_kept(step, tail),
            ),
            TAPS=len(weights), PLANES=planes, QUANTIZE=dtype == torch.int16, HAS_KEEP=keepers > 0,
            BLOCK_M=block_m, BLOCK_C=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
        return out


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A kernel takes an address for every pointer, also for those it never follows."""
    return other if tensor is None else tensor


def _arena(step: CodecStep, other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arena, position = step.arena, step.position
    if arena is None:
        return other, position, position, position
    return arena.values, arena.rows, arena.num_valid, position


def _kept(step: CodecStep, keep: TailSpan | None) -> tuple[int, int, int, int]:
    """row_size, offset, length, rate."""
    if keep is None or step.arena is None:
        return 0, 0, 1, 0
    return step.arena.values.shape[1], keep.offset, max(keep.length, 1), keep.rate


def _num_keepers(step: CodecStep, tail: TailSpan | None) -> int:
    """Programs a row that bring the tail up to date; one at least, which also ends the step in `wave_kernel`."""
    if tail is None or step.arena is None or not tail.length:
        return 0
    return -(-tail.size // int(kernels.KEEP_BLOCK.value))


def _tail(step: CodecStep, tail: TailSpan | None, other: Tensor) -> Tensor:
    return other if tail is None else step.tails(tail)


def _tail_place(step: CodecStep, tail: TailSpan | None) -> tuple[int, int]:
    """Row stride and offset in the buffer of tails; without an arena all rows read the same zeros."""
    if tail is None or step.arena is None:
        return 0, 0
    return step.wide.shape[1], tail.offset


_CODES = {None: kernels.NONE, "gelu": kernels.GELU, "gated": kernels.GATED}


def _activation_code(activation: Activation) -> int:
    code = kernels.SNAKE if isinstance(activation, Snake) else _CODES[activation]
    return int(code.value)  # a constexpr, which is untyped


def _by_steps(made: ConvOut, weights: ConvWeights) -> ConvOut:
    """[M, stride * C] is [M * stride, C]."""
    if weights.stride > 1:
        made.raw = None if made.raw is None else made.raw.view(-1, weights.num_out)
        made.planes = None if made.planes is None else made.planes.view(len(made.planes), -1, weights.num_out)
    return made
