"""Codes, texts and phones of the whole corpus on the training device, and batches of them.

A batch is one bucket of lengths, so its shapes are static, and so many utterances that all buckets cost
about the same. Drawing one touches the device only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints.speaking.recipe.talker_model import Batch, PromptIds, lay_out, num_rows


@dataclass(frozen=True, slots=True)
class Bucket:
    """Utterances whose longest layout has at most `rows` rows. frames, text: the most of any of them."""

    rows: int
    frames: int
    text: int
    utterances: Tensor


class CodeCorpus:
    def __init__(
        self, file: Path, ids: PromptIds, device: torch.device, edges: tuple[int, ...] = (80, 128, 192, 320)
    ) -> None:
        """edges: rows of the buckets; longer utterances are left out. Raises ValueError when none is left."""
        data = {name: tensor.to(device) for name, tensor in load_file(str(file)).items()}
        self._ids, self._device = ids, device
        self._codes, self._phones = data["codes"], data["phones"]
        self._text = data["text_ids"]
        self._num_frames, self._num_text = data["num_frames"].long(), data["num_text"].long()
        self._voices = data["voices"].long()
        self._first_frame = self._num_frames.cumsum(0) - self._num_frames
        self._first_text = self._num_text.cumsum(0) - self._num_text
        self.buckets = self._sorted_into(edges)
        if not self.buckets:
            raise ValueError(f"no utterance of {file} has at most {edges[-1]} rows")

    def _sorted_into(self, edges: tuple[int, ...]) -> list[Bucket]:
        rows, buckets, lower = num_rows(self._num_text, self._num_frames), [], 0
        for edge in edges:
            chosen = ((rows > lower) & (rows <= edge)).nonzero()[:, 0]
            lower = edge
            if len(chosen):
                frames, text = int(self._num_frames[chosen].max()), int(self._num_text[chosen].max())
                buckets.append(Bucket(edge, frames, text, chosen))
        return buckets

    @property
    def num_utterances(self) -> int:
        return sum(len(bucket.utterances) for bucket in self.buckets)

    def draw(self, rows_per_step: int) -> Batch:
        """A batch from one bucket, chosen by how many frames it holds."""
        weights = [len(bucket.utterances) * bucket.rows for bucket in self.buckets]
        which = int(torch.multinomial(torch.tensor(weights, dtype=torch.float), 1))
        bucket = self.buckets[which]
        count = max(1, rows_per_step // bucket.rows)
        device = self._device
        chosen = bucket.utterances[torch.randint(len(bucket.utterances), (count,), device=device)]
        is_streaming = torch.rand(count, device=device) < 0.5
        is_auto = torch.rand(count, device=device) < 0.3
        return self.batch(chosen, bucket, is_streaming, is_auto)

    def batch(self, chosen: Tensor, bucket: Bucket, is_streaming: Tensor, is_auto: Tensor) -> Batch:
        num_frames, num_text = self._num_frames[chosen], self._num_text[chosen]
        frame = torch.arange(bucket.frames, device=self._device)
        at = (self._first_frame[chosen][:, None] + frame).clamp(max=len(self._codes) - 1)
        token = torch.arange(bucket.text, device=self._device)
        text = self._text[(self._first_text[chosen][:, None] + token).clamp(max=len(self._text) - 1)].long()
        laid_out = lay_out(
            self._ids, text, num_text, num_frames, self._voices[chosen], is_streaming, is_auto, bucket.rows
        )
        return Batch(*laid_out, self._codes[at].long(), self._phones[at].long(), num_frames)
