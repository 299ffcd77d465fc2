"""Whose voice it is: a clip becomes one x-vector, by a log-mel spectrogram and an ECAPA-TDNN.

Base checkpoints only. Everything is float32, one clip at a time, without a batch axis.
Source: spec 1.5 and 5.3.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qwen3tts_core.audio.clip import CLIP_RATE_HZ
from qwen3tts_core.config import SpeakerEncoderConfig
from qwen3tts_core.errors import CheckpointMismatch
from qwen3tts_core.model.layers import frozen
from qwen3tts_core.model.weights import TensorSource, WeightReader

N_FFT = 1024
HOP = 256
_EDGE = (N_FFT - HOP) // 2  # reflected on both sides, so that n samples make n // HOP frames


# ---------------------------------------------------------------- mel
def slaney_filterbank(num_bands: int, sample_rate_hz: int = CLIP_RATE_HZ, n_fft: int = N_FFT) -> Tensor:
    """Triangles between band edges that are even on Slaney's mel scale, each of area one. [bands, n_fft / 2 + 1].

    The scale is linear below 1 kHz (3 mel to 200 Hz) and logarithmic above (27 mel to a factor of 6.4).
    Source: Slaney's Auditory Toolbox (1998); librosa's `filters.mel` defaults, which the reference calls.
    """
    top_mel = 15 + 27 * math.log(sample_rate_hz / 2 / 1000) / math.log(6.4)
    mels = np.linspace(0.0, top_mel, num_bands + 2)
    edges_hz = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * math.log(6.4) / 27))
    bins_hz = np.arange(n_fft // 2 + 1) * sample_rate_hz / n_fft
    left, centre, right = (edges_hz[i : i + num_bands, None] for i in range(3))
    triangles = np.minimum((bins_hz - left) / (centre - left), (right - bins_hz) / (right - centre)).clip(
        min=0
    )
    return torch.from_numpy((triangles * 2 / (right - left)).astype(np.float32))


def log_mel(samples: Tensor, filterbank: Tensor) -> Tensor:
    """[n] float32 at 24 kHz, n > 384 -> [bands, n // HOP]: log of the magnitude mel, floored at 1e-5."""
    padded = F.pad(samples[None], (_EDGE, _EDGE), mode="reflect")[0]
    window = torch.hann_window(N_FFT, device=samples.device)
    spectrum = torch.stft(padded, N_FFT, HOP, window=window, center=False, return_complex=True)
    magnitude = (torch.view_as_real(spectrum).square().sum(-1) + 1e-9).sqrt()
    return (filterbank @ magnitude).clamp(min=1e-5).log()


# ---------------------------------------------------------------- network
class _Conv(nn.Module):
    """A convolution that keeps the length by reflecting the edges. [in, T] -> [out, T]."""

    def __init__(
        self,
        reader: WeightReader,
        name: str,
        width_in: int,
        width_out: int,
        kernel: int = 1,
        dilation: int = 1,
    ) -> None:
        super().__init__()
        self.weight = frozen(reader.take(f"{name}.weight", width_out, width_in, kernel))
        self.bias = frozen(reader.take(f"{name}.bias", width_out))
        self.dilation = dilation
        self.padding = dilation * (kernel - 1) // 2

    def forward(self, x: Tensor) -> Tensor:
        if self.padding:
            x = F.pad(x[None], (self.padding, self.padding), mode="reflect")[0]
        return F.conv1d(x, self.weight, self.bias, dilation=self.dilation)


class _SERes2Net(nn.Module):
    """1x1, then a chain of dilated convolutions over slices of the channels, 1x1, a gate per channel, residual."""

    def __init__(
        self,
        reader: WeightReader,
        name: str,
        config: SpeakerEncoderConfig,
        width: int,
        kernel: int,
        dilation: int,
    ) -> None:
        super().__init__()
        self.num_slices = config.res2net_scale
        part = width // self.num_slices
        self.tdnn1 = _Conv(reader, f"{name}.tdnn1.conv", width, width)
        self.chain = nn.ModuleList(
            _Conv(reader, f"{name}.res2net_block.blocks.{i}.conv", part, part, kernel, dilation)
            for i in range(self.num_slices - 1)
        )
        self.tdnn2 = _Conv(reader, f"{name}.tdnn2.conv", width, width)
        self.squeeze = _Conv(reader, f"{name}.se_block.conv1", width, config.se_channels)
        self.excite = _Conv(reader, f"{name}.se_block.conv2", config.se_channels, width)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.tdnn1(x).relu().chunk(self.num_slices)
        parts = [first]
        for i, (conv, part) in enumerate(zip(self.chain, others, strict=True)):
            parts.append(conv(part + parts[-1] if i else part).relu())
        y = self.tdnn2(torch.cat(parts)).relu()
        gate = self.excite(self.squeeze(y.mean(dim=1, keepdim=True)).relu()).sigmoid()
        gated: Tensor = y * gate
        return gated + x


class _AttentiveStatistics(nn.Module):
    """Mean and deviation over time, each channel with its own weights over time. [C, T] -> [2 C]."""

    def __init__(self, reader: WeightReader, name: str, width: int, attention_width: int) -> None:
        super().__init__()
        self.tdnn = _Conv(reader, f"{name}.tdnn.conv", 3 * width, attention_width)
        self.conv = _Conv(reader, f"{name}.conv", attention_width, width)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = _weighted_statistics(x, torch.full_like(x, 1 / x.shape[1]))
        context = torch.cat([x, mean.expand_as(x), std.expand_as(x)])
        weights = self.conv(self.tdnn(context).relu().tanh()).softmax(dim=1)
        return torch.cat(_weighted_statistics(x, weights))[:, 0]


def _weighted_statistics(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation over time, [C, 1] each."""
    mean = (weights * x).sum(dim=1, keepdim=True)
    variance = (weights * (x - mean).square()).sum(dim=1, keepdim=True)
    return mean, variance.clamp(min=1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    """Clip to x-vector, as wide as the talker; the talker's prompt takes it as it is."""

    def __init__(self, source: TensorSource, config: SpeakerEncoderConfig, device: torch.device) -> None:
        """Raises CheckpointMismatch for sizes or tensors that this network can't have."""
        super().__init__()
        _check(source.where, config)
        reader = WeightReader(
            source, owned="speaker_encoder.", elsewhere=("talker.",), device=device, dtype=torch.float32
        )
        kernels, dilations = config.kernel_sizes, config.dilations
        width, pooled_width = config.channels[0], config.channels[-1]
        last = len(config.channels) - 1
        self.first = _Conv(reader, "blocks.0.conv", config.mel_dim, width, kernels[0], dilations[0])
        self.blocks = nn.ModuleList(
            _SERes2Net(reader, f"blocks.{i}", config, width, kernels[i], dilations[i]) for i in range(1, last)
        )
        self.mfa = _Conv(reader, "mfa.conv", width * (last - 1), pooled_width, kernels[last], dilations[last])
        self.asp = _AttentiveStatistics(reader, "asp", pooled_width, config.attention_channels)
        self.fc = _Conv(reader, "fc", 2 * pooled_width, config.embedding_dim)
        reader.finish()
        self.filterbank = frozen(slaney_filterbank(config.mel_dim).to(device))

    def forward(self, samples: Tensor) -> Tensor:
        """[n] float32 at 24 kHz -> [embedding_dim]. Needs more frames of 256 samples than the widest padding."""
        return self.embed_mel(log_mel(samples, self.filterbank))

    def embed_mel(self, mel: Tensor) -> Tensor:
        """[bands, T] -> [embedding_dim]."""
        x = self.first(mel).relu()
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        pooled = self.asp(self.mfa(torch.cat(outputs)).relu())
        embedding: Tensor = self.fc(pooled[:, None])[:, 0]
        return embedding


def _check(where: str, config: SpeakerEncoderConfig) -> None:
    problems = []
    if config.sample_rate_hz != CLIP_RATE_HZ:
        problems.append(f"sample_rate: the mel is made for {CLIP_RATE_HZ}, got {config.sample_rate_hz}")
    lengths = {len(config.channels), len(config.kernel_sizes), len(config.dilations)}
    if len(lengths) > 1 or len(config.channels) < 3:
        problems.append(
            "enc_channels, enc_kernel_sizes and enc_dilations: expected one list length, 3 or more, "
            f"got {sorted(lengths)}"
        )
    elif len(set(config.channels[:-1])) > 1 or config.channels[0] % config.res2net_scale:
        problems.append(
            f"enc_channels: all but the last must be equal and divisible by enc_res2net_scale "
            f"{config.res2net_scale}, got {list(config.channels)}"
        )
    if any(kernel % 2 == 0 for kernel in config.kernel_sizes):
        problems.append(f"enc_kernel_sizes: only odd ones keep the length, got {list(config.kernel_sizes)}")
    if problems:
        raise CheckpointMismatch(where, [f"speaker_encoder_config.{problem}" for problem in problems])
