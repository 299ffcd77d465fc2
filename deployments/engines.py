"""The engines as their deployments see them: what opens one, and what it must answer to. No Ray here, for an
engine may live in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from deployments.leases import LEASE_S
from deployments.stream_load import SECONDS_PER_FRAME
from deployments.threads import let_the_engine_in
from qwen3tts_core.config import CodecEngineConfig, TalkerEngineConfig, WeightDtype
from qwen3tts_core.engine.outbox import BytesOutbox, Outbox
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.types import FrameBatch, ReferenceVoice, SpeechRequest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Home = Literal["thread", "process"]
"""Where a replica keeps its engine: on a thread beside its event loop, or in a process with an interpreter of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What any replica needs to open its engine. checkpoint: a local folder or a hub id. lease_s: see `Leases`."""

    checkpoint: str
    device: str
    dtype: str
    seconds_per_frame: float = SECONDS_PER_FRAME
    lease_s: float = LEASE_S
    home: Home = "thread"


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerSettings(EngineSettings):
    engine: TalkerEngineConfig
    ramp: ChunkRamp
    weight_dtype: WeightDtype = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSettings(EngineSettings):
    engine: CodecEngineConfig


class EngineLike(Protocol):
    """Of both kinds; tests bring their own."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check_health(self) -> None: ...

    def stats(self) -> DataclassInstance: ...


class TalkerEngineLike(EngineLike, Protocol):
    def submit(self, request: SpeechRequest) -> None: ...

    def cancel(self, request_id: str) -> None: ...


class CodecEngineLike(EngineLike, Protocol):
    def open(self, request_id: str, reference: ReferenceVoice | None = None) -> None: ...

    def submit(self, request_id: str, frames: FrameBatch) -> None: ...

    def replay(self, request_id: str, codes: bytes, cuts: Sequence[int] = ()) -> None: ...

    def close(self, request_id: str) -> None: ...


OpenTalker = Callable[[TalkerSettings, Outbox[bytes]], TalkerEngineLike]
OpenCodec = Callable[[CodecSettings, Outbox[bytes]], CodecEngineLike]
"""Both: items as bytes, by `FrameBatch.to_bytes` and `AudioChunk.to_bytes`."""


def open_talker(settings: TalkerSettings, outbox: Outbox[bytes]) -> TalkerEngineLike:
    """Load the weights. Raises as `open_talker_engine` does."""
    # Slow to import (torch), and needed where this engine lives alone.
    from qwen3tts_core.engine.talker_engine import open_talker_engine
    from qwen3tts_core.model.checkpoint import resolve_checkpoint

    let_the_engine_in()
    return open_talker_engine(
        resolve_checkpoint(settings.checkpoint),
        config=settings.engine,
        ramp=settings.ramp,
        outbox=BytesOutbox(outbox),
        device=settings.device,
        dtype=settings.dtype,
        weight_dtype=settings.weight_dtype,
    )


def open_codec(settings: CodecSettings, outbox: Outbox[bytes]) -> CodecEngineLike:
    """Load the weights. Raises as `open_codec_engine` does."""
    from qwen3tts_core.engine.codec_engine import open_codec_engine
    from qwen3tts_core.model.checkpoint import resolve_checkpoint

    let_the_engine_in()
    return open_codec_engine(
        resolve_checkpoint(settings.checkpoint),
        config=settings.engine,
        outbox=BytesOutbox(outbox),
        device=settings.device,
        dtype=settings.dtype,
    )
