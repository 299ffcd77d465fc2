"""Log-mel spectrograms in float32: what the codec's losses and its encoder look at."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from checkpoints.speaking.recipe.layout import SAMPLE_RATE_HZ

LOG_FLOOR = 1e-5
_LOWEST_HZ = 20.0


class Mel(nn.Module):
    """[B, S] -> [B, bands, 1 + S // hop]; HTK mel scale, area-normalised triangles."""

    def __init__(self, num_fft: int, hop: int, num_bands: int) -> None:
        super().__init__()
        self.num_fft, self.hop = num_fft, hop
        self.register_buffer("window", torch.hann_window(num_fft), persistent=False)
        self.register_buffer("filters", _filters(num_fft, num_bands), persistent=False)
        self.window: Tensor
        self.filters: Tensor

    def magnitude(self, wave: Tensor) -> Tensor:
        """[B, S] -> [B, 1 + num_fft // 2, frames]; never in half precision."""
        with torch.autocast(wave.device.type, enabled=False):
            spectrum = torch.stft(
                wave.float(),
                self.num_fft,
                self.hop,
                window=self.window,
                return_complex=True,
                pad_mode="constant",
            )
            return (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()

    def log_bands(self, magnitude: Tensor) -> Tensor:
        with torch.autocast(magnitude.device.type, enabled=False):
            return torch.log(self.filters @ magnitude + LOG_FLOOR)

    def forward(self, wave: Tensor) -> Tensor:
        return self.log_bands(self.magnitude(wave))


def _filters(num_fft: int, num_bands: int) -> Tensor:
    """[bands, 1 + num_fft // 2]."""
    lowest, highest = _mel(_LOWEST_HZ), _mel(SAMPLE_RATE_HZ / 2)
    edges = 700 * (10 ** (torch.linspace(lowest, highest, num_bands + 2, dtype=torch.float64) / 2595) - 1)
    bins = torch.linspace(0, SAMPLE_RATE_HZ / 2, num_fft // 2 + 1, dtype=torch.float64)
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (bins - low) / (centre - low), (high - bins) / (high - centre)
    return (torch.minimum(rising, falling).clamp(min=0) * 2 / (high - low)).float()


def _mel(hz: float) -> float:
    return 2595 * math.log10(1 + hz / 700)
