"""`Ops` in plain PyTorch: short, obvious, the yardstick of every faster one; runs anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from qwen3tts_core.ops.interface import (
    DecodeLayout,
    DrawRows,
    FrameLayout,
    FrameNoise,
    Launch,
    LayerKV,
    Layout,
    NoiseKey,
    PendingTransfer,
    PrefillLayout,
    RopeTable,
)
from qwen3tts_core.ops.noise import gumbel
from qwen3tts_core.ops.sampling import draw_codes, first_code_scores
from qwen3tts_core.ops.scaled_matrix import Matrix, ScaledMatrix


@dataclass(frozen=True, slots=True)
class GumbelNoise:
    """first: [B, V]; rest: [B, G - 1, C]."""

    first: Tensor
    rest: Tensor


class ReferenceOps:
    """The definition of `Ops`.

    trim_context: a decode step reads only the pages that some row uses. That looks at the
    lengths on the host, so a captured step can't, and a row's rounding then depends on its
    neighbours' lengths, so deterministic mode doesn't either.
    """

    name = "reference"
    folds_gains = False
    reads_float8 = False
    planner = None

    def __init__(self, *, trim_context: bool = True) -> None:
        self._trim_context = trim_context

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return normed.to(x.dtype) if weight is None else normed.to(x.dtype) * weight

    def norm_linear(self, x: Tensor, norm_weight: Tensor | None, eps: float, weight: Matrix) -> Tensor:
        return self.linear(self.rms_norm(x, norm_weight, eps), weight)

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        if isinstance(weight, ScaledMatrix):
            weight = weight.dequantized(x.dtype)
        return functional.linear(x, weight)

    def linear_add(self, x: Tensor, weight: Matrix, residual: Tensor) -> Tensor:
        return residual + self.linear(x, weight)

    def norm_gate_up(self, x: Tensor, norm_weight: Tensor | None, eps: float, gate_up: Matrix) -> Tensor:
        gate, up = self.norm_linear(x, norm_weight, eps, gate_up).chunk(2, dim=-1)
        return functional.silu(gate) * up

    def norm_attention(
        self,
        x: Tensor,
        norm_weight: Tensor | None,
        eps: float,
        weight: Matrix,
        q_norm: Tensor,
        k_norm: Tensor,
        rope: RopeTable,
        layout: Layout,
        kv: LayerKV,
    ) -> Tensor:
        qkv = self.norm_linear(x, norm_weight, eps, weight)
        return self.attention(qkv, q_norm, k_norm, eps, rope, layout, kv)

    def attention(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        rope: RopeTable,
        layout: Layout,
        kv: LayerKV,
    ) -> Tensor:
        if isinstance(layout, FrameLayout):
            layout = spell_out(layout, len(qkv), kv.page_size, qkv.device)
        q = self.rotate_and_write(qkv, q_norm, k_norm, eps, rope, layout, kv)
        return self.paged_attention(q, kv, layout)

    def rotate_and_write(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        rope: RopeTable,
        layout: DecodeLayout | PrefillLayout,
        kv: LayerKV,
    ) -> Tensor:
        """Norm and rotate q and k, write k and v to the layout's places; returns q [N, H, E]."""
        num_kv_heads, head_dim = kv.key.shape[-2:]
        heads = qkv.view(len(qkv), -1, head_dim)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        cos, sin = rope.cos[layout.positions][:, None], rope.sin[layout.positions][:, None]
        k = _rotate(self.rms_norm(k, k_norm, eps), cos, sin)
        kv.key.view(-1, num_kv_heads, head_dim)[layout.write_index] = k
        kv.value.view(-1, num_kv_heads, head_dim)[layout.write_index] = v
        return _rotate(self.rms_norm(q, q_norm, eps), cos, sin)

    def paged_attention(self, q: Tensor, kv: LayerKV, layout: DecodeLayout | PrefillLayout) -> Tensor:
        """[N, H, E] -> [N, H E], over the positions that are in the cache."""
        if isinstance(layout, PrefillLayout):
            return self._prefill_attention(q, kv, layout)
        return self._decode_attention(q, kv, layout)

    def _decode_attention(self, q: Tensor, kv: LayerKV, layout: DecodeLayout) -> Tensor:
        page_table = layout.page_table
        if self._trim_context:
            num_pages = int(layout.positions.max()) // kv.page_size + 1
            page_table = page_table[:, :num_pages]
        k = kv.key[page_table].flatten(1, 2)  # [B, T, K, E]
        v = kv.value[page_table].flatten(1, 2)
        visible = torch.arange(k.shape[1], device=q.device) <= layout.positions[:, None]
        return _attend(q[:, None], k, v, visible[:, None]).flatten(1)

    def _prefill_attention(self, q: Tensor, kv: LayerKV, layout: PrefillLayout) -> Tensor:
        out = torch.zeros_like(q)
        for place, sequence in enumerate(layout.sequences):
            pages = layout.page_table[place]
            num_context = sequence.num_context
            rows = slice(sequence.first_row, sequence.first_row + sequence.num_rows)
            used = pages[: -(-num_context // kv.page_size)]
            k = kv.key[used].flatten(0, 1)[None, :num_context]
            v = kv.value[used].flatten(0, 1)[None, :num_context]
            visible = torch.arange(num_context, device=q.device) <= layout.positions[rows][:, None]
            out[rows] = _attend(q[rows][None], k, v, visible[None])[0]
        return out.flatten(1)

    def frame_noise(self, key: NoiseKey, num_groups: int, vocab_size: int, codebook_size: int) -> GumbelNoise:
        where = (key.seed, key.piece, key.frame)
        return GumbelNoise(
            first=gumbel(*where, range(1), vocab_size)[:, 0],
            rest=gumbel(*where, range(1, num_groups), codebook_size),
        )

    def draw_first(
        self,
        logits: Tensor,
        seen: Tensor,
        penalty: Tensor,
        forbid_eos: Tensor,
        allowed: Tensor,
        eos_id: int,
        draw_rows: DrawRows,
        noise: FrameNoise,
    ) -> Tensor:
        assert isinstance(noise, GumbelNoise)
        scores = first_code_scores(logits.float(), seen, penalty, forbid_eos, allowed, eos_id)
        return draw_codes(scores, draw_rows, noise.first)

    def draw_next(
        self, logits: Tensor, draw_rows: DrawRows, noise: FrameNoise, group: int, inputs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(noise, GumbelNoise)
        codes = draw_codes(logits.float(), draw_rows, noise.rest[:, group - 1])
        return codes, None if inputs is None else inputs[codes]


def spell_out(layout: FrameLayout, num_rows: int, page_size: int, device: torch.device) -> DecodeLayout:
    """The same places as tensors."""
    batch = num_rows // layout.num_positions
    order = torch.arange(num_rows, device=device)
    rows, positions = order % batch, layout.position + order // batch
    shared = layout.num_positions > 1
    return DecodeLayout(positions, rows * page_size + positions, rows[:, None], rows_share_pages=shared)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-form rotary embedding. x: [N, heads, E]; cos, sin: [N, 1, E / 2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Explicit matmuls: fused attention rounds differently at batch 1 than in a larger one.

    q: [B, Q, H, E]; k, v: [B, T, K, E]; visible: [B, Q, T] bool -> [B, Q, H, E].
    Hidden positions may hold anything, NaN too: their values are replaced, not just weighted by 0.
    """
    num_kv_heads, head_dim = k.shape[-2:]
    batch, num_queries, num_heads, _ = q.shape
    ever_visible = visible.any(dim=1)[:, :, None, None]
    k, v = k.masked_fill(~ever_visible, 0.0), v.masked_fill(~ever_visible, 0.0)
    grouped = q.view(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("bqkge,btke->bkgqt", grouped, k).float() * head_dim**-0.5
    weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(dim=-1)
    out = torch.einsum("bkgqt,btke->bqkge", weights.to(v.dtype), v)
    return out.reshape(batch, num_queries, num_heads, head_dim)


# ---------------------------------------------------------------- the other two seams, on CPU
def run_eagerly(fn: Launch, name: str) -> Launch:
    """`Capture` without a graph: the function itself."""
    return fn


class _Arrived:
    def __init__(self, result: NDArray[Any]) -> None:
        self._result = result

    def is_ready(self) -> bool:
        return True

    def wait(self) -> NDArray[Any]:
        return self._result


class HostTransfer:
    """`Transfer` where the result is on the host already; the copy outlives the next launch."""

    def start(self, result: Tensor) -> PendingTransfer:
        return _Arrived(result.numpy().copy())
