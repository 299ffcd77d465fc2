"""Judges of the codec's waveforms: by periods and by spectrograms. Training only.

Source: Kong et al. 2020 (HiFi-GAN), multi-period discriminator; Défossez et al. 2022 (EnCodec), complex
spectrogram discriminators; hinge loss and feature matching as there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

_PERIODS = (2, 3, 5, 7, 11)
_FFT_SIZES = (2048, 1024, 512)
_SLOPE = 0.1

Judgement = tuple[Tensor, list[Tensor]]
"""Scores, and the features on the way to them."""


class PeriodDiscriminator(nn.Module):
    """Samples that lie `period` apart stand in one column."""

    def __init__(self, period: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.period = period
        pairs = zip((1, *widths[:-1]), widths, strict=True)
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv2d(a, b, (5, 1), (3, 1), padding=(2, 0))) for a, b in pairs
        )
        self.out = weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, wave: Tensor) -> Judgement:
        missing = -wave.shape[-1] % self.period
        x = functional.pad(wave, (0, missing))[:, None].unflatten(2, (-1, self.period))
        return _run(x, self.convs, self.out)


class SpectrumDiscriminator(nn.Module):
    """Real and imaginary part of a spectrogram as an image."""

    def __init__(self, num_fft: int, width: int) -> None:
        super().__init__()
        self.num_fft = num_fft
        self.register_buffer("window", torch.hann_window(num_fft), persistent=False)
        self.window: Tensor
        strides = ((1, 1), (2, 1), (2, 1), (2, 1))
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv2d(2 if i == 0 else width, width, (9, 3), stride, padding=(4, 1)))
            for i, stride in enumerate(strides)
        )
        self.out = weight_norm(nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, wave: Tensor) -> Judgement:
        with torch.autocast(wave.device.type, enabled=False):
            spectrum = torch.stft(
                wave.float(), self.num_fft, self.num_fft // 4, window=self.window,
                normalized=True, return_complex=True, pad_mode="constant",
            )  # fmt: skip
            x = torch.stack([spectrum.real, spectrum.imag], dim=1)
        return _run(x, self.convs, self.out)


def _run(x: Tensor, convs: nn.ModuleList, out: nn.Module) -> Judgement:
    features = []
    for conv in convs:
        # Channels innermost, as cuDNN computes: else it turns every image there and back.
        x = functional.leaky_relu(conv(x.contiguous(memory_format=torch.channels_last)), _SLOPE)
        features.append(x)
    return out(x), features


class Discriminators(nn.Module):
    def __init__(self, scale: int = 8) -> None:
        """scale: channels of the first layers, times 4."""
        super().__init__()
        widths = (4 * scale, 8 * scale, 16 * scale, 32 * scale)
        self.judges = nn.ModuleList(
            [PeriodDiscriminator(period, widths) for period in _PERIODS]
            + [SpectrumDiscriminator(num_fft, 4 * scale) for num_fft in _FFT_SIZES]
        )

    def forward(self, wave: Tensor) -> list[Judgement]:
        """[B, S] -> one judgement a discriminator."""
        return [judge(wave) for judge in self.judges]


def judge_loss(real: list[Judgement], fake: list[Judgement]) -> Tensor:
    """The discriminators' hinge loss."""
    losses = [
        functional.relu(1 - r.float()).mean() + functional.relu(1 + f.float()).mean()
        for (r, _), (f, _) in zip(real, fake, strict=True)
    ]
    return torch.stack(losses).mean()


def codec_losses(real: list[Judgement], fake: list[Judgement]) -> tuple[Tensor, Tensor]:
    """(adversarial loss, feature matching) of the codec."""
    fooled = torch.stack([-scores.float().mean() for scores, _ in fake]).mean()
    distances = [
        functional.l1_loss(f.float(), r.detach().float()) / (r.detach().float().abs().mean() + 1e-5)
        for (_, reals), (_, fakes) in zip(real, fake, strict=True)
        for r, f in zip(reals, fakes, strict=True)
    ]
    return fooled, torch.stack(distances).mean()
