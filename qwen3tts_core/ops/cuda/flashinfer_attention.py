"""FlashInfer for the talker's attention: prefill, decode steps, or both. Our own is the default.

A kernel of ours norms and rotates q and k and writes the cache; FlashInfer then attends to what lies
there. Its kernels are cut to a plan that the host makes before every launch (`plan_prefill`,
`plan_decode`); in a captured step only the plan's buffers change. Which is faster where:
`load_tests/bench_attention.py`. Source: flashinfer-python 0.6.4, prefill.py and decode.py, the two
`Batch…WithPagedKVCacheWrapper`, and include/flashinfer/attention/scheduler.cuh for what they need.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qwen3tts_core.ops.attention_plan import PageArrays, PlannedSequence, page_arrays
from qwen3tts_core.ops.cuda.linear import launch_options
from qwen3tts_core.ops.cuda.pdl import wait_for_inputs
from qwen3tts_core.ops.interface import DecodeLayout, LayerKV, Layout, PrefillLayout, RopeTable

logger = logging.getLogger(__name__)

_HEAD_DIMS = (64, 128, 256)
_INT_WORKSPACE_BYTES = 1 << 20  # a plan of the largest step takes some 10 KB
_LARGEST_TILE = 128  # query rows of a block of prefill
_PREFILL_BLOCKS, _DECODE_BLOCKS = 2 * 160, 32 * 160  # a plan splits contexts until so many are busy, or fewer
_MOST_ROWS = 1024  # of a prefill, or its own if that is more


@triton.jit
def _rotated(base, norm_ptr, eps, cos, sin, j, E: tl.constexpr):
    """One head at `base`: normed, rounded as the reference does, rotated. Two halves, float32."""
    mask = j < E // 2
    low = tl.load(base + j, mask=mask, other=0.0)
    high = tl.load(base + E // 2 + j, mask=mask, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    scale = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / E + eps)
    low = ((low * scale).to(dtype) * tl.load(norm_ptr + j, mask=mask, other=0.0)).to(tl.float32)
    high = ((high * scale).to(dtype) * tl.load(norm_ptr + E // 2 + j, mask=mask, other=0.0)).to(tl.float32)
    return (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)


@triton.jit
def _rotate_and_write_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, positions_ptr, write_index_ptr,
    q_ptr, key_ptr, value_ptr, eps,
    H: tl.constexpr, KVH: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, FULL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # of q, then of k with its v
    j = tl.arange(0, HALF)
    e = tl.arange(0, FULL)
    wait_for_inputs(PDL)
    position = tl.load(positions_ptr + row)
    cos = tl.load(cos_ptr + position * (E // 2) + j, mask=j < E // 2, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * (E // 2) + j, mask=j < E // 2, other=0.0).to(tl.float32)
    base = qkv_ptr + (row * (H + 2 * KVH) + head) * E
    if head < H:
        low, high = _rotated(base, q_norm_ptr, eps, cos, sin, j, E)
        at = q_ptr + (row * H + head) * E
        tl.store(at + j, low, mask=j < E // 2)
        tl.store(at + E // 2 + j, high, mask=j < E // 2)
    else:
        low, high = _rotated(base, k_norm_ptr, eps, cos, sin, j, E)
        place = (tl.load(write_index_ptr + row) * KVH + head - H) * E
        tl.store(key_ptr + place + j, low, mask=j < E // 2)
        tl.store(key_ptr + place + E // 2 + j, high, mask=j < E // 2)
        value = tl.load(base + KVH * E + e, mask=e < E, other=0.0)
        tl.store(value_ptr + place + e, value, mask=e < E)


def rotate_and_write(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    rope: RopeTable,
    layout: DecodeLayout | PrefillLayout,
    kv: LayerKV,
    *,
    pdl: bool,
) -> Tensor:
    """As `ReferenceOps.rotate_and_write`: q [N, H, E]; k and v go to the layout's places."""
    _, _, num_kv_heads, head_dim = kv.key.shape
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = torch.empty(len(qkv), num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    _rotate_and_write_kernel[(len(qkv), num_heads + num_kv_heads)](
        qkv, q_norm, k_norm, rope.cos, rope.sin, layout.positions, layout.write_index, q, kv.key, kv.value, eps,
        H=num_heads, KVH=num_kv_heads, E=head_dim,
        HALF=max(16, triton.next_power_of_2(head_dim // 2)), FULL=max(16, triton.next_power_of_2(head_dim)),
        PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip
    return q


class FlashInferAttention:
    """`AttentionPlanner`, and attention over what was planned. Owns one wrapper for each step's size.

    tensor_core_decode: decode steps by the prefill kernel. library: `flashinfer`, or what stands in for
    it in tests. Raises ValueError where it isn't installed.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        prefill: bool,
        decode: bool,
        pdl: bool = True,
        tensor_core_decode: bool = False,
        library: Any = None,
    ) -> None:
        self.plans_prefill, self.plans_decode = prefill, decode
        self.pdl = pdl
        self._device = device
        self._tensor_core_decode = tensor_core_decode
        self._library = library or _import_flashinfer()
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        self._prefills: dict[int, _PlannedPrefill] = {}
        self._decodes: dict[int, _PlannedDecode] = {}

    @property
    def library(self) -> Any:
        return self._library

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def tensor_core_decode(self) -> bool:
        return self._tensor_core_decode

    def workspace(self, num_bytes: int) -> Tensor:
        """Shared by all steps, which run one after the other. A larger one doesn't replace it where it is used."""
        if self._workspace.numel() < num_bytes:
            self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._workspace

    def plan_prefill(self, num_rows: int, sequences: Sequence[PlannedSequence]) -> None:
        self._prefill(num_rows).plan(sequences)

    def plan_decode(self, num_rows: int, sequences: Sequence[PlannedSequence]) -> None:
        self._decode(num_rows).plan(sequences)

    def takes(self, layout: Layout) -> bool:
        if isinstance(layout, PrefillLayout):
            return self.plans_prefill
        return self.plans_decode and isinstance(layout, DecodeLayout) and not layout.rows_share_pages

    def __call__(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        rope: RopeTable,
        layout: DecodeLayout | PrefillLayout,
        kv: LayerKV,
    ) -> Tensor:
        """See `Ops.attention`. Raises ValueError for heads or dtypes that FlashInfer doesn't have."""
        q = self.rotate_and_write(qkv, q_norm, k_norm, eps, rope, layout, kv)
        is_prefill = isinstance(layout, PrefillLayout)
        step = self._prefill(len(q)) if is_prefill else self._decode(len(q))
        return step.attend(q, kv, layout.page_table)

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
        return rotate_and_write(qkv, q_norm, k_norm, eps, rope, layout, kv, pdl=self.pdl)

    def _prefill(self, num_rows: int) -> _PlannedPrefill:
        if num_rows not in self._prefills:
            self._prefills[num_rows] = _PlannedPrefill(self, num_rows)
        return self._prefills[num_rows]

    def _decode(self, num_rows: int) -> _PlannedDecode:
        if num_rows not in self._decodes:
            self._decodes[num_rows] = _PlannedDecode(self, num_rows)
        return self._decodes[num_rows]


class _PlannedStep:
    """A wrapper for steps of one size, and the last plan. The wrapper is opened by the first step, which
    knows heads and pages; that is ahead of a capture, since a capture runs its step first.
    """

    name: str

    def __init__(self, owner: FlashInferAttention, num_rows: int) -> None:
        self._owner, self._device, self._num_rows = owner, owner.device, num_rows
        self._sequences: Sequence[PlannedSequence] | None = None
        self._wrapper: Any = None
        self._copied = torch.cuda.Event() if self._device.type == "cuda" else None

    def plan(self, sequences: Sequence[PlannedSequence]) -> None:
        self._sequences = sequences
        if self._wrapper is not None:
            self._apply(sequences)

    def attend(self, q: Tensor, kv: LayerKV, page_table: Tensor) -> Tensor:
        """[N, H, E] -> [N, H E]."""
        if self._wrapper is None:
            self._open(q, kv, page_table)
        out = self._new_result(q)
        self._wrapper.run(q, (kv.key, kv.value), out=out)
        return out.flatten(1)

    def _open(self, q: Tensor, kv: LayerKV, page_table: Tensor) -> None:
        _, num_heads, head_dim = q.shape
        if head_dim not in _HEAD_DIMS or q.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"flashinfer attends with heads of {', '.join(map(str, _HEAD_DIMS))} in bfloat16 or float16, "
                f"this model has heads of {head_dim} in {q.dtype}"
            )
        start = time.perf_counter()
        self._page_size, self._trash_page = kv.page_size, len(kv.key) - 1
        self._heads = (num_heads, kv.key.shape[2], head_dim)
        self._dtype = q.dtype
        num_sequences, num_pages = self._capacity(page_table)
        self._places = {
            "starts": self._ints(num_sequences + 1),
            "last": self._ints(num_sequences),
            "pages": self._ints(max(num_pages, -(-self._num_rows // kv.page_size))),
            "row_starts": self._ints(num_sequences + 1),
        }
        self._num_sequences = num_sequences
        self._staged_pages = torch.empty(
            len(self._places["pages"]), dtype=torch.int32, pin_memory=self._device.type == "cuda"
        )
        self._wrapper = self._make_wrapper()
        self._apply(self._padding())  # the largest plan there is, since the first one sets the limit
        if self._sequences is not None:
            self._apply(self._sequences)
        seconds = time.perf_counter() - start
        logger.info("flashinfer: %s of %d rows ready in %.1f s", self.name, self._num_rows, seconds)

    def _ints(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)

    def _apply(self, sequences: Sequence[PlannedSequence]) -> None:
        # The plan of the step before may not have left its pinned buffer yet.
        if self._copied is not None:
            self._copied.synchronize()
        arrays = page_arrays(self._padded(sequences), self._num_sequences, self._page_size)
        # Its own copy of host pages would wait for everything that is queued on the device.
        count = len(arrays.pages)
        self._staged_pages[:count] = torch.from_numpy(arrays.pages)
        pages = self._places["pages"][:count]
        pages.copy_(self._staged_pages[:count], non_blocking=True)
        self._plan_wrapper(arrays, pages)
        if self._copied is not None:
            self._copied.record()

    def _shrink_int_workspace(self, wrapper: Any, workspace: Tensor) -> None:
        """It comes with 8 MiB on the device and as much pinned, for each of many wrappers."""
        ints = torch.zeros(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        wrapper.reset_workspace_buffer(workspace, ints)

    # ------------------------------------------------------------ what differs
    def _new_result(self, q: Tensor) -> Tensor:
        return torch.empty_like(q)

    def _capacity(self, page_table: Tensor) -> tuple[int, int]:
        """Sequences of a plan, and all their pages."""
        raise NotImplementedError

    def _padded(self, sequences: Sequence[PlannedSequence]) -> Sequence[PlannedSequence]:
        raise NotImplementedError

    def _padding(self) -> Sequence[PlannedSequence]:
        raise NotImplementedError

    def _make_wrapper(self) -> Any:
        raise NotImplementedError

    def _plan_wrapper(self, arrays: PageArrays, pages: Tensor) -> None:
        raise NotImplementedError


class _PlannedPrefill(_PlannedStep):
    name = "prefill"

    def _new_result(self, q: Tensor) -> Tensor:
        return torch.zeros_like(q)  # rows behind the last sequence aren't touched

    def _capacity(self, page_table: Tensor) -> tuple[int, int]:
        num_sequences = min(len(page_table), self._num_rows)
        return num_sequences, num_sequences * page_table.shape[1]

    def _padded(self, sequences: Sequence[PlannedSequence]) -> Sequence[PlannedSequence]:
        return sequences

    def _padding(self) -> Sequence[PlannedSequence]:
        pages = [self._trash_page] * -(-self._num_rows // self._page_size)
        return [PlannedSequence(self._num_rows, self._num_rows, pages)]

    def _make_wrapper(self) -> Any:
        num_heads, num_kv_heads, head_dim = self._heads
        rows = max(self._num_rows, _MOST_ROWS) * num_heads // num_kv_heads
        blocks = max(-(-rows // _LARGEST_TILE) + self._num_sequences, -(-_PREFILL_BLOCKS // num_kv_heads))
        # Each block's part of a split context: values and a weight in float32.
        workspace = self._owner.workspace(num_heads * blocks * _LARGEST_TILE * (head_dim + 1) * 4 + 4096)
        wrapper = self._owner.library.BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=self._places["row_starts"],
            paged_kv_indptr_buf=self._places["starts"],
            paged_kv_indices_buf=self._places["pages"],
            paged_kv_last_page_len_buf=self._places["last"],
            backend="fa2",  # fa3 takes minutes to compile
        )
        self._shrink_int_workspace(wrapper, workspace)
        return wrapper

    def _plan_wrapper(self, arrays: PageArrays, pages: Tensor) -> None:
        num_heads, num_kv_heads, head_dim = self._heads
        self._wrapper.plan(
            torch.from_numpy(arrays.row_starts),
            torch.from_numpy(arrays.page_starts),
            pages,
            torch.from_numpy(arrays.last_page_len),
            num_heads,
            num_kv_heads,
            head_dim,
            self._page_size,
            causal=True,
            sm_scale=head_dim**-0.5,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )


class _PlannedDecode(_PlannedStep):
    name = "decode step"

    def _capacity(self, page_table: Tensor) -> tuple[int, int]:
        return self._num_rows, self._num_rows * page_table.shape[1]

    def _padded(self, sequences: Sequence[PlannedSequence]) -> Sequence[PlannedSequence]:
        missing = self._num_rows - len(sequences)
        return [*sequences, *[PlannedSequence(1, 1, [self._trash_page])] * missing]

    def _padding(self) -> Sequence[PlannedSequence]:
        return []

    def _make_wrapper(self) -> Any:
        num_heads, num_kv_heads, head_dim = self._heads
        blocks = max(
            32 * self._num_rows, -(-_DECODE_BLOCKS // num_kv_heads)
        )  # 16: rows of a tensor core's tile
        workspace = self._owner.workspace(num_heads * blocks * (head_dim + 1) * 4 + 4096)
        wrapper = self._owner.library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._owner.tensor_core_decode,
            paged_kv_indptr_buffer=self._places["starts"],
            paged_kv_indices_buffer=self._places["pages"],
            paged_kv_last_page_len_buffer=self._places["last"],
            backend="fa2",
        )
        self._shrink_int_workspace(wrapper, workspace)
        return wrapper

    def _plan_wrapper(self, arrays: PageArrays, pages: Tensor) -> None:
        num_heads, num_kv_heads, head_dim = self._heads
        self._wrapper.plan(
            torch.from_numpy(arrays.page_starts),
            pages,
            torch.from_numpy(arrays.last_page_len),
            num_heads,
            num_kv_heads,
            head_dim,
            self._page_size,
            sm_scale=head_dim**-0.5,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )


def _import_flashinfer() -> ModuleType:
    try:
        import flashinfer
    except ImportError as error:
        raise ValueError(
            f"attention by flashinfer was asked for, but it can't be imported ({error}); "
            "install flashinfer-python, or leave prefill_attention and decode_attention at 'own'"
        ) from error
    module: ModuleType = flashinfer
    return module
