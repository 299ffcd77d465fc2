"""The codec's activation in one pass each way. As plain operations it would be about a fifth
of a training step on an H200, by the bytes that they move.

y = x + gain * sin²(x * frequency), with frequency = exp(alpha) and gain = 1 / (exp(beta) + eps) of each
channel (spec 4.1). The inference kernels of `qwen3tts_core.ops.cuda` fuse it into convolutions and have no
gradient, so this is another one.

Shape letters: N rows (batch times steps), C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4_096  # of a program


@triton.jit
def _forward_kernel(
    x_ptr, y_ptr, alpha_ptr, beta_ptr, N, EPS: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, C)
    at = row[:, None] * C + channel[None, :]
    mask = (row < N)[:, None]
    frequency = tl.exp(tl.load(alpha_ptr + channel))[None, :]
    gain = 1.0 / (tl.exp(tl.load(beta_ptr + channel)) + EPS)[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    sine = tl.sin(x * frequency)
    y = x + gain * sine * sine
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    x_ptr, dy_ptr, dx_ptr, alpha_ptr, beta_ptr, sums_ptr, N,
    EPS: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """sums: [programs, 2, C], each program's part of the gradients of alpha and beta."""
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, C)
    at = row[:, None] * C + channel[None, :]
    mask = (row < N)[:, None]
    frequency = tl.exp(tl.load(alpha_ptr + channel))[None, :]
    exp_beta = tl.exp(tl.load(beta_ptr + channel))[None, :]
    gain = 1.0 / (exp_beta + EPS)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    angle = x * frequency
    sine = tl.sin(angle)
    slope = gain * 2.0 * sine * tl.cos(angle)  # of the second term, by the angle
    dx = dy * (1.0 + slope * frequency)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(sums_ptr + program * 2 * C + channel, tl.sum(dy * slope * angle, axis=0))
    by_beta = -dy * sine * sine * gain * gain * exp_beta
    tl.store(sums_ptr + program * 2 * C + C + channel, tl.sum(by_beta, axis=0))


class _Snake(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, alpha: Tensor, beta: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(rows, alpha, beta)
        ctx.eps = eps
        out = torch.empty_like(rows)
        block, grid = _blocks(rows)
        _forward_kernel[grid](rows, out, alpha, beta, len(rows), EPS=eps, C=rows.shape[1], ROWS=block)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        rows, alpha, beta = ctx.saved_tensors
        block, grid = _blocks(rows)
        dx = torch.empty_like(rows)
        sums = rows.new_empty((grid[0], 2, rows.shape[1]), dtype=torch.float32)
        _backward_kernel[grid](
            rows, gradient.contiguous(), dx, alpha, beta, sums, len(rows),
            EPS=ctx.eps, C=rows.shape[1], ROWS=block,
        )  # fmt: skip
        by_alpha, by_beta = sums.sum(dim=0)
        return dx, by_alpha, by_beta, None


def _blocks(rows: Tensor) -> tuple[int, tuple[int]]:
    """(rows of a program, grid)."""
    block = max(1, _ELEMENTS // rows.shape[1])
    return block, (triton.cdiv(len(rows), block),)


def fused_snake(x: Tensor, alpha: Tensor, beta: Tensor, eps: float) -> Tensor:
    """x: [B, C, T] of any dtype, best with channels innermost in memory; C a power of two. alpha, beta: [C] float32."""
    rows = x.transpose(1, 2).reshape(-1, x.shape[1]).contiguous()
    y: Tensor = _Snake.apply(rows, alpha, beta, eps)  # type: ignore[no-untyped-call]
    return y.view(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)
