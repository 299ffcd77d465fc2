"""A weight matrix in one byte a value: e4m3, with a float32 scale for each output row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn
_LARGEST = 448.0  # that e4m3 has
_RECIPROCAL = 1 / _LARGEST
"""To multiply by: a division by a number is one on CPU and this on a GPU, which may round a scale differently, and then
each weight that lies between two of e4m3."""


class ScaledMatrix(nn.Module):
    """values: [.., N, K] e4m3; scales: [.., N] float32. Stands for values * scales[.., None]."""

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @classmethod
    def quantized(cls, matrix: Tensor) -> ScaledMatrix:
        """The nearest: each row's largest value becomes e4m3's largest."""
        wide = matrix.float()
        largest = wide.abs().amax(dim=-1)
        scales = torch.where(largest > 0, largest * _RECIPROCAL, 1.0)
        return cls((wide / scales[..., None]).to(E4M3), scales)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[.., N, K], rounded once."""
        return (self.values.float() * self.scales[..., None]).to(dtype)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> ScaledMatrix:
        return ScaledMatrix(self.values[index], self.scales[index])

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


Matrix = Tensor | ScaledMatrix
