"""The border between the fused codec decoder and what computes it: `CodecKernels`.

`model/codec_fused.py` knows which layer follows which; `ops/codec_reference.py` is the meaning of
each step in plain PyTorch, `ops/cuda/codec_kernels.py` the fast one. Three things set it apart from
the plain decoder (`model/codec_decoder.py`):

Channels last. Activations are rows of channels, [M, C] with M = B * T, so that every conv is one
matrix product over (tap, channel).

Planes. What a product reads is a sum of 16-bit planes, the largest part first, [P, M, C]; so are
the weights. The product takes the P (P + 1) / 2 pairs of planes that matter. One plane is plain
half precision; two planes of float16 carry 22 bits, so that tensor cores do float32's work.

Tails are a ring. A layer's last inputs lie in the stream's arena row at (time mod length). A step
copies all of them out first (`begin`); a layer reads the copy and puts its new inputs into the arena.

Shape letters: B rows, F frames of this step, T time steps at some layer's rate, M = B * T, C
channels, P planes, G code groups, K KV heads, E head dim, W attention window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers are written for a product: `planes` parts of `dtype`."""

    dtype: torch.dtype
    planes: int

    def split(self, x: Tensor) -> Tensor:
        """float32 of any shape -> [P, ...], whose sum is x up to the format's precision."""
        parts = []
        rest = x.float()
        for _ in range(self.planes):
            parts.append(rest.to(self.dtype))
            rest = rest - parts[-1].float()
        return torch.stack(parts)


@dataclass(frozen=True, slots=True, eq=False)
class ConvWeights:
    """A causal conv, transposed conv or linear layer as one matrix.

    planes: [P, N, taps * C], scaled by 1 / inv_scale (a power of two, so that float16's small numbers
    are never reached). Column (tap, c) meets channel c of the input `(taps - 1 - tap) * dilation` steps
    ago. N = stride * num_out: row (j, o) makes channel o of output j of each input. bias: [num_out] float32.
    """

    planes: Tensor
    inv_scale: float
    bias: Tensor | None
    num_in: int
    num_out: int
    taps: int = 1
    dilation: int = 1

    @property
    def stride(self) -> int:
        return int(self.planes.shape[1]) // self.num_out

    @property
    def reach(self) -> int:
        """Earlier inputs that an output needs."""
        return (self.taps - 1) * self.dilation


def pack(
    weight: Tensor, bias: Tensor | None, form: Format, *, num_out: int | None = None, dilation: int = 1
) -> ConvWeights:
    """weight: [N, taps, C] or [N, C] float32."""
    weight = weight.float()
    if weight.dim() == 2:
        weight = weight[:, None]
    n, taps, num_in = weight.shape
    peak = float(weight.abs().max())
    # The largest weight lands in [2^12, 2^13): far from overflow, and the second plane is never denormal.
    scale = 2.0 ** (13 - torch.tensor(peak).frexp().exponent.item()) if peak > 0 else 1.0
    planes = form.split(weight.reshape(n, taps * num_in) * scale)
    flat_bias = None if bias is None else bias.float().contiguous()
    return ConvWeights(planes, 1.0 / scale, flat_bias, num_in, num_out or n, taps, dilation)


@dataclass(frozen=True, slots=True, eq=False)
class Snake:
    """x + gain * sin²(x * frequency), per channel; both [C] float32."""

    frequency: Tensor
    gain: Tensor


Activation = Snake | Literal["gelu", "gated"] | None
"""gated: columns are (gate, up) pairs, silu(gate) * up comes out, half as wide."""

TailKind = Literal["wide", "front", "stack", "ring"]
"""wide: read as float32; front, stack: read as planes of that format; ring: attention's own."""


@dataclass(frozen=True, slots=True, eq=False)
class TailSpan:
    """A layer's last `length` inputs within a stream's arena row, at the ring's places.

    rate: inputs a frame. offset: of the first value in the row.
    """

    offset: int
    length: int
    channels: int
    rate: int
    kind: TailKind

    @property
    def size(self) -> int:
        return self.length * self.channels


@dataclass(slots=True, eq=False)
class TailLayout:
    """Every tail of one decoder. Rings come last, so the others are the first `num_copied` values of a row.

    lines: [n, 6] int32 on the device, one for each step of each copied tail: the tail's offset, length,
    channels, rate and kind (0 wide, 1 front, 2 stack), and the step's place in it.
    """

    spans: Sequence[TailSpan]
    front: Format
    stack: Format
    device: torch.device
    num_copied: int = field(init=False)
    max_channels: int = field(init=False)
    max_reach: int = field(init=False)
    lines: Tensor = field(init=False)

    def __post_init__(self) -> None:
        copied = [span for span in self.spans if span.kind != "ring"]
        kinds = {"wide": 0, "front": 1, "stack": 2}
        rows = [
            (span.offset, span.length, span.channels, span.rate, kinds[span.kind], i)
            for span in copied
            for i in range(span.length)
        ]
        self.num_copied = sum(span.size for span in copied)
        self.max_channels = max((span.channels for span in copied), default=1)
        self.max_reach = max((span.size for span in copied), default=1)
        self.lines = torch.tensor(rows, dtype=torch.int32, device=self.device).view(-1, 6)


@dataclass(frozen=True, slots=True, eq=False)
class ArenaRows:
    """The streams of one step. values: [all rows, row size] float32; positions: [all rows] int64.

    rows: [B] int64, which row each stream has, different but for rows with num_valid 0. num_valid: [B]
    int64 in [0, F], how many of the step's frames are real.
    """

    values: Tensor
    positions: Tensor
    rows: Tensor
    num_valid: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CodecStep:
    """What `begin` found, for the kernels that follow.

    position: [B] int64, frames decoded before. wide: [B, num_copied] float32, front and stack:
    [P, B, num_copied]: the tails in order of time, zeros before the start. arena: None for a decode
    from the start that keeps nothing; then one row of zeros may stand for all tails.
    """

    num_rows: int
    num_frames: int
    position: Tensor
    wide: Tensor
    front: Tensor
    stack: Tensor
    arena: ArenaRows | None = None

    def tails(self, span: TailSpan) -> Tensor:
        """The buffer that holds the span."""
        return {"wide": self.wide, "front": self.front, "stack": self.stack}[span.kind]


@dataclass(slots=True, eq=False)
class ConvOut:
    """What a conv made: raw [M, N] float32, planes [P, M, N] after the activation, sums [M, n] of squares.

    With a stride the rows are [M * stride, num_out], the same memory. What was not asked for is None.
    """

    raw: Tensor | None
    planes: Tensor | None
    sums: Tensor | None

    @property
    def wide(self) -> Tensor:
        assert self.raw is not None
        return self.raw

    @property
    def narrow(self) -> Tensor:
        assert self.planes is not None
        return self.planes


class CodecKernels(Protocol):
    """Everything the fused decoder is made of. Tensors are contiguous; nothing reads a value on the host."""

    name: str

    def prepare(self, steps: Sequence[Callable[[], object]]) -> None:
        """Compile whatever these steps would launch, many kernels at a time, and run none of them."""
        ...

    def begin(self, layout: TailLayout, arena: ArenaRows, num_frames: int) -> CodecStep:
        """Copy the rows' tails out, in order of time."""
        ...

    def begin_fresh(self, layout: TailLayout, num_rows: int, num_frames: int) -> CodecStep:
        """Rows at their very start, of which nothing will be kept."""
        ...

    def lookup(self, step: CodecStep, codes: Tensor, table: Tensor, form: Format) -> Tensor:
        """codes [B, F, G] int64, table [G, codes, C] float32 -> the sum over groups as planes [P, B * F, C]."""
        ...

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
        """act(norm(x) @ weights + bias + residual). x: planes [P, M, C]; residual [M, N].

        norm: sums of squares of x's rows and an epsilon; x counts as divided by its root mean square
        (the norm's weight is in `weights`). tail: what came before x; brought up to date. out, raw:
        formats to give the value after and before the activation in. sums: also the raw value's squares,
        for a later `norm`.
        """
        ...

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
        """residual + second(between(first(x))), then `conv`'s outputs. first and second: C to C channels."""
        ...

    def depthwise_norm(
        self,
        step: CodecStep,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        eps: float,
        tail: TailSpan,
        form: Format,
    ) -> Tensor:
        """LayerNorm of a causal depthwise conv. x: [M, C] float32; weight: [taps, C] -> planes [P, M, C]."""
        ...  # fmt: skip

    def rope(self, step: CodecStep, inverse_frequency: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the step's rotary angles, [B * F, E / 2] float32; inverse_frequency: [E / 2]."""
        ...

    def attention(
        self,
        step: CodecStep,
        qkv: Tensor,
        rope: tuple[Tensor, Tensor],
        ring: TailSpan,
        num_heads: int,
        form: Format,
    ) -> Tensor:
        """Rotate q and k, attend over the last W = ring.length + 1 frames, keep k and v in the ring.

        qkv: [B * F, (H + 2 K) E] float32, q first. A ring step holds the K rotated keys, then the K
        values -> planes [P, B * F, H E].
        """
        ...  # fmt: skip

    def wave(self, step: CodecStep, x: Tensor, weights: Tensor, bias: float, tail: TailSpan) -> Tensor:
        """The last conv, C to 1, in float32, and the end of the step: the rows' positions advance.

        x: planes [P, M, C]; weights: [taps, C] float32 -> [B, T] float32, not clamped.
        """
        ...

    def samples(self, step: CodecStep, x: Tensor, weights: Tensor, bias: float, tail: TailSpan) -> Tensor:
        """`wave`, quantised as in streaming/pcm.py -> [B, T] int16."""
        ...
