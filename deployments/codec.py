"""The Codec deployment: pulls a request's frames from a Talker, owns one CodecEngine, yields PCM.

    Talker.generate ──frames──> _feed ──submit──> CodecEngine ──outbox──> decode ──PCM──> caller

The two ends don't wait for each other: frames are taken as they come, also while nobody takes the
PCM. Both ends, the codec row and the Talker's stream belong to the one generator `decode`; however
it ends, its `finally` gives everything back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from deployments.engine_metrics import CODEC_TABLE
from deployments.engine_process import CodecProcess
from deployments.engines import CodecEngineLike, CodecSettings, OpenCodec, open_codec
from deployments.handles import StartStream, Transport, bind_stream, is_death, root_cause
from deployments.replica import EngineReplica
from deployments.stream_load import Playback
from deployments.tracing import traced_stream
from qwen3tts_core.errors import EngineDown, EngineFault
from qwen3tts_core.types import FrameBatch, ItemHeader, SpeechRequest

logger = logging.getLogger(__name__)


class Codec(EngineReplica[CodecEngineLike]):
    """Frames in, PCM out."""

    def __init__(
        self,
        settings: CodecSettings,
        talkers: Mapping[str, Any],
        talker_transport: Transport,
        open_engine: OpenCodec = open_codec,
    ) -> None:
        """talkers: a handle by the name of each model whose frames are decoded here."""
        self._start_talker: dict[str, StartStream] = {
            model: bind_stream(talker, "generate", talker_transport) for model, talker in talkers.items()
        }
        self._keeps_bytes = settings.engine.deterministic
        if settings.home == "process":
            open_engine = partial(CodecProcess, "Codec", open_engine)
        super().__init__(
            settings, partial(open_engine, settings), CODEC_TABLE, num_slots=settings.engine.num_rows
        )
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
                async for item in audio:
                    header = ItemHeader.of(item)
                    playback.sent(header.first_frame, header.num_frames)
                    span.sent(header)
                    yield item
                    if header.finish is not None:
                        return
            finally:
                self._free(request.request_id)
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

    def _free(self, request_id: str) -> None:
        self._engine.close(request_id)


def _as_exception(error: BaseException) -> Exception:
    """A death as one word: Ray's own names a replica, which would be taken for this one."""
    if isinstance(error, EngineDown):
        return error
    if is_death(error) or not isinstance(error, Exception):
        return EngineDown(f"the talker is gone: {type(error).__name__}")
    return error
