"""The ReferenceEncoder deployment: clips in, voices out, for the Base checkpoints.

The one place where bytes of strangers are decoded. All of it happens on worker threads, so that the
loop answers Serve's and the ingress's questions meanwhile. Clips come from the ingress by object
reference: a message by value may hold 4 MiB.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from deployments.engine_metrics import memory_table, start_publishing
from deployments.exported import RaySink
from deployments.logs import send_logs_to_stderr
from deployments.replica import Replica
from deployments.stream_load import StreamLoad
from qwen3tts_core.audio.clip import ReferenceClip, ReferenceLimits, read_clip
from qwen3tts_core.errors import EngineFault
from qwen3tts_core.types import ReferenceVoice

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

_NUM_THREADS = 2
"""Clips in work at once: the device takes one at a time, and the next is decoded meanwhile."""
_STUCK_AFTER_S = 120.0  # a clip of 30 s takes a slow CPU a few seconds, those before it included


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """checkpoint: a local folder or a hub id, of a Base checkpoint. memo_bytes: None takes the core's default."""

    checkpoint: str
    limits: ReferenceLimits
    device: Literal["cpu", "cuda"] = "cpu"
    memo_bytes: int | None = None


class EncodedVoice(NamedTuple):
    """num_groups: codes of a frame. encoder: fingerprint of the weights. clip: where the caller asked for it."""

    voice: ReferenceVoice
    num_groups: int
    encoder: str
    clip: ReferenceClip | None = None


class ReferenceEncoderLike(Protocol):
    """The engine as this deployment sees it; tests bring their own."""

    fingerprint: str
    num_groups: int

    def encode(self, clip: ReferenceClip, in_context: bool) -> ReferenceVoice: ...

    def stats(self) -> DataclassInstance: ...


OpenEncoder = Callable[[EncoderSettings], ReferenceEncoderLike]


def open_engine(settings: EncoderSettings) -> ReferenceEncoderLike:
    """Load the weights; returns when the engine can encode."""
    # Slow to import (torch), and needed in this deployment's replicas alone.
    from qwen3tts_core.config import CheckpointConfig
    from qwen3tts_core.engine.reference_encoder import DEFAULT_MEMO_BYTES, open_reference_encoder
    from qwen3tts_core.model.checkpoint import resolve_checkpoint

    path = resolve_checkpoint(settings.checkpoint)
    memo_bytes = DEFAULT_MEMO_BYTES if settings.memo_bytes is None else settings.memo_bytes
    return open_reference_encoder(
        path, CheckpointConfig.from_checkpoint(path), settings.device, memo_bytes=memo_bytes
    )


class ReferenceEncoder(Replica):
    """Ready when its constructor returns."""

    def __init__(
        self,
        settings: EncoderSettings,
        open_encoder: OpenEncoder = open_engine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        send_logs_to_stderr()
        self._limits = settings.limits
        self._encoder = open_encoder(settings)
        self._load = StreamLoad(_NUM_THREADS)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "reference-encoder")
        self._clock, self._began_at = clock, dict[object, float]()
        start_publishing(self._encoder.stats, memory_table("encoder"), RaySink())
        logger.info("reference encoder ready: %s", settings)

    async def encode(
        self, clip: bytes | ReferenceClip, in_context: bool, keep_clip: bool = False
    ) -> EncodedVoice:
        """The voice of a clip: an audio file as it came, or a clip that was read before.

        in_context: with the clip's codes, beside its x-vector. keep_clip: answer with the clip, too.
        Raises InvalidReferenceAudio that says what was expected.
        """
        loop = asyncio.get_running_loop()
        with self._load.stream():
            return await loop.run_in_executor(self._threads, self._encode, clip, in_context, keep_clip)

    def _encode(self, clip: bytes | ReferenceClip, in_context: bool, keep_clip: bool) -> EncodedVoice:
        call, encoder = object(), self._encoder
        self._began_at[call] = self._clock()
        try:
            if isinstance(clip, bytes):
                clip = read_clip(clip, self._limits)
            voice = encoder.encode(clip, in_context)
        finally:
            del self._began_at[call]
        return EncodedVoice(voice, encoder.num_groups, encoder.fingerprint, clip if keep_clip else None)

    async def fingerprint(self) -> str:
        """Names the weights; voices that were encoded with equal ones are the same."""
        return self._encoder.fingerprint

    def check_health(self) -> None:
        """Called by Serve: raises EngineFault when a worker thread hangs in a clip."""
        oldest = min(list(self._began_at.values()), default=math.inf)
        if (hung_s := self._clock() - oldest) > _STUCK_AFTER_S:
            raise EngineFault(f"a clip has been in work for {hung_s:.0f} s")

    async def stats(self) -> dict[str, Any]:
        """Counts of the memory, with the process id: for tests and operators."""
        return {"pid": os.getpid(), **dataclasses.asdict(self._encoder.stats())}

    def __del__(self) -> None:
        threads = getattr(self, "_threads", None)  # absent when opening the engine failed
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)
