"""The corpus as the talker sees it: codes, text, phones.

    python -m checkpoints.speaking.recipe.run encode

The whole corpus is one long recording, cut into windows with enough context on both sides for the
encoder's reach. Every frame of pure silence gets one fixed row of codes: else their fine groups tell
the talker which utterance it is in, and it follows them instead of the text (measured, in README.md).
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from checkpoints.speaking.recipe.codec_model import Codec
from checkpoints.speaking.recipe.corpus import WaveCorpus
from checkpoints.speaking.recipe.layout import SAMPLES_PER_FRAME
from checkpoints.speaking.recipe.sitting import Journal
from checkpoints.speaking.recipe.synthesize import LABELS_PER_FRAME

_CONTEXT = 48  # frames: three layers reach 36, the convolutions one or two more
_SILENT_FRAMES = 64


@torch.no_grad()
def encode_corpus(
    codec: Codec, corpus: WaveCorpus, *, window: int = 500, batch: int = 64, journal: Journal
) -> Tensor:
    """Codes [F, G] uint8 on the host, silence made canonical. window: frames kept of each pass."""
    codec.eval()
    total, span = corpus.total_frames, window + 2 * _CONTEXT
    device = corpus.samples.device
    starts = torch.arange(0, total, window, device=device)
    parts = []
    for group in starts.split(batch):
        first = group - _CONTEXT
        sample = first[:, None] * SAMPLES_PER_FRAME + torch.arange(span * SAMPLES_PER_FRAME, device=device)
        inside = (sample >= 0) & (sample < len(corpus.samples))
        wave = corpus.samples[sample.clamp(0, len(corpus.samples) - 1)].float() / 32768 * inside
        parts.append(codec.encode(wave)[:, _CONTEXT : _CONTEXT + window].flatten(0, 1).to(torch.uint8))
    codes = torch.cat(parts)[:total]
    silence = silent_codes(codec)
    is_silent = (corpus.phones.view(-1, LABELS_PER_FRAME) == 0).all(dim=1)
    codes[is_silent] = silence
    used = [int(column.unique().numel()) for column in codes.T]
    journal.write(
        stage="encode", frames=total, silent=round(float(is_silent.float().mean()), 3), used=str(used)
    )
    return codes.cpu()


@torch.no_grad()
def silent_codes(codec: Codec) -> Tensor:
    """[G] uint8: what the middle of digital silence is encoded as."""
    codec.eval()
    device = codec.decoder.pre_conv.conv.weight.device
    silence = torch.zeros(1, _SILENT_FRAMES * SAMPLES_PER_FRAME, device=device)
    return codec.encode(silence)[0, _SILENT_FRAMES // 2].to(torch.uint8)


def write_codes(file: Path, codes: Tensor, corpus: WaveCorpus) -> None:
    """One safetensors file: 0.9 MB an hour. phones: one a frame, that of its third quarter."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    save_file(
        {
            "codes": codes.contiguous(),
            "phones": corpus.phones.view(-1, LABELS_PER_FRAME)[:, 2].cpu().contiguous(),
            "num_frames": corpus.num_frames.to("cpu", torch.int32),
            "voices": corpus.voices,
            "text_ids": corpus.text_ids,
            "num_text": corpus.num_text,
        },
        str(partial),
    )
    partial.rename(file)
