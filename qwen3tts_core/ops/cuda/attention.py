"""Paged attention over few rows, with q/k norm, rotary positions and the cache write.

Lengths and pages are read on the device, so a captured step needs no plan. One program handles
one row and one KV head with its whole group of query heads, over one split of the context; the
last split to finish combines them. Source: spec 2.1, 2.2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qwen3tts_core.ops.cuda.linear import launch_options
from qwen3tts_core.ops.cuda.pdl import wait_for_inputs
from qwen3tts_core.ops.interface import DecodeLayout, LayerKV, RopeTable


@triton.jit
def _rotated_halves(base, norm_ptr, eps, cos, sin, j, mask, E: tl.constexpr):
    """One head at `base`: normed, rounded as the reference does, rotated. Two [HALF] float32."""
    low = tl.load(base + j, mask=mask, other=0.0)
    high = tl.load(base + E // 2 + j, mask=mask, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    scale = tl.rsqrt((tl.sum(low * low, axis=-1) + tl.sum(high * high, axis=-1)) / E + eps)
    norm_low = tl.load(norm_ptr + j, mask=j < E // 2, other=0.0)
    norm_high = tl.load(norm_ptr + E // 2 + j, mask=j < E // 2, other=0.0)
    if len(low.shape) == 2:
        scale = scale[:, None]
    low = ((low * scale).to(dtype) * norm_low).to(tl.float32)
    high = ((high * scale).to(dtype) * norm_high).to(tl.float32)
    return (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)


@triton.jit
def _write_kernel(
    qkv_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, write_index_ptr, key_ptr, value_ptr, eps,
    H: tl.constexpr, KVH: tl.constexpr, E: tl.constexpr,
    HALF: tl.constexpr, FULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    j = tl.arange(0, HALF)
    e = tl.arange(0, FULL)
    wait_for_inputs(PDL)
    position = tl.load(positions_ptr + row)
    cos = tl.load(cos_ptr + position * (E // 2) + j, mask=j < E // 2, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * (E // 2) + j, mask=j < E // 2, other=0.0).to(tl.float32)
    key_at = qkv_ptr + (row * (H + 2 * KVH) + H + head) * E
    low, high = _rotated_halves(key_at, k_norm_ptr, eps, cos, sin, j, j < E // 2, E)
    value = tl.load(key_at + KVH * E + e, mask=e < E, other=0.0)
    at = (tl.load(write_index_ptr + row) * KVH + head) * E
    tl.store(key_ptr + at + j, low, mask=j < E // 2)
    tl.store(key_ptr + at + E // 2 + j, high, mask=j < E // 2)
    tl.store(value_ptr + at + e, value, mask=e < E)


@triton.jit(do_not_specialize=["num_table_pages"])
def _attention_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr,
    positions_ptr, write_index_ptr, page_table_ptr, table_row_ptr, key_ptr, value_ptr, out_ptr,
    partial_ptr, stats_ptr, arrived_ptr,
    eps, scale, num_table_pages,
    H: tl.constexpr, KVH: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, FULL: tl.constexpr,
    BLOCK_T: tl.constexpr, SPLITS: tl.constexpr,
    FUSED: tl.constexpr, HAS_TABLE_ROW: tl.constexpr, PDL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    j = tl.arange(0, HALF)
    e = tl.arange(0, FULL)
    g = tl.arange(0, ROWS)
    wait_for_inputs(PDL)

    table_row = row
    if HAS_TABLE_ROW:
        table_row = tl.load(table_row_ptr + row).to(tl.int64)
    out_at = out_ptr + (row * H + kv_head * GROUP + g)[:, None] * E + e[None, :]
    out_mask = (g < GROUP)[:, None] & (e < E)[None, :]
    if table_row < 0:  # padding of a packed prefill
        tl.store(out_at, tl.zeros([ROWS, FULL], dtype=out_ptr.dtype.element_ty), mask=out_mask)
    else:
        position = tl.load(positions_ptr + row)
        cos = tl.load(cos_ptr + position * (E // 2) + j, mask=j < E // 2, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + position * (E // 2) + j, mask=j < E // 2, other=0.0).to(tl.float32)
        q_at = qkv_ptr + (row * (H + 2 * KVH) + kv_head * GROUP + g)[:, None] * E
        q_mask = (g < GROUP)[:, None] & (j < E // 2)[None, :]
        q_low, q_high = _rotated_halves(
            q_at, q_norm_ptr, eps, cos[None, :], sin[None, :], j[None, :], q_mask, E
        )

        peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        acc = tl.zeros([ROWS, FULL], dtype=tl.float32)
        num_cached = position + 1
        if FUSED:
            num_cached = position
            if split == SPLITS - 1:
                # The new position comes from registers; nobody else reads it in this launch.
                key_at = qkv_ptr + (row * (H + 2 * KVH) + H + kv_head) * E
                k_low, k_high = _rotated_halves(key_at, k_norm_ptr, eps, cos, sin, j, j < E // 2, E)
                value = tl.load(key_at + KVH * E + e, mask=e < E, other=0.0)
                at = (tl.load(write_index_ptr + row) * KVH + kv_head) * E
                tl.store(key_ptr + at + j, k_low, mask=j < E // 2)
                tl.store(key_ptr + at + E // 2 + j, k_high, mask=j < E // 2)
                tl.store(value_ptr + at + e, value, mask=e < E)
                own = tl.sum(q_low.to(tl.float32) * k_low.to(tl.float32)[None, :], axis=1)
                own += tl.sum(q_high.to(tl.float32) * k_high.to(tl.float32)[None, :], axis=1)
                peak = own * scale
                total += 1.0
                acc += value.to(tl.float32)[None, :]

        blocks = tl.cdiv(num_cached, BLOCK_T)
        per_split = tl.cdiv(blocks, SPLITS)
        first = split * per_split * BLOCK_T
        last = tl.minimum((split + 1) * per_split * BLOCK_T, num_cached)
        for start in range(first, last, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            t_mask = t < last
            page = tl.load(page_table_ptr + table_row * num_table_pages + t // PAGE, mask=t_mask, other=0)
            at = ((page * PAGE + t % PAGE) * KVH + kv_head) * E
            k_mask = t_mask[:, None] & (j < E // 2)[None, :]
            k_low = tl.load(key_ptr + at[:, None] + j[None, :], mask=k_mask, other=0.0)
            k_high = tl.load(key_ptr + at[:, None] + E // 2 + j[None, :], mask=k_mask, other=0.0)
            v = tl.load(
                value_ptr + at[:, None] + e[None, :], mask=t_mask[:, None] & (e < E)[None, :], other=0.0
            )
            scores = tl.dot(q_low, tl.trans(k_low), input_precision=PRECISION)
            scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=PRECISION) * scale
            scores = tl.where(t_mask[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, axis=1))
            weights = tl.exp(scores - new_peak[:, None])
            shrink = tl.exp(peak - new_peak)
            total = total * shrink + tl.sum(weights, axis=1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            peak = new_peak

        if SPLITS == 1:
            tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)
        else:
            unit = row * KVH + kv_head
            part = (unit * SPLITS + split) * ROWS + g
            tl.store(partial_ptr + part[:, None] * FULL + e[None, :], acc)
            tl.store(stats_ptr + part * 2, peak)
            tl.store(stats_ptr + part * 2 + 1, total)
            tl.debug_barrier()
            arrived = tl.atomic_add(arrived_ptr + unit, 1, sem="acq_rel")
            if arrived == SPLITS - 1:
                tl.debug_barrier()
                tl.store(arrived_ptr + unit, 0)
                peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
                total = tl.zeros([ROWS], dtype=tl.float32)
                acc = tl.zeros([ROWS, FULL], dtype=tl.float32)
                for other in range(SPLITS):
                    part = (unit * SPLITS + other) * ROWS + g
                    other_peak = tl.load(stats_ptr + part * 2, cache_modifier=".cg")
                    other_total = tl.load(stats_ptr + part * 2 + 1, cache_modifier=".cg")
                    other_acc = tl.load(partial_ptr + part[:, None] * FULL + e[None, :], cache_modifier=".cg")
                    new_peak = tl.maximum(peak, other_peak)
                    # An empty split has peak -inf and total 0; the first has -inf on the other side.
                    shrink = tl.where(peak == new_peak, 1.0, tl.exp(peak - new_peak))
                    grow = tl.where(other_peak == new_peak, 1.0, tl.exp(other_peak - new_peak))
                    total = total * shrink + other_total * grow
                    acc = acc * shrink[:, None] + other_acc * grow[:, None]
                    peak = new_peak
                tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=out_mask)


class PagedAttention:
    """Launches the kernels; owns the scratch that splits meet in."""

    def __init__(self, device: torch.device, *, num_processors: int, pdl: bool = True) -> None:
        self._device = device
        self._num_processors = num_processors
        self._pdl = pdl
        self._scratch: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(
        self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, rope: RopeTable,
        layout: DecodeLayout, kv: LayerKV, table_rows: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `Ops.attention`. table_rows: [N], each row's place in the page table, -1 for padding."""
        num_rows = len(qkv)
        _, page_size, num_kv_heads, head_dim = kv.key.shape
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        group = num_heads // num_kv_heads
        half, full = max(16, triton.next_power_of_2(head_dim // 2)), max(16, triton.next_power_of_2(head_dim))
        max_context = page_size * layout.page_table.shape[1]
        block_t = min(64, max(16, triton.next_power_of_2(max_context)))
        rows = max(16, triton.next_power_of_2(group))
        splits = self._num_splits(num_rows * num_kv_heads, max_context // block_t)
        partial, stats, arrived = self._scratch_for(num_rows, num_kv_heads, splits, rows, full)
        out = torch.empty(num_rows, num_heads * head_dim, dtype=qkv.dtype, device=qkv.device)
        options = launch_options(self._pdl)
        if layout.rows_share_pages:
            self.write(qkv, k_norm, eps, rope, layout, kv)
        _attention_kernel[(num_rows, num_kv_heads, splits)](
            qkv, q_norm, k_norm, rope.cos, rope.sin,
            layout.positions, layout.write_index, layout.page_table,
            table_rows if table_rows is not None else layout.positions, kv.key, kv.value, out,
            partial, stats, arrived,
            eps, head_dim**-0.5, layout.page_table.shape[1],
            H=num_heads, KVH=num_kv_heads, E=head_dim, PAGE=page_size,
            GROUP=group, ROWS=rows, HALF=half, FULL=full, BLOCK_T=block_t, SPLITS=splits,
            FUSED=not layout.rows_share_pages, HAS_TABLE_ROW=table_rows is not None, PDL=self._pdl,
            PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32",
            num_warps=4 if block_t >= 64 else 1, num_stages=2, **options,
        )  # fmt: skip
        return out

    def write(
        self, qkv: Tensor, k_norm: Tensor, eps: float, rope: RopeTable, layout: DecodeLayout, kv: LayerKV
    ) -> None:
        """Norm and rotate the rows' keys; put keys and values into the cache."""
        _, _, num_kv_heads, head_dim = kv.key.shape
        _write_kernel[(len(qkv), num_kv_heads)](
            qkv, k_norm, rope.cos, rope.sin, layout.positions, layout.write_index, kv.key, kv.value, eps,
            H=qkv.shape[1] // head_dim - 2 * num_kv_heads, KVH=num_kv_heads, E=head_dim,
            HALF=max(16, triton.next_power_of_2(head_dim // 2)),
            FULL=max(16, triton.next_power_of_2(head_dim)), PDL=self._pdl,
            num_warps=1, **launch_options(self._pdl),
        )  # fmt: skip

    def _num_splits(self, num_units: int, num_blocks: int) -> int:
        """Enough programs to fill the GPU twice, no more than there are blocks of context."""
        wanted = max(1, 2 * self._num_processors // num_units)
        return max(1, min(16, 1 << (wanted.bit_length() - 1), num_blocks))

    def _scratch_for(self, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
        """Kept for good: captured graphs hold its addresses."""
        if shape not in self._scratch:
            num_rows, num_kv_heads, splits, rows, full = shape
            units = num_rows * num_kv_heads
            parts = units * splits * rows if splits > 1 else 1
            self._scratch[shape] = (
                torch.empty(parts * full, dtype=torch.float32, device=self._device),
                torch.empty(parts * 2, dtype=torch.float32, device=self._device),
                torch.zeros(units, dtype=torch.int32, device=self._device),
            )
        return self._scratch[shape]
