"""The Talker deployment: owns one TalkerEngine and forwards its frames.

A request is one streaming call. Whoever ends the call, by its end, by leaving or by an error, frees
the slot: nothing here outlives the generator. Knows nothing of text, audio or HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deployments.engine_metrics import TALKER_TABLE, start_publishing
from deployments.exported import RaySink
from deployments.leases import LEASE_S, Leases
from deployments.logs import send_logs_to_stderr
from deployments.stream_load import SECONDS_PER_FRAME, StreamLoad
from deployments.threads import let_the_engine_in
from deployments.tracing import traced_stream
from qwen3tts_core.config import TalkerEngineConfig, WeightDtype
from qwen3tts_core.engine.outbox import AsyncOutbox, Outbox
from qwen3tts_core.errors import StreamCancelled
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.types import FrameBatch, SpeechRequest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TalkerSettings:
    """What a replica needs to open its engine. checkpoint: a local folder or a hub id. lease_s: see `Leases`."""

    checkpoint: str
    engine: TalkerEngineConfig
    ramp: ChunkRamp
    device: str
    dtype: str
    seconds_per_frame: float = SECONDS_PER_FRAME
    lease_s: float = LEASE_S
    weight_dtype: WeightDtype = "auto"


class TalkerEngineLike(Protocol):
    """The engine as this deployment sees it; tests bring their own."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def submit(self, request: SpeechRequest) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def check_health(self) -> None: ...

    def stats(self) -> DataclassInstance: ...


OpenTalker = Callable[[TalkerSettings, Outbox[FrameBatch]], TalkerEngineLike]


def open_engine(settings: TalkerSettings, outbox: Outbox[FrameBatch]) -> TalkerEngineLike:
    """Load the weights and warm up; returns when the engine can speak."""
    # Slow to import (torch), and needed in this deployment's replicas alone.
    from qwen3tts_core.engine.talker_engine import open_talker_engine
    from qwen3tts_core.model.checkpoint import resolve_checkpoint

    path: Path = resolve_checkpoint(settings.checkpoint)
    return open_talker_engine(
        path,
        config=settings.engine,
        ramp=settings.ramp,
        outbox=outbox,
        device=settings.device,
        dtype=settings.dtype,
        weight_dtype=settings.weight_dtype,
    )


class Talker:
    """Text in as a prefill plan, frames out. Ready when its constructor returns."""

    def __init__(self, settings: TalkerSettings, open_engine: OpenTalker = open_engine) -> None:
        send_logs_to_stderr()
        let_the_engine_in()
        self._outbox: AsyncOutbox[FrameBatch] = AsyncOutbox(asyncio.get_running_loop())
        self._load = StreamLoad(settings.engine.num_slots, settings.seconds_per_frame)
        self._engine = open_engine(settings, self._outbox)
        self._leases = Leases(settings.lease_s, self._end)
        self._engine.start()
        start_publishing(self._engine.stats, TALKER_TABLE, RaySink())
        logger.info("talker ready: %s", settings)

    async def generate(self, request: SpeechRequest) -> AsyncIterator[bytes]:
        """Yield the request's frames, each item `FrameBatch.to_bytes()`; the last has a finish.

        Raises Overloaded or InvalidRequest before the first item, EngineFault at any; StreamCancelled when nobody
        seems to wait for it.
        """
        with (
            traced_stream("talker.generate", request) as span,
            self._leases.stream(request.request_id),
            self._outbox.stream(request.request_id) as frames,
            self._load.stream() as playback,
        ):
            try:
                self._engine.submit(request)
                async for batch in frames:
                    playback.sent(batch.first_frame, batch.num_frames)
                    span.sent(batch)
                    yield batch.to_bytes()
                    if batch.finish is not None:
                        return
            finally:
                self._engine.cancel(request.request_id)

    async def roll_call(self, wanted: Sequence[str], given_up: Sequence[str]) -> None:
        """Called by ingresses: streams that they wait for, and streams that they don't any more."""
        self._leases.renew(wanted)
        self._leases.give_up(given_up)

    def _end(self, request_id: str) -> None:
        """Free a stream without its reader's help, and tell the reader, should there be one."""
        self._engine.cancel(request_id)
        self._outbox.put(request_id, StreamCancelled())
        self._outbox.flush()

    def check_health(self) -> None:
        """Called by Serve: raises EngineFault when the engine's thread is dead or stuck."""
        self._engine.check_health()

    async def ready(self, stay_s: float = 0.0) -> bool:
        """Called by the ingress, which hears of a death by the call that is here; raises as `check_health` does."""
        await asyncio.sleep(stay_s)
        self._engine.check_health()
        return True

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for the policy in `autoscaling.py`."""
        return self._load.stats()

    async def stats(self) -> dict[str, Any]:
        """Counts of the engine, with the process id: for tests and operators."""
        own = {"pid": os.getpid(), "reaped": self._leases.num_reaped}
        return {**own, **dataclasses.asdict(self._engine.stats())}

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)  # absent when opening it failed
        if engine is not None:
            engine.stop()
