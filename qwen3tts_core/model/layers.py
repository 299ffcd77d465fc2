"""The decoder layer that talker and code predictor share, and its rotary table.

Plain modules that receive their `Ops`: no device, no backend, no cache management here.
Source: spec 2.1 and 2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qwen3tts_core.config import TransformerConfig
from qwen3tts_core.model.weights import WeightReader
from qwen3tts_core.ops.interface import LayerKV, Layout, Ops, RopeTable


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


def gain_and_matrix(gain: Tensor, matrix: Tensor, *, fold: bool) -> tuple[nn.Parameter | None, nn.Parameter]:
    """A norm's gain [D] and the matrix [.., N, D] after it; folded: None, and their product, rounded once."""
    if not fold:
        return frozen(gain), frozen(matrix)
    return None, frozen((matrix.float() * gain.float()).to(matrix.dtype))


class DecoderLayer(nn.Module):
    """Grouped-query attention with q/k norm and rotary positions, then a SwiGLU MLP."""

    def __init__(
        self, reader: WeightReader, prefix: str, config: TransformerConfig, *, fold_gains: bool
    ) -> None:
        """fold_gains: see `Ops.folds_gains`."""
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.eps = config.rms_norm_eps
        self.input_norm, self.qkv = gain_and_matrix(
            reader.take(f"{prefix}.input_layernorm.weight", width),
            reader.concat(
                {
                    f"{attention}.q_proj.weight": q_rows,
                    f"{attention}.k_proj.weight": kv_rows,
                    f"{attention}.v_proj.weight": kv_rows,
                },
                width,
            ),
            fold=fold_gains,
        )
        self.q_norm = frozen(reader.take(f"{attention}.q_norm.weight", config.head_dim))
        self.k_norm = frozen(reader.take(f"{attention}.k_norm.weight", config.head_dim))
        self.o_proj = frozen(reader.take(f"{attention}.o_proj.weight", width, q_rows))
        self.mlp_norm, self.gate_up = gain_and_matrix(
            reader.take(f"{prefix}.post_attention_layernorm.weight", width),
            reader.concat({f"{mlp}.gate_proj.weight": inner, f"{mlp}.up_proj.weight": inner}, width),
            fold=fold_gains,
        )
        self.down = frozen(reader.take(f"{mlp}.down_proj.weight", width, inner))

    def forward(self, hidden: Tensor, ops: Ops, rope: RopeTable, layout: Layout, kv: LayerKV) -> Tensor:
        """[N, D] -> [N, D]; writes the rows' keys and values into `kv`."""
        attended = ops.norm_attention(
            hidden, self.input_norm, self.eps, self.qkv, self.q_norm, self.k_norm, rope, layout, kv
        )
        hidden = ops.linear_add(attended, self.o_proj, hidden)
        gated = ops.norm_gate_up(hidden, self.mlp_norm, self.eps, self.gate_up)
        return ops.linear_add(gated, self.down, hidden)
