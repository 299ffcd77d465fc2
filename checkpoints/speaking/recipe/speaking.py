"""Texts through the project's own Talker engine and codec: what evaluation and probes listen to.

On a GPU the plain ops are used, step by step: no kernels to compile, and some milliseconds a frame for
all texts together, which is what a probe within a training can afford.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from qwen3tts_core.config import CheckpointConfig, TalkerEngineConfig
from qwen3tts_core.engine.talker_engine import TalkerEngine
from qwen3tts_core.engine.talker_runner import TalkerRunner
from qwen3tts_core.model.codec_decoder import open_codec_decoder
from qwen3tts_core.model.talker import open_talker
from qwen3tts_core.ops.interface import PendingTransfer
from qwen3tts_core.ops.reference import HostTransfer, ReferenceOps, run_eagerly
from qwen3tts_core.ops.select import Backend
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.text.prompt import SpeechText, TextLayout, build_plan, check_tokenizer
from qwen3tts_core.text.tokenizer import TextTokenizer
from qwen3tts_core.types import FrameBatch, SpeechRequest

_TIMEOUT_S = 600.0
_LONGEST_PROMPT = 200


@dataclass(frozen=True, slots=True)
class Wanted:
    text: str
    voice: str
    seed: int
    layout: TextLayout = "full"


@dataclass(frozen=True, slots=True)
class Uttered:
    """codes: [F, G] int16. has_ended: by the end of speech, not by the limit of frames."""

    codes: NDArray[np.int16]
    has_ended: bool


class _Copied(HostTransfer):
    """Results come to the host at once, from whatever device."""

    def start(self, result: torch.Tensor) -> PendingTransfer:
        return super().start(result.cpu())


class _Inbox:
    def __init__(self) -> None:
        self.items: queue.Queue[tuple[str, FrameBatch | Exception]] = queue.Queue()

    def put(self, request_id: str, item: FrameBatch | Exception) -> None:
        self.items.put((request_id, item))

    def flush(self) -> None:
        """Nothing is held back."""


def utter(
    checkpoint: Path,
    wanted: Sequence[Wanted],
    *,
    device: torch.device | str = "cpu",
    num_slots: int = 8,
    most_frames: int | None = None,
) -> list[Uttered]:
    """Codes of all texts with the checkpoint's own sampling; most_frames: None takes its limit.

    Raises CheckpointMismatch for a folder that isn't whole, and whatever an engine says of a request.
    """
    config = CheckpointConfig.from_checkpoint(checkpoint)
    tokenizer = TextTokenizer.from_checkpoint(checkpoint)
    check_tokenizer(config, tokenizer)
    limit = most_frames or config.max_new_tokens
    sizes = TalkerEngineConfig(
        num_slots=num_slots,
        max_queued=len(wanted),
        max_positions=limit + _LONGEST_PROMPT,
        decode_buckets=(num_slots,),
    )
    device = torch.device(device)
    ops = ReferenceOps()
    talker = open_talker(checkpoint, config, num_positions=sizes.max_positions, ops=ops, device=device)
    backend = Backend(device, ops, run_eagerly, _Copied())
    inbox = _Inbox()
    engine = TalkerEngine(TalkerRunner(talker, sizes, backend), ChunkRamp(), inbox)
    for i, one in enumerate(wanted):
        speech = SpeechText(one.text, one.voice, language="english", layout=one.layout)
        plan = build_plan(config, tokenizer, speech)
        engine.submit(SpeechRequest(str(i), plan, config.sampling, one.seed, limit))
    engine.start()
    try:
        return _gather(inbox, len(wanted), config.talker.num_code_groups)
    finally:
        engine.stop()


def _gather(inbox: _Inbox, count: int, num_groups: int) -> list[Uttered]:
    parts: list[list[bytes]] = [[] for _ in range(count)]
    ended: dict[int, bool] = {}
    while len(ended) < count:
        request_id, item = inbox.items.get(timeout=_TIMEOUT_S)
        if isinstance(item, Exception):
            raise item
        parts[int(request_id)].append(item.codes)
        if item.finish is not None:
            ended[int(request_id)] = item.finish == "stop"
    codes = [np.frombuffer(b"".join(part), "<i2").reshape(-1, num_groups) for part in parts]
    return [Uttered(codes[i], ended[i]) for i in range(count)]


def to_samples(checkpoint: Path, codes: Sequence[NDArray[np.integer]]) -> list[NDArray[np.int16]]:
    """Each utterance through the project's decoder: [F * 1920] int16."""
    decoder = open_codec_decoder(checkpoint, CheckpointConfig.from_checkpoint(checkpoint).codec)
    return [
        decoder.decode_samples(torch.from_numpy(one.astype(np.int64))[None])[0].numpy()
        if len(one)
        else np.zeros(0, np.int16)
        for one in codes
    ]
