"""A clip in, a voice out, and the same clip never twice.

Owns the two networks of a Base checkpoint and remembers their answers by content hash and mode.
Called from any number of threads: equal requests share one run, different ones take turns on the
device. Knows nothing of files, URLs or names.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from qwen3tts_core.audio.clip import ReferenceClip
from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.engine.memo import Memo, MemoStats
from qwen3tts_core.errors import CheckpointMismatch, EngineFault
from qwen3tts_core.model.codec_encoder import CodecEncoder
from qwen3tts_core.model.speaker_encoder import SpeakerEncoder
from qwen3tts_core.model.weights import SafetensorsFolder
from qwen3tts_core.types import ReferenceVoice

logger = logging.getLogger(__name__)

DEFAULT_MEMO_BYTES = 64 << 20
"""Room for about 3,000 half-minute voices of the 1.7B checkpoint (20 KB each)."""


class ReferenceEncoder:
    """Clips to voices. fingerprint: names the weights; voices of equal fingerprints may replace each other.
    num_groups: codes of a frame."""

    def __init__(
        self,
        speaker: SpeakerEncoder,
        codec: CodecEncoder,
        device: torch.device,
        memo_bytes: int = DEFAULT_MEMO_BYTES,
    ) -> None:
        self.fingerprint = _fingerprint(speaker, codec)
        self.num_groups = codec.num_groups
        self._speaker = speaker
        self._codec = codec
        self._device = device
        self._memo: Memo[ReferenceVoice] = Memo(memo_bytes, _size_of)
        self._device_lock = threading.Lock()

    def encode(self, clip: ReferenceClip, in_context: bool) -> ReferenceVoice:
        """The voice of the clip: its x-vector, and with `in_context` its codes too. Blocks.

        Raises EngineFault if a network answers with something that isn't finite.
        """
        key = clip.voice_key(in_context)
        return self._memo.get(key, lambda: self._run(clip, in_context, key))

    def stats(self) -> MemoStats:
        """num_runs counts how often the networks ran."""
        return self._memo.stats()

    @torch.inference_mode()
    def _run(self, clip: ReferenceClip, in_context: bool, key: str) -> ReferenceVoice:
        # TF32 would be the default for convolutions, and picks other codes. The flags are the
        # process's, so they are set inside the lock.
        with (
            self._device_lock,
            torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False),
        ):
            begin = time.perf_counter()
            samples = torch.tensor(clip.samples, device=self._device)
            x_vector = self._speaker(samples).cpu()
            codes = self._codec(samples).cpu() if in_context else None
        if not bool(x_vector.isfinite().all()):
            raise EngineFault(f"the x-vector of clip {clip.digest[:12]} isn't finite")
        logger.info("clip %s (%.1f s) encoded in %.3f s", key, clip.seconds, time.perf_counter() - begin)
        return ReferenceVoice(
            key=key,
            x_vector=x_vector.numpy().astype("<f4").tobytes(),
            codes=b"" if codes is None else codes.numpy().astype("<i2").tobytes(),
        )


def open_reference_encoder(
    checkpoint: Path,
    config: CheckpointConfig,
    device: torch.device | str = "cpu",
    memo_bytes: int = DEFAULT_MEMO_BYTES,
) -> ReferenceEncoder:
    """Load both networks of a Base checkpoint, in float32.

    Raises CheckpointMismatch when it is of another kind, or its tensors aren't the ones expected.
    """
    if config.speaker_encoder is None:
        raise CheckpointMismatch(
            str(checkpoint), [f"tts_model_type: only 'base' clones voices, got {config.model_type!r}"]
        )
    device = torch.device(device)
    speaker = SpeakerEncoder(SafetensorsFolder(checkpoint), config.speaker_encoder, device)
    codec = CodecEncoder(
        SafetensorsFolder(checkpoint / "speech_tokenizer"), config.codec_encoder, config.codec, device
    )
    return ReferenceEncoder(speaker, codec, device, memo_bytes)


def _size_of(voice: ReferenceVoice) -> int:
    return len(voice.key) + len(voice.x_vector) + len(voice.codes)


def _fingerprint(*networks: nn.Module) -> str:
    """SHA-256 over every weight of the networks, in hex."""
    digest = hashlib.sha256()
    for network in networks:
        tensors: dict[str, Tensor] = network.state_dict()
        for name in sorted(tensors):
            digest.update(f"{name} {tuple(tensors[name].shape)}\n".encode())
            digest.update(tensors[name].contiguous().cpu().numpy().data)
    return digest.hexdigest()
