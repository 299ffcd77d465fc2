"""Linear layers over few rows: bound by reading the weights once.

One kernel: optional RMSNorm of the input inside (its scale is one number per row, applied at
the end, as are an e4m3 matrix's scales), optional residual, or gate and up read together with SiLU in the epilogue. A program
owns BLOCK_N weight rows and all of K, so a row's result doesn't depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from qwen3tts_core.ops.cuda.pdl import prefetch_l2, wait_for_inputs
from qwen3tts_core.ops.scaled_matrix import Matrix, ScaledMatrix


@triton.jit(do_not_specialize=["num_rows"])  # else one row and multiples of 16 are compiled apart
def _linear_kernel(
    x_ptr, norm_ptr, w_ptr, scales_ptr, residual_ptr, out_ptr,
    num_rows, N: tl.constexpr, K: tl.constexpr, eps,
    HAS_NORM: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    HAS_SCALES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    n_mask = n < N
    m_mask = m < num_rows

    if PREFETCH and PDL:
        lines = tl.arange(0, BLOCK_K // LINE) * LINE
        for start in range(0, K, BLOCK_K):
            # The last block may reach past K into the next row: a prefetch may read anything mapped.
            in_row = tl.minimum(start + lines, K - 1)
            prefetch_l2(w_ptr + tl.minimum(n, N - 1)[:, None] * K + in_row[None, :], PDL)
            if GATED:
                prefetch_l2(w_ptr + (tl.minimum(n, N - 1) + N)[:, None] * K + in_row[None, :], PDL)
    wait_for_inputs(PDL)

    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    square_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        kk = start + k
        if EVEN_N and EVEN_K:
            w = tl.load(w_ptr + n[:, None] * K + kk[None, :])
        else:
            w_mask = n_mask[:, None] & (kk < K)[None, :]
            w = tl.load(w_ptr + n[:, None] * K + kk[None, :], mask=w_mask, other=0.0)
        if EVEN_K:
            x = tl.load(x_ptr + m[:, None] * K + kk[None, :], mask=m_mask[:, None], other=0.0)
        else:
            x = tl.load(
                x_ptr + m[:, None] * K + kk[None, :], mask=m_mask[:, None] & (kk < K)[None, :], other=0.0
            )
        if HAS_NORM:
            wide = x.to(tl.float32)
            square_sum += tl.sum(wide * wide, axis=1)
            if HAS_GAIN:
                gain = tl.load(norm_ptr + kk, mask=kk < K, other=0.0).to(tl.float32)
                x = (wide * gain[None, :]).to(x.dtype)
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision=PRECISION)
        if GATED:
            if EVEN_N and EVEN_K:
                w_up = tl.load(w_ptr + (n + N)[:, None] * K + kk[None, :])
            else:
                w_mask = n_mask[:, None] & (kk < K)[None, :]
                w_up = tl.load(w_ptr + (n + N)[:, None] * K + kk[None, :], mask=w_mask, other=0.0)
            up = tl.dot(x, tl.trans(w_up.to(x.dtype)), up, input_precision=PRECISION)
    if HAS_NORM:
        scale = tl.rsqrt(square_sum / K + eps)[:, None]
        acc = acc * scale
        up = up * scale
    if HAS_SCALES:
        acc = acc * tl.load(scales_ptr + n, mask=n_mask, other=0.0)[None, :]
        if GATED:
            up = up * tl.load(scales_ptr + N + n, mask=n_mask, other=0.0)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    out_mask = m_mask[:, None] & n_mask[None, :]
    out_at = m[:, None] * N + n[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + out_at, mask=out_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, K, eps, HAS_GAIN: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK_K)
    mask = k < K
    if HAS_GAIN:
        weight = tl.load(weight_ptr + k, mask=mask, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * K + k, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / K + eps)).to(x.dtype)
    if HAS_GAIN:
        normed = normed * weight
    tl.store(out_ptr + row * K + k, normed, mask=mask)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, unscaled_ptr, out_ptr, N, K, eps,
    HAS_SCALE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    gate = tl.load(gate_up_ptr + row * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * N + N + n, mask=n < N, other=0.0).to(tl.float32)
    if HAS_SCALE:
        k = tl.arange(0, BLOCK_K)
        x = tl.load(unscaled_ptr + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x) / K + eps)
        gate *= scale
        up *= scale
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * N + n, gated.to(out_ptr.dtype.element_ty), mask=n < N)


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one program's work."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    prefetch: bool = True


FEW_ROWS = 32
"""Up to it, a decode step's linear layers are bound by reading the weights, and `decode.cu` does that."""

MAX_ROWS = 128
"""Above it (long prefills) a matrix product is bound by arithmetic, and cuBLAS does it better."""


def choose_tile(n: int, k: int, block_m: int, *, gated: bool, wide: bool) -> Tile:
    """Tile of an [n, k] weight for rows padded to block_m. `wide`: 4-byte weights."""
    block_n = 16 if n <= 2048 else 32
    if gated:
        block_n = 16 if n <= 4096 else 32
    block_k = 128 if block_m >= 64 or gated else 256
    if wide:
        return Tile(16, 64, 4, 2)
    return Tile(block_n, min(block_k, max(16, triton.next_power_of_2(k))), 4, 4 if block_m <= 64 else 3)


def linear(
    x: Tensor,
    weight: Matrix,
    *,
    normed: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gated: bool = False,
    pdl: bool = True,
    tile: Tile | None = None,
) -> Tensor:
    """x [M, K] with M <= MAX_ROWS, weight [N, K] (gated: [2 N, K], gate first) -> [M, N].

    normed: RMSNorm of x first, its gain norm_weight unless that is in the weight already.
    """
    num_rows, k = x.shape
    n = len(weight) // 2 if gated else len(weight)
    out = torch.empty(num_rows, n, dtype=x.dtype, device=x.device)
    values, scales = (weight.values, weight.scales) if isinstance(weight, ScaledMatrix) else (weight, None)
    block_m = max(16, triton.next_power_of_2(num_rows))
    wide = x.dtype == torch.float32
    tile = tile or choose_tile(n, k, block_m, gated=gated, wide=wide)
    block_m = min(block_m, 32 if wide else MAX_ROWS)
    grid = (triton.cdiv(n, tile.block_n), triton.cdiv(num_rows, block_m))
    _linear_kernel[grid](
        x, norm_weight if norm_weight is not None else x, values, scales if scales is not None else x,
        residual if residual is not None else x, out,
        num_rows, n, k, eps,
        HAS_NORM=normed, HAS_GAIN=norm_weight is not None, HAS_RESIDUAL=residual is not None, GATED=gated,
        HAS_SCALES=scales is not None, EVEN_N=n % tile.block_n == 0, EVEN_K=k % tile.block_k == 0,
        BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        PREFETCH=tile.prefetch, LINE=min(128 // values.element_size(), tile.block_k), PDL=pdl,
        PRECISION="ieee" if wide else "tf32",
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(pdl),
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, pdl: bool = True) -> Tensor:
    """[N, D] -> [N, D]; also any leading shape of contiguous rows. weight: None where it is 1."""
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(x.numel() // width,)](
        x, x if weight is None else weight, out, width, eps,
        HAS_GAIN=weight is not None, BLOCK_K=block, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out


def silu_mul(
    gate_up: Tensor, *, unscaled: Tensor | None = None, eps: float = 0.0, pdl: bool = True
) -> Tensor:
    """[N, 2 I], gate first -> silu(gate) * up, [N, I].

    unscaled: [N, D], what gate and up were projected from without its RMSNorm's scale.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(width))
    source = gate_up if unscaled is None else unscaled
    _silu_mul_kernel[(rows, triton.cdiv(width, block))](
        gate_up, source, out, width, source.shape[1], eps,
        HAS_SCALE=unscaled is not None, BLOCK_K=triton.next_power_of_2(source.shape[1]), BLOCK=block,
        PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return out


def launch_options(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}
