"""The Codec deployment: pulls a request's frames from a Talker, owns one CodecEngine, yields PCM.

    Talker.generate ──frames──> _feed ──submit──> CodecEngine ──outbox──> decode ──PCM──> caller

The two ends don't wait for each other: frames are taken as they come, also while nobody takes the
PCM. Both ends, the codec row and the Talker's stream belong to the one generator `decode`; however
it ends, its `finally` gives everything back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from deployments.engine_metrics import CODEC_TABLE, start_publishing
from deployments.exported import RaySink
from deployments.handles import StartStream, Transport, bind_stream, is_death, root_cause
from deployments.leases import LEASE_S, Leases
from deployments.logs import send_logs_to_stderr
from deployments.stream_load import SECONDS_PER_FRAME, Playback, StreamLoad
from deployments.threads import let_the_engine_in
from deployments.tracing import traced_stream
from qwen3tts_core.config import CodecEngineConfig
from qwen3tts_core.engine.outbox import AsyncOutbox, Outbox
from qwen3tts_core.errors import EngineDown, EngineFault, StreamCancelled
from qwen3tts_core.types import AudioChunk, FrameBatch, ReferenceVoice, SpeechRequest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CodecSettings:
    """What a replica needs to open its engine. checkpoint: a local folder or a hub id. lease_s: see `Leases`."""

    checkpoint: str
    engine: CodecEngineConfig
    device: str
    dtype: str
    seconds_per_frame: float = SECONDS_PER_FRAME
    lease_s: float = LEASE_S


class CodecEngineLike(Protocol):
    """The engine as this deployment sees it; tests bring their own."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def open(self, request_id: str, reference: ReferenceVoice | None = None) -> None: ...

    def submit(self, request_id: str, frames: FrameBatch) -> None: ...

    def replay(self, request_id: str, codes: bytes, cuts: Sequence[int] = ()) -> None: ...

    def close(self, request_id: str) -> None: ...

    def check_health(self) -> None: ...

    def stats(self) -> DataclassInstance: ...


OpenCodec = Callable[[CodecSettings, Outbox[AudioChunk]], CodecEngineLike]


def open_engine(settings: CodecSettings, outbox: Outbox[AudioChunk]) -> CodecEngineLike:
    """Load the weights and warm up; returns when the engine can decode."""
    # Slow to import (torch), and needed in this deployment's replicas alone.
    from qwen3tts_core.engine.codec_engine import open_codec_engine
    from qwen3tts_core.model.checkpoint import resolve_checkpoint

    path = resolve_checkpoint(settings.checkpoint)
    return open_codec_engine(
        path, config=settings.engine, outbox=outbox, device=settings.device, dtype=settings.dtype
    )


class Codec:
    """Frames in, PCM out. Ready when its constructor returns."""

    def __init__(
        self,
        settings: CodecSettings,
        talkers: Mapping[str, Any],
        talker_transport: Transport,
        open_engine: OpenCodec = open_engine,
    ) -> None:
        """talkers: a handle by the name of each model whose frames are decoded here."""
        send_logs_to_stderr()
        let_the_engine_in()
        self._start_talker: dict[str, StartStream] = {
            model: bind_stream(talker, "generate", talker_transport) for model, talker in talkers.items()
        }
        self._outbox: AsyncOutbox[AudioChunk] = AsyncOutbox(asyncio.get_running_loop())
        self._load = StreamLoad(settings.engine.num_rows, settings.seconds_per_frame)
        self._keeps_bytes = settings.engine.deterministic
        self._engine = open_engine(settings, self._outbox)
        self._leases = Leases(settings.lease_s, self._end)
        self._engine.start()
        start_publishing(self._engine.stats, CODEC_TABLE, RaySink())
        logger.info("codec ready: %s, frames by %s", settings, talker_transport)

    async def decode(self, request: SpeechRequest) -> AsyncIterator[bytes]:
        """Yield the request's audio, each item `AudioChunk.to_bytes()`; the last has a finish.

        Raises Overloaded or InvalidRequest before the first item, EngineFault at any; EngineDown, one of these,
        also when the Talker died; StreamCancelled when nobody seems to wait for it. With `request.resume` the first item is the audio after those frames.
        """
        start_talker = self._start_talker.get(request.model)
        if start_talker is None:
            raise EngineFault(f"no talker here speaks for {request.model!r}, only {list(self._start_talker)}")
        with (
            traced_stream("codec.decode", request) as span,
            self._leases.stream(request.request_id),
            self._outbox.stream(request.request_id) as audio,
            self._load.stream() as playback,
        ):
            feeding: asyncio.Task[None] | None = None
            try:
                self._engine.open(request.request_id, request.reference)
                if request.resume is not None:
                    # The cuts show in the rounding: to be kept where bytes count, else big pieces are faster.
                    cuts = request.resume.cuts if self._keeps_bytes else ()
                    self._engine.replay(request.request_id, request.resume.codes, cuts)
                feeding = asyncio.create_task(
                    self._feed(request, start_talker, playback), context=span.context
                )
                async for chunk in audio:
                    playback.sent(chunk.first_frame, chunk.num_frames)
                    span.sent(chunk)
                    yield chunk.to_bytes()
                    if chunk.finish is not None:
                        return
            finally:
                self._engine.close(request.request_id)
                if feeding is not None:
                    feeding.cancel()
                    with suppress(asyncio.CancelledError):
                        await feeding

    async def _feed(self, request: SpeechRequest, start_talker: StartStream, playback: Playback) -> None:
        """Pass the Talker's frames to the engine; an error goes to the reader of the audio."""
        frames = start_talker(request)
        is_whole = False
        try:
            async for item in frames:
                batch = FrameBatch.from_bytes(item)
                playback.arrived()
                self._engine.submit(request.request_id, batch)
                if batch.finish is not None:
                    is_whole = True
                    return
            raise EngineFault("the talker's stream ended without a finish")
        except (Exception, asyncio.CancelledError) as error:
            # Whatever it is, the reader must hear it; if it is the reader who left, this is dropped.
            self._outbox.put(request.request_id, _as_exception(root_cause(error)))
            self._outbox.flush()
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            if not is_whole:
                frames.cancel()

    async def roll_call(self, wanted: Sequence[str], given_up: Sequence[str]) -> None:
        """Called by ingresses: streams that they wait for, and streams that they don't any more."""
        self._leases.renew(wanted)
        self._leases.give_up(given_up)

    def _end(self, request_id: str) -> None:
        """Free a stream without its reader's help, and tell the reader, should there be one."""
        self._engine.close(request_id)
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


def _as_exception(error: BaseException) -> Exception:
    """A death as one word: Ray's own names a replica, which would be taken for this one."""
    if isinstance(error, EngineDown):
        return error
    if is_death(error) or not isinstance(error, Exception):
        return EngineDown(f"the talker is gone: {type(error).__name__}")
    return error
