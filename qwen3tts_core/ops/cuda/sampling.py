"""Penalty, cuts, Philox noise and the draw of one code, in one launch: a program per row.

Follows `ops/sampling.py` and `ops/noise.py` to the letter, but finds the top-k and top-p
thresholds by bisection over the bits of the scores instead of sorting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qwen3tts_core.ops.cuda.linear import launch_options
from qwen3tts_core.ops.cuda.pdl import wait_for_inputs
from qwen3tts_core.ops.interface import DrawRows, NoiseKey

_INT_MIN = tl.constexpr(-(2**31))


@triton.jit
def _gumbel(seed, piece, frame, group, ids):
    """`ops/noise.py`, for one row. ids: [V] int32 -> [V] float32."""
    zero = (ids * 0).to(tl.uint32)
    c0 = (ids // 4).to(tl.uint32)
    c1 = zero + tl.full([1], group, tl.uint32)
    c2 = zero + frame.to(tl.uint32)
    c3 = zero + piece.to(tl.uint32)
    k0 = zero + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    m0 = zero + tl.full([1], 0xD2511F53, tl.uint32)
    m1 = zero + tl.full([1], 0xCD9E8D57, tl.uint32)
    s0 = zero + tl.full([1], 0x9E3779B9, tl.uint32)
    s1 = zero + tl.full([1], 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, m0), c0 * m0
        high1, low1 = tl.umulhi(c2, m1), c2 * m1
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 += s0
        k1 += s1
    lane = ids % 4
    word = tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))
    u = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(u))


@triton.jit
def _sortable(scores):
    """float32 -> int32 in the same order."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kth_largest(keys, count):
    """A t such that exactly `count` keys are >= t, or with ties the count-th largest key itself."""
    above = tl.sum((keys >= 0).to(tl.int32))
    threshold = tl.where(above >= count, 0, _INT_MIN)
    bit = 30
    while (bit >= 0) & (above != count):
        candidate = threshold + (1 << bit)
        at_candidate = tl.sum((keys >= candidate).to(tl.int32))
        if at_candidate >= count:
            threshold = candidate
            above = at_candidate
        bit -= 1
    return threshold


@triton.jit
def _tail_end(keys, mass, tail_mass):
    """The largest t such that the keys <= t hold at most `tail_mass`."""
    threshold = tl.where(tl.sum(tl.where(keys < 0, mass, 0.0)) <= tail_mass, -1, _INT_MIN)
    for bit in tl.static_range(31):
        candidate = threshold + (1 << (30 - bit))
        fits = (tl.sum(tl.where(keys <= candidate, mass, 0.0)) <= tail_mass) & (candidate > threshold)
        threshold = tl.where(fits, candidate, threshold)
    return threshold


@triton.jit
def _draw_kernel(
    logits_ptr, seen_ptr, penalty_ptr, forbid_eos_ptr, allowed_ptr, eos_id,
    do_sample_ptr, temperature_ptr, top_k_ptr, tail_mass_ptr, seed_ptr, piece_ptr, frame_ptr, group,
    inputs_ptr, codes_ptr, fed_ptr,
    V, width,
    FIRST: tl.constexpr, FEED: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    ids = tl.arange(0, BLOCK_V)
    wait_for_inputs(PDL)
    scores = tl.load(logits_ptr + row * V + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    if FIRST:
        penalty = tl.load(penalty_ptr + row)
        seen = tl.load(seen_ptr + row * V + ids, mask=ids < V, other=0) != 0
        scores = tl.where(seen, tl.where(scores < 0, scores * penalty, scores / penalty), scores)
        allowed = tl.load(allowed_ptr + ids, mask=ids < V, other=0) != 0
        forbid_eos = tl.load(forbid_eos_ptr + row) != 0
        scores = tl.where(allowed & ~((ids == eos_id) & forbid_eos), scores, float("-inf"))
    scores = scores / tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    if (top_k > 0) & (top_k < V):
        keys = _sortable(scores)
        scores = tl.where(keys >= _kth_largest(keys, top_k), scores, float("-inf"))
    tail_mass = tl.load(tail_mass_ptr + row)
    if tail_mass > 0:
        keys = _sortable(scores)
        mass = tl.exp(scores - tl.max(scores))
        mass = mass / tl.sum(mass)
        kept = (keys > _tail_end(keys, mass, tail_mass)) | (keys == tl.max(keys))
        scores = tl.where(kept, scores, float("-inf"))
    if tl.load(do_sample_ptr + row) != 0:
        seed, piece, frame = tl.load(seed_ptr + row), tl.load(piece_ptr + row), tl.load(frame_ptr + row)
        scores = scores + _gumbel(seed, piece, frame, group, ids)
    # A padding row may hold NaN, whose order is anybody's guess: stay inside the table.
    code = tl.minimum(tl.argmax(scores, axis=0), V - 1)
    tl.store(codes_ptr + row, code.to(tl.int64))
    if FEED:
        w = tl.arange(0, BLOCK_W)
        fed = tl.load(inputs_ptr + code.to(tl.int64) * width + w, mask=w < width, other=0.0)
        tl.store(fed_ptr + row * width + w, fed, mask=w < width)


def draw(
    logits: Tensor,
    rows: DrawRows,
    key: NoiseKey,
    group: int,
    *,
    inputs: Tensor | None = None,
    seen: Tensor | None = None,
    penalty: Tensor | None = None,
    forbid_eos: Tensor | None = None,
    allowed: Tensor | None = None,
    eos_id: int = -1,
    pdl: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`Ops.draw_first` (with `seen` and its companions) and `Ops.draw_next` (with `inputs`)."""
    batch, num_ids = logits.shape
    codes = torch.empty(batch, dtype=torch.int64, device=logits.device)
    width = inputs.shape[1] if inputs is not None else 1
    fed = torch.empty(batch, width, dtype=inputs.dtype, device=logits.device) if inputs is not None else None
    first = seen is not None
    _draw_kernel[(batch,)](
        logits,
        seen if first else logits, penalty if first else logits,
        forbid_eos if first else logits, allowed if first else logits, eos_id,
        rows.do_sample, rows.temperature, rows.top_k, rows.tail_mass, key.seed, key.piece, key.frame, group,
        inputs if inputs is not None else logits, codes, fed if fed is not None else logits,
        num_ids, width,
        FIRST=first, FEED=inputs is not None, BLOCK_V=triton.next_power_of_2(num_ids),
        BLOCK_W=triton.next_power_of_2(width), PDL=pdl, num_warps=8, **launch_options(pdl),
    )  # fmt: skip
    return codes, fed
