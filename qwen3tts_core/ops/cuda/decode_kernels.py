"""Chooses instances of `decode.cu` and launches them: bfloat16, published head size, few rows.

`accepts_*` say which shapes are covered; the Triton kernels take the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen3tts_core.ops.cuda.linear import FEW_ROWS
from qwen3tts_core.ops.cuda.runtime_kernels import KernelLibrary
from qwen3tts_core.ops.interface import DecodeLayout, DrawRows, LayerKV, NoiseKey, RopeTable
from qwen3tts_core.ops.scaled_matrix import Matrix, ScaledMatrix

_WARP = 32
_CHUNK = 32  # k values that a warp takes at a time
_SMALL_MATRIX = 3 * 2**20  # the code predictor's, but for gate and up
_E4M3_STEP = 2 * _CHUNK * 16  # two chunks a load, for each of the most warps a shape has
_HEAD_DIM, _PAGE_SIZE, _MAX_GROUP = 128, 16, 4
_ATTENTION_THREADS = 128
_DRAW_THREADS, _MAX_QUADS = 256, 4


@dataclass(frozen=True, slots=True)
class LinearShape:
    """How one linear kernel is cut; `decode.cu` says what the numbers mean."""

    num_warps: int
    weight_tiles: int
    weights_ahead: int
    x_ahead: int
    blocks: int = 1


def choose_shape(k: int, kind: str, batch_tiles: int) -> LinearShape | None:
    """The shape for K input features and 8 x batch_tiles rows; None when K can't be cut.

    kind: "norm", "gated" (with its norm) or "plain".
    """
    tuned = _TUNED.get((k, kind, batch_tiles))
    if tuned is not None:
        return tuned
    fitting = [warps for warps in (4, 8) if k % (_CHUNK * warps) == 0]
    if not fitting:
        return None
    return LinearShape(fitting[-1], 2 if batch_tiles == 4 else 1, weights_ahead=4, x_ahead=2)


# By (K, kind, batch tiles): the fastest of some 1,300 shapes on an H200, weights colder than L2.
_TUNED = {
    (1024, "norm", 1): LinearShape(16, 1, 8, 4, 1),
    (1024, "gated", 1): LinearShape(8, 1, 8, 4, 2),
    (2048, "norm", 1): LinearShape(8, 1, 6, 4, 2),
    (2048, "plain", 1): LinearShape(8, 1, 6, 4, 2),
    (2048, "gated", 1): LinearShape(4, 1, 8, 8, 2),
    (3072, "plain", 1): LinearShape(12, 1, 6, 4, 1),
    (6144, "plain", 1): LinearShape(12, 1, 6, 4, 1),
    (1024, "norm", 2): LinearShape(8, 2, 2, 3, 2),
    (1024, "gated", 2): LinearShape(4, 2, 4, 2, 2),
    (2048, "norm", 2): LinearShape(8, 2, 2, 4, 1),
    (2048, "plain", 2): LinearShape(8, 1, 4, 2, 1),
    (2048, "gated", 2): LinearShape(4, 2, 4, 2, 2),
    (3072, "plain", 2): LinearShape(12, 1, 4, 4, 1),
    (6144, "plain", 2): LinearShape(12, 2, 4, 2, 1),
    (1024, "norm", 4): LinearShape(8, 2, 2, 2, 1),
    (1024, "gated", 4): LinearShape(4, 1, 4, 2, 3),
    (2048, "norm", 4): LinearShape(8, 2, 2, 1, 1),
    (2048, "plain", 4): LinearShape(8, 1, 4, 3, 1),
    (2048, "gated", 4): LinearShape(4, 1, 4, 2, 3),
    (3072, "plain", 4): LinearShape(12, 1, 8, 2, 1),
    (6144, "plain", 4): LinearShape(12, 1, 4, 3, 1),
}


class DecodeKernels:
    """Owns the library and the scratch that attention's splits meet in."""

    def __init__(self, device: torch.device, *, num_processors: int) -> None:
        self._device = device
        self._num_processors = num_processors
        self._library = KernelLibrary(device)
        self._scratch: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    # ------------------------------------------------------------ linear
    def accepts_linear(self, x: Tensor, weight: Matrix) -> bool:
        rows, k = x.shape
        # Twice as many rows read the weights twice, the second time from L2: small matrices bear it.
        is_few = rows <= FEW_ROWS or (rows <= 2 * FEW_ROWS and len(weight) * k <= _SMALL_MATRIX)
        fits = is_few and len(weight) % 32 == 0 and choose_shape(k, "plain", 4) is not None
        if isinstance(weight, ScaledMatrix):
            fits &= k % _E4M3_STEP == 0
        return fits and x.dtype == torch.bfloat16 and x.is_contiguous()

    def linear(
        self,
        x: Tensor,
        weight: Matrix,
        *,
        normed: bool = False,
        eps: float = 0.0,
        residual: Tensor | None = None,
        gated: bool = False,
        shape: LinearShape | None = None,
    ) -> Tensor:
        """x [M, K], weight [N, K] (gated: [2 N, K], gate first) -> [M, N]. normed: RMSNorm of x without its gain."""
        rows, k = x.shape
        n = len(weight) // 2 if gated else len(weight)
        values, scales = (
            (weight.values, weight.scales) if isinstance(weight, ScaledMatrix) else (weight, None)
        )
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
        kind = "gated" if gated else "norm" if normed else "plain"
        batch_tiles = next((tiles for tiles in (1, 2) if rows <= 8 * tiles), 4)
        shape = shape or choose_shape(k, kind, batch_tiles)
        assert shape is not None, "accepts_linear said yes"
        flags = ",".join(str(f).lower() for f in (normed, gated, residual is not None, scales is not None))
        cut = (
            f"{k},{shape.num_warps},{shape.weight_tiles},{batch_tiles},{shape.weights_ahead},{shape.x_ahead}"
        )
        args = (x, values, scales, residual, out, rows, n, eps)
        grid = (n // ((8 if gated else 16) * shape.weight_tiles), -(-rows // (8 * batch_tiles)), 1)
        kernel = self._library.get(f"linear_kernel<{cut},{shape.blocks},{flags}>")
        kernel.launch(grid, shape.num_warps * _WARP, args)
        return out

    # ------------------------------------------------------------ draw
    def accepts_draw(self, logits: Tensor, inputs: Tensor | None) -> bool:
        num_ids = logits.shape[1]
        fits = num_ids % 4 == 0 and num_ids <= 4 * _DRAW_THREADS * _MAX_QUADS
        return fits and logits.dtype == torch.bfloat16 and (inputs is None or inputs.shape[1] % 8 == 0)

    def draw(
        self,
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
    ) -> tuple[Tensor, Tensor | None]:
        """As `sampling.draw`."""
        batch, num_ids = logits.shape
        codes = torch.empty(batch, dtype=torch.int64, device=logits.device)
        width = inputs.shape[1] if inputs is not None else 0
        fed = (
            torch.empty(batch, width, dtype=logits.dtype, device=logits.device)
            if inputs is not None
            else None
        )
        quads = -(-num_ids // (4 * _DRAW_THREADS))
        flags = f"{str(seen is not None).lower()},{str(inputs is not None).lower()}"
        self._library.get(f"draw_kernel<{quads},{flags}>").launch(
            (batch, 1, 1),
            _DRAW_THREADS,
            (
                *(logits, seen, penalty, forbid_eos, allowed, eos_id),
                *(rows.do_sample, rows.temperature, rows.top_k, rows.tail_mass),
                *(key.seed, key.piece, key.frame, group, inputs, codes, fed, num_ids, width),
            ),
        )
        return codes, fed

    # ------------------------------------------------------------ attention
    def accepts_attention(self, qkv_width: int, kv: LayerKV) -> bool:
        _, page_size, num_kv_heads, head_dim = kv.key.shape
        group = qkv_width // head_dim // num_kv_heads - 2
        sizes = head_dim == _HEAD_DIM and page_size == _PAGE_SIZE and group <= _MAX_GROUP
        return sizes and kv.key.dtype == torch.bfloat16

    def attention(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        rope: RopeTable,
        layout: DecodeLayout,
        kv: LayerKV,
        table_rows: Tensor | None,
        *,
        fused: bool,
        unscaled: Tensor | None = None,
    ) -> Tensor:
        """See `Ops.attention`; unless `fused`, the rows' keys and values are in the cache already.

        unscaled: [N, D], what qkv was projected from without its RMSNorm's scale.
        """
        rows, num_kv_heads = len(qkv), kv.key.shape[2]
        group = qkv.shape[1] // _HEAD_DIM // num_kv_heads - 2
        num_table_pages = layout.page_table.shape[1]
        splits = self._num_splits(rows * num_kv_heads, num_table_pages)
        partial, arrived = self._scratch_for(rows * num_kv_heads, splits, group)
        out = torch.empty(rows, num_kv_heads * group * _HEAD_DIM, dtype=qkv.dtype, device=qkv.device)
        self._library.get(f"attention_kernel<{group},{str(fused).lower()}>").launch(
            (rows, num_kv_heads, splits),
            _ATTENTION_THREADS,
            (
                *(qkv, q_norm, k_norm, rope.cos, rope.sin, layout.positions, layout.write_index),
                *(layout.page_table, table_rows, kv.key, kv.value, out, partial, arrived),
                *(num_kv_heads, num_table_pages, splits, unscaled, _width(unscaled), eps),
            ),
        )
        return out

    def frame_attention(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        rope: RopeTable,
        position: int,
        kv: LayerKV,
        *,
        unscaled: Tensor | None = None,
    ) -> Tensor:
        """The code predictor's: every row at `position` of its own page. unscaled: as in `attention`."""
        rows, num_kv_heads = len(qkv), kv.key.shape[2]
        group = qkv.shape[1] // _HEAD_DIM // num_kv_heads - 2
        out = torch.empty(rows, num_kv_heads * group * _HEAD_DIM, dtype=qkv.dtype, device=qkv.device)
        self._library.get(f"frame_attention_kernel<{group}>").launch(
            (rows, num_kv_heads, 1),
            group * _WARP,
            (
                *(qkv, q_norm, k_norm, rope.cos, rope.sin, kv.key, kv.value, out, num_kv_heads, position),
                *(unscaled, _width(unscaled), eps),
            ),
        )
        return out

    def _num_splits(self, num_units: int, num_pages: int) -> int:
        """About four blocks a processor, at least a page for each of a block's four warps."""
        wanted = max(1, 4 * self._num_processors // num_units)
        return min(16, wanted, max(1, num_pages // 4))

    def _scratch_for(self, units: int, splits: int, group: int) -> tuple[Tensor, Tensor]:
        """Kept for good: captured graphs hold its addresses. Counters are zero between launches."""
        key = (units, splits, group)
        if key not in self._scratch:
            size = units * splits * group * (_HEAD_DIM + 2) if splits > 1 else 1
            self._scratch[key] = (
                torch.empty(size, dtype=torch.float32, device=self._device),
                torch.zeros(units, dtype=torch.int32, device=self._device),
            )
        return self._scratch[key]


def _width(x: Tensor | None) -> int:
    return 0 if x is None else x.shape[1]
