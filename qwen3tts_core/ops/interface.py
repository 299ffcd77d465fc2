"""The border between the model and whatever computes it: `Ops`, `Capture`, `Transfer`.

Everything above this file runs on any device. `reference.py` is the meaning of `Ops`, in plain
PyTorch; `ops/cuda/` holds the fast ones, `select.py` decides. Shape letters: N rows (one position
each, of any streams), B rows of a decode step (one per stream), H heads, K KV heads, E head dim,
P pages of one stream, V vocabulary, G code groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from qwen3tts_core.ops.attention_plan import AttentionPlanner
    from qwen3tts_core.ops.scaled_matrix import Matrix


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's paged cache. key, value: [pages, page_size, K, E]."""

    key: Tensor
    value: Tensor

    @property
    def page_size(self) -> int:
        return int(self.key.shape[1])


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos, sin: [positions, E / 2] in the activation dtype."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class DecodeLayout:
    """One new position per row; each row attends to its own positions up to and with it.

    positions: [B] int64. write_index: [B] int64, flat place in the cache (page * page_size +
    offset). page_table: [B, P] int64. rows_share_pages: some row attends to what another row of
    this very step writes, so every write comes before the first read.
    """

    positions: Tensor
    write_index: Tensor
    page_table: Tensor
    rows_share_pages: bool = False


@dataclass(frozen=True, slots=True)
class PrefillSequence:
    """One stream's part of a packed prefill, in host integers.

    first_row, num_rows: its rows in the pack. num_cached: positions already in its pages.
    """

    first_row: int
    num_rows: int
    num_cached: int

    @property
    def num_context(self) -> int:
        return self.num_cached + self.num_rows


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """Packed prompts. positions, write_index, row_sequence: [N]; page_table: one row
    per sequence, further rows unused, [S, P].

    row_sequence: the row's place in `sequences`, -1 for padding, whose write_index lies in the
    trash page. `sequences` says the same in host integers.
    """

    positions: Tensor
    write_index: Tensor
    page_table: Tensor
    row_sequence: Tensor
    sequences: tuple[PrefillSequence, ...]


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """The code predictor's scratch: row i's only page is page i, every row at the same place.

    position: of the first B rows; num_positions: 1, or 2 for [B rows at position, B at the next].
    """

    position: int
    num_positions: int = 1


Layout = DecodeLayout | PrefillLayout | FrameLayout


@dataclass(frozen=True, slots=True)
class DrawRows:
    """How each row draws: all [B]. See `ops/sampling.py` for what they mean.

    temperature, tail_mass (1 - top_p): float32. top_k: int64, 0 is off. do_sample: bool.
    """

    do_sample: Tensor
    temperature: Tensor
    top_k: Tensor
    tail_mass: Tensor


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """What a row's noise depends on, besides group and id. All [B] int64."""

    seed: Tensor
    piece: Tensor
    frame: Tensor


class FrameNoise(Protocol):
    """One frame's noise for every row, made by `Ops.frame_noise`; opaque to the model."""


class Ops(Protocol):
    """Everything a decoder layer and a draw are made of."""

    name: str
    folds_gains: bool
    """Whether the model, at load, multiplies a norm's gain into the matrix after it and passes None for it."""
    reads_float8: bool
    """Whether a `Matrix` may stay in eight bits; else the model widens it at load."""

    @property
    def planner(self) -> AttentionPlanner | None:
        """Whom to tell of a step before its launch; None where nothing is planned."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """[N, D] -> [N, D]. Normalised in float32, cast back, then times weight (spec 2.1)."""
        ...

    def norm_linear(self, x: Tensor, norm_weight: Tensor | None, eps: float, weight: Matrix) -> Tensor:
        """rms_norm, then x @ weight.T. [N, D] -> [N, weight rows]."""
        ...

    def linear(self, x: Tensor, weight: Matrix) -> Tensor: ...

    def linear_add(self, x: Tensor, weight: Matrix, residual: Tensor) -> Tensor:
        """residual + x @ weight.T. May write the result into `residual`."""
        ...

    def norm_gate_up(self, x: Tensor, norm_weight: Tensor | None, eps: float, gate_up: Matrix) -> Tensor:
        """silu(gate) * up of the normed rows. gate_up: [2 I, D], gate first. [N, D] -> [N, I]."""
        ...

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
        """`attention` of norm_linear(x, norm_weight, eps, weight). [N, D] -> [N, H E]."""
        ...

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
        """Norm and rotate q and k per head, write k and v into the cache, attend.

        qkv: [N, (H + 2 K) E], q first -> [N, H E]. Causal, grouped-query, scale E ** -0.5, softmax
        in float32. Padding rows of a prefill come back as zeros. Source: spec 2.1, 2.2.
        """
        ...

    def frame_noise(self, key: NoiseKey, num_groups: int, vocab_size: int, codebook_size: int) -> FrameNoise:
        """The noise of one frame: group 0 over vocab_size ids, the others over codebook_size."""
        ...

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
        """Group 0 of every row: penalty, minimum length, suppression, cut, draw (spec 2.4).

        logits [B, V]; seen [B, V] bool; penalty [B]; forbid_eos [B] bool; allowed [V] bool -> [B].
        """
        ...

    def draw_next(
        self, logits: Tensor, draw_rows: DrawRows, noise: FrameNoise, group: int, inputs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Group 1 … G-1 of every row: cut and draw (spec 2.5), then look up what the codes feed.

        logits: [B, C]; inputs: [C, Dc], or None after the last group. Returns codes [B] and
        inputs[codes] [B, Dc], or None.
        """
        ...


Launch = Callable[[], None]


class Capture(Protocol):
    """Turns a fixed-shape step over static buffers into something to launch again.

    `name` says in a failure which step it was. A step that can't be captured raises.
    """

    def __call__(self, fn: Launch, name: str) -> Launch: ...


class PendingTransfer(Protocol):
    """A result on its way to the host."""

    def is_ready(self) -> bool: ...

    def wait(self) -> NDArray[Any]:
        """The host copy, of the result's shape and dtype; it stays valid until `Transfer.start` has been called twice more."""
        ...


class Transfer(Protocol):
    """Copies device results to the host, in the order of the steps that made them."""

    def start(self, result: Tensor) -> PendingTransfer:
        """The next launch may overwrite `result` at once."""
        ...
