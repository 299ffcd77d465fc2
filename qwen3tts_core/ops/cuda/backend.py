"""The CUDA side of the three seams: `CudaOps`, `GraphCapture`, `PinnedTransfer`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from qwen3tts_core.errors import EngineFault
from qwen3tts_core.ops.cuda import linear as kernels
from qwen3tts_core.ops.cuda.attention import PagedAttention
from qwen3tts_core.ops.cuda.sampling import draw
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
from qwen3tts_core.ops.reference import spell_out
from qwen3tts_core.ops.scaled_matrix import Matrix, ScaledMatrix

if TYPE_CHECKING:
    from qwen3tts_core.ops.cuda.decode_kernels import DecodeKernels
    from qwen3tts_core.ops.cuda.flashinfer_attention import FlashInferAttention

logger = logging.getLogger(__name__)


class _DeviceNoise:
    """`FrameNoise` that is made inside the draw: only the key travels."""

    def __init__(self, key: NoiseKey) -> None:
        self.key = key


class CudaOps:
    """`Ops` on a GPU. Which kernel runs depends on shape and dtype alone:

    decode.cu   bfloat16, the published head size, up to 32 rows, 64 of small matrices: a decode step
    cuBLAS      bfloat16, more rows: large batches, prefill; beside e4m3 weights from 128 rows on
    Triton      everything else (float32, tiny checkpoints), and attention over many rows

    pdl: kernels overlap (ops/cuda/pdl.py); off before Hopper and where the interpreter runs them.
    planner: FlashInfer, for the steps that it is to attend in; None for none.
    """

    name = "cuda"
    folds_gains = True
    reads_float8 = True

    def __init__(
        self,
        device: torch.device,
        *,
        num_processors: int,
        pdl: bool = True,
        planner: FlashInferAttention | None = None,
    ) -> None:
        self.planner = planner
        self._device = device
        self._pdl = pdl
        self._frame_layouts: dict[tuple[FrameLayout, int, int], DecodeLayout] = {}
        self._attention = PagedAttention(device, num_processors=num_processors, pdl=pdl)
        self._decode: DecodeKernels | None = None
        if pdl:
            from qwen3tts_core.ops.cuda.decode_kernels import DecodeKernels

            self._decode = DecodeKernels(device, num_processors=num_processors)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return kernels.rms_norm(x, weight, eps, pdl=self._pdl)

    def norm_linear(self, x: Tensor, norm_weight: Tensor | None, eps: float, weight: Matrix) -> Tensor:
        if norm_weight is None and self._decode is not None and self._decode.accepts_linear(x, weight):
            return self._decode.linear(x, weight, normed=True, eps=eps)
        if _is_matrix_product(x, weight):
            return _product(self.rms_norm(x, norm_weight, eps), weight)
        return kernels.linear(x, weight, normed=True, norm_weight=norm_weight, eps=eps, pdl=self._pdl)

    def linear(self, x: Tensor, weight: Matrix) -> Tensor:
        if self._decode is not None and self._decode.accepts_linear(x, weight):
            return self._decode.linear(x, weight)
        if _is_matrix_product(x, weight):
            return _product(x, weight)
        return kernels.linear(x, weight, pdl=self._pdl)

    def linear_add(self, x: Tensor, weight: Matrix, residual: Tensor) -> Tensor:
        if self._decode is not None and self._decode.accepts_linear(x, weight):
            return self._decode.linear(x, weight, residual=residual)
        if _is_matrix_product(x, weight):
            if isinstance(weight, ScaledMatrix):
                return residual.add_(_product(x, weight))
            return residual.addmm_(x, weight.T)
        return kernels.linear(x, weight, residual=residual, pdl=self._pdl)

    def norm_gate_up(self, x: Tensor, norm_weight: Tensor | None, eps: float, gate_up: Matrix) -> Tensor:
        if _is_matrix_product(x, gate_up):
            if norm_weight is not None:
                return kernels.silu_mul(self.norm_linear(x, norm_weight, eps, gate_up), pdl=self._pdl)
            product = _product(x, gate_up)
            return kernels.silu_mul(product, unscaled=x, eps=eps, pdl=self._pdl)
        if norm_weight is None and self._decode is not None and self._decode.accepts_linear(x, gate_up):
            return self._decode.linear(x, gate_up, normed=True, eps=eps, gated=True)
        return kernels.linear(
            x, gate_up, normed=True, norm_weight=norm_weight, eps=eps, gated=True, pdl=self._pdl
        )

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
        # The norm's scale, one number per row, can wait for a kernel that is there anyway.
        waits = (
            norm_weight is None
            and _is_matrix_product(x, weight)
            and self._takes_unscaled(len(weight), layout, kv)
        )
        qkv = _product(x, weight) if waits else self.norm_linear(x, norm_weight, eps, weight)
        unscaled = x if waits else None
        return self._attend(qkv, q_norm, k_norm, eps, rope, layout, kv, unscaled)

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
        return self._attend(qkv, q_norm, k_norm, eps, rope, layout, kv, None)

    def _takes_unscaled(self, qkv_width: int, layout: Layout, kv: LayerKV) -> bool:
        """A decode step whose rows are independent: the kernel that attends also writes keys and values."""
        if self._decode is None or not self._decode.accepts_attention(qkv_width, kv):
            return False
        if self.planner is not None and self.planner.takes(layout):
            return False
        if isinstance(layout, FrameLayout):
            return layout.num_positions == 1
        return isinstance(layout, DecodeLayout) and not layout.rows_share_pages

    def _attend(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        rope: RopeTable,
        layout: Layout,
        kv: LayerKV,
        unscaled: Tensor | None,
    ) -> Tensor:
        """unscaled: what qkv was projected from, where that came without its norm's scale."""
        if self.planner is not None and self.planner.takes(layout):
            assert not isinstance(layout, FrameLayout)
            return self.planner(qkv, q_norm, k_norm, eps, rope, layout, kv)
        decode = self._decode
        if decode is not None and not decode.accepts_attention(qkv.shape[1], kv):
            decode = None
        table_rows = None
        if isinstance(layout, PrefillLayout):
            table_rows = layout.row_sequence
            layout = DecodeLayout(
                layout.positions, layout.write_index, layout.page_table, rows_share_pages=True
            )
        elif isinstance(layout, FrameLayout):
            if decode is not None and layout.num_positions == 1:
                position = layout.position
                return decode.frame_attention(qkv, q_norm, k_norm, eps, rope, position, kv, unscaled=unscaled)
            layout = self._spelled_out(layout, len(qkv), kv.page_size)
        if decode is None:
            return self._attention(qkv, q_norm, k_norm, eps, rope, layout, kv, table_rows)
        fused = not layout.rows_share_pages
        if not fused:
            self._attention.write(qkv, k_norm, eps, rope, layout, kv)
        return decode.attention(
            qkv, q_norm, k_norm, eps, rope, layout, kv, table_rows, fused=fused, unscaled=unscaled
        )

    def _spelled_out(self, layout: FrameLayout, num_rows: int, page_size: int) -> DecodeLayout:
        """Constants, made once: a captured step only reads them."""
        key = (layout, num_rows, page_size)
        if key not in self._frame_layouts:
            self._frame_layouts[key] = spell_out(layout, num_rows, page_size, self._device)
        return self._frame_layouts[key]

    def frame_noise(self, key: NoiseKey, num_groups: int, vocab_size: int, codebook_size: int) -> FrameNoise:
        return _DeviceNoise(key)

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
        return self._draw(
            logits,
            draw_rows,
            noise,
            0,
            seen=seen,
            penalty=penalty,
            forbid_eos=forbid_eos,
            allowed=allowed,
            eos_id=eos_id,
        )[0]

    def draw_next(
        self, logits: Tensor, draw_rows: DrawRows, noise: FrameNoise, group: int, inputs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._draw(logits, draw_rows, noise, group, inputs=inputs)

    def _draw(
        self,
        logits: Tensor,
        rows: DrawRows,
        noise: FrameNoise,
        group: int,
        *,
        inputs: Tensor | None = None,
        eos_id: int = -1,
        **first: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(noise, _DeviceNoise)
        if self._decode is not None and self._decode.accepts_draw(logits, inputs):
            return self._decode.draw(logits, rows, noise.key, group, inputs=inputs, eos_id=eos_id, **first)
        return draw(logits, rows, noise.key, group, inputs=inputs, eos_id=eos_id, pdl=self._pdl, **first)


def _is_matrix_product(x: Tensor, weight: Matrix) -> bool:
    """Enough rows that a product is bound by arithmetic, not by reading the weights.

    cuBLAS would have to read e4m3 widened: that pays where there are many rows to share it.
    """
    few = len(x) <= kernels.FEW_ROWS or isinstance(weight, ScaledMatrix)
    return len(x) > kernels.MAX_ROWS or (not few and x.dtype == torch.bfloat16)


def _product(x: Tensor, weight: Matrix) -> Tensor:
    """By cuBLAS. [N, D] -> [N, weight rows]."""
    if isinstance(weight, ScaledMatrix):
        return (functional.linear(x, weight.values.to(x.dtype)) * weight.scales).to(x.dtype)
    return functional.linear(x, weight)


class GraphCapture:
    """`Capture` as CUDA graphs, all in one memory pool. A step that can't be captured raises.

    high_priority: its kernels are scheduled before those of streams without it, whatever stream replays the graph: a
    kernel node keeps the priority of the stream that it was captured on. Source: CUDA's `cudaLaunchAttributePriority`.
    """

    _WARM_UP_RUNS = 2  # compiles and loads kernels, which a capture must not do

    def __init__(self, device: torch.device, *, high_priority: bool = False) -> None:
        self._device, self._priority = device, -1 if high_priority else 0
        self._pool: Any = None  # an opaque handle of torch's

    def __call__(self, fn: Launch, name: str) -> Launch:
        stream = torch.cuda.Stream(self._device, priority=self._priority)
        graph = torch.cuda.CUDAGraph()
        try:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                for _ in range(self._WARM_UP_RUNS):
                    fn()
            torch.cuda.current_stream(self._device).wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                fn()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EngineFault(f"capturing the {name} as a CUDA graph failed: {error}") from error
        self._pool = self._pool or graph.pool()
        return graph.replay


class _PinnedCopy:
    def __init__(self, host: Tensor, event: torch.cuda.Event) -> None:
        self._host, self._event = host, event
        self._array: NDArray[Any] = host.numpy()

    def is_ready(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> NDArray[Any]:
        self._event.synchronize()
        return self._array


class PinnedTransfer:
    """`Transfer` through pinned buffers, in stream order, so the next launch may overwrite at once.

    Waiting blocks instead of spinning: the engine's thread leaves the core to others.
    """

    _BUFFERS = 3  # one being read, one in flight, one being started

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.Size, torch.dtype], list[_PinnedCopy]] = {}
        self._next = 0

    def start(self, result: Tensor) -> PendingTransfer:
        shape = (result.shape, result.dtype)
        if shape not in self._buffers:
            self._buffers[shape] = [
                _PinnedCopy(
                    torch.empty_like(result, device="cpu", pin_memory=True),
                    torch.cuda.Event(blocking=True),
                )
                for _ in range(self._BUFFERS)
            ]
        copy = self._buffers[shape][self._next % self._BUFFERS]
        self._next += 1
        copy._host.copy_(result, non_blocking=True)
        copy._event.record()
        return copy
