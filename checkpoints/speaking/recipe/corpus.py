"""The shards in memory, on the training device: waveforms for the codec, codes for the talker.

Waveforms lie flat as int16 at 24 kHz, 5 minutes of it 14 MB; 40 hours are 7 GB, which a GPU holds. The
teacher's 16 kHz are resampled on the device, a shard at a time. New shards are taken up on the way.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from checkpoints.speaking.recipe.layout import SAMPLES_PER_FRAME
from checkpoints.speaking.recipe.synthesize import LABELS_PER_FRAME

_TAPS_PER_SIDE = 24  # of the resampling filter, at 16 kHz


def resample_16k_to_24k(samples: Tensor) -> Tensor:
    """[S] float at 16 kHz -> [S * 3 / 2]; S even. A windowed sinc, flat to about 7.5 kHz.

    Three filters, one for each place that an output can have between the inputs: output 3 m + p lies at
    input 2 m + 2 p / 3.
    """
    place = torch.arange(3, device=samples.device)[:, None] * 2 / 3
    time = torch.arange(-_TAPS_PER_SIDE, _TAPS_PER_SIDE + 2, device=samples.device)[None] - place
    window = torch.cos((time / (_TAPS_PER_SIDE + 1)).clamp(-1, 1) * torch.pi / 2).square()
    filters = torch.sinc(time * 0.97) * 0.97 * window
    padded = functional.pad(samples[None, None], (_TAPS_PER_SIDE, _TAPS_PER_SIDE + 1))
    # Lengths differ from shard to shard, so no search for the fastest kernel; and TF32 would be heard.
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        return functional.conv1d(padded, filters[:, None], stride=2)[0].T.flatten()


class WaveCorpus:
    """Everything that `synthesize` has written so far."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._known: set[str] = set()
        self.samples = torch.empty(0, dtype=torch.int16, device=device)
        self.phones = torch.empty(0, dtype=torch.uint8, device=device)
        self.num_frames = torch.empty(0, dtype=torch.int64, device=device)
        self.voices = torch.empty(0, dtype=torch.uint8)
        self.text_ids = torch.empty(0, dtype=torch.int16)
        self.num_text = torch.empty(0, dtype=torch.int32)

    def refresh(self, most: int | None = None) -> int:
        """Take up to `most` new shards in; how many there were."""
        new = [
            file for file in sorted(self._folder.glob("shard-*.safetensors")) if file.name not in self._known
        ]
        parts = [load_file(str(file)) for file in new[:most]]
        if not parts:
            return 0
        waves = [
            (resample_16k_to_24k(part["samples"].to(self._device).float()))
            .round()
            .clamp(-32768, 32767)
            .to(torch.int16)
            for part in parts
        ]
        self.samples = torch.cat([self.samples, *waves])
        self.phones = torch.cat([self.phones, *(part["phones"].to(self._device) for part in parts)])
        frames = [part["num_frames"].to(self._device, torch.int64) for part in parts]
        self.num_frames = torch.cat([self.num_frames, *frames])
        for name in ("voices", "text_ids", "num_text"):
            setattr(self, name, torch.cat([getattr(self, name), *(part[name] for part in parts)]))
        self._known.update(file.name for file in new[:most])
        self._starts = self.num_frames.cumsum(0) - self.num_frames
        self._ends = self.num_frames.cumsum(0)
        return len(parts)

    @property
    def total_frames(self) -> int:
        return len(self.phones) // LABELS_PER_FRAME

    def crops(self, count: int, num_frames: int) -> tuple[Tensor, Tensor]:
        """Random crops on the frame grid: waves [B, F * 1920] float32 in [-1, 1], phones [B, F * 4] int64.

        An utterance is chosen by its length, and left only where it is shorter than the crop.
        """
        device = self._device
        point = (torch.rand(count, device=device) * self.total_frames).long().clamp(max=self.total_frames - 1)
        chosen = torch.searchsorted(self._ends, point, right=True)
        room = (self.num_frames[chosen] - num_frames).clamp(min=0)
        start = self._starts[chosen] + (torch.rand(count, device=device) * (room + 1)).long()
        start = start.clamp(max=self.total_frames - num_frames)
        sample = start[:, None] * SAMPLES_PER_FRAME + torch.arange(
            num_frames * SAMPLES_PER_FRAME, device=device
        )
        label = start[:, None] * LABELS_PER_FRAME + torch.arange(num_frames * LABELS_PER_FRAME, device=device)
        return self.samples[sample].float() / 32768, self.phones[label].long()
