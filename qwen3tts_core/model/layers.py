"""The decoder layer that talker and code predictor share, and its rotary table.

Plain modules that receive their `Ops`: no device, no backend, no cache management here.
Source: spec 2.1 and 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qwen3tts_core.config import TransformerConfig, WeightDtype
from qwen3tts_core.model.weights import WeightReader
from qwen3tts_core.ops.interface import LayerKV, Layout, Ops, RopeTable
from qwen3tts_core.ops.scaled_matrix import ScaledMatrix


def frozen(tensor: Tensor) -> nn.Parameter:
    """A weight that is never trained."""
    return nn.Parameter(tensor, requires_grad=False)


def rope_table(
    config: TransformerConfig, num_positions: int, device: torch.device, dtype: torch.dtype
) -> RopeTable:
    """Angles in float32, then cast: the reference casts cos and sin before it rotates (spec 8).

    The talker's three-stream MRoPE always gets three equal positions, which is plain rotary (spec 2.2).
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float()
    inverse_frequency = 1.0 / (config.rope_theta ** (half / config.head_dim))
    angles = torch.arange(num_positions, device=device).float()[:, None] * inverse_frequency
    return RopeTable(angles.cos().to(dtype), angles.sin().to(dtype))


Weight = nn.Parameter | ScaledMatrix
"""What a `Matrix` is as a part of a module."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a model keeps its matrices. folds_gains: see `Ops`.

    float8: quantised at load, to e4m3. Unless keeps_float8, which saves the memory, they are widened
    again: the same numbers for ops that read no float8. A gain is always folded in first.
    """

    folds_gains: bool
    float8: bool = False
    keeps_float8: bool = False

    @classmethod
    def of(cls, ops: Ops, weight_dtype: WeightDtype) -> Packing:
        return cls(ops.folds_gains, weight_dtype == "float8_e4m3", ops.reads_float8)

    def matrix(self, matrix: Tensor) -> Weight:
        """[.., N, D]."""
        return self._packed(matrix, matrix.dtype) if self.float8 else frozen(matrix)

    def after_norm(self, gain: Tensor, matrix: Tensor) -> tuple[nn.Parameter | None, Weight]:
        """A norm's gain [D] and the matrix after it; folded: None, and their product, rounded once."""
        if not (self.folds_gains or self.float8):
            return frozen(gain), frozen(matrix)
        product = matrix.float() * gain.float()
        return None, self._packed(product, matrix.dtype) if self.float8 else frozen(product.to(matrix.dtype))

    def _packed(self, matrix: Tensor, dtype: torch.dtype) -> Weight:
        scaled = ScaledMatrix.quantized(matrix)
        return scaled if self.keeps_float8 else frozen(scaled.dequantized(dtype))


class DecoderLayer(nn.Module):
    """Grouped-query attention with q/k norm and rotary positions, then a SwiGLU MLP."""

    def __init__(
        self, reader: WeightReader, prefix: str, config: TransformerConfig, packing: Packing
    ) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.eps = config.rms_norm_eps
        self.input_norm, self.qkv = packing.after_norm(
            reader.take(f"{prefix}.input_layernorm.weight", width),
            reader.concat(
                {
                    f"{attention}.q_proj.weight": q_rows,
                    f"{attention}.k_proj.weight": kv_rows,
                    f"{attention}.v_proj.weight": kv_rows,
                },
                width,
            ),
        )
        self.q_norm = frozen(reader.take(f"{attention}.q_norm.weight", config.head_dim))
        self.k_norm = frozen(reader.take(f"{attention}.k_norm.weight", config.head_dim))
        self.o_proj = packing.matrix(reader.take(f"{attention}.o_proj.weight", width, q_rows))
        self.mlp_norm, self.gate_up = packing.after_norm(
            reader.take(f"{prefix}.post_attention_layernorm.weight", width),
            reader.concat({f"{mlp}.gate_proj.weight": inner, f"{mlp}.up_proj.weight": inner}, width),
        )
        self.down = packing.matrix(reader.take(f"{mlp}.down_proj.weight", width, inner))

    def forward(self, hidden: Tensor, ops: Ops, rope: RopeTable, layout: Layout, kv: LayerKV) -> Tensor:
        """[N, D] -> [N, D]; writes the rows' keys and values into `kv`."""
        attended = ops.norm_attention(
            hidden, self.input_norm, self.eps, self.qkv, self.q_norm, self.k_norm, rope, layout, kv
        )
        hidden = ops.linear_add(attended, self.o_proj, hidden)
        gated = ops.norm_gate_up(hidden, self.mlp_norm, self.eps, self.gate_up)
        return ops.linear_add(gated, self.down, hidden)
