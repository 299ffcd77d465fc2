"""Trainable parts that the codec's and the talker's layers share. Source: spec 2.1, 2.2."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class RmsNorm(nn.Module):
    """`nn.RMSNorm` whose gain takes its input's dtype: mixed, autocast would leave the fused kernel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


def rope_angles(
    num_positions: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32, [positions, head_dim / 2]."""
    half = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    angles = torch.arange(num_positions, device=device).float()[:, None] * theta**-half
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-form rotary embedding in float32. x: [.., T, head_dim]; cos, sin: [T, head_dim / 2]."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
