"""The Talker deployment: owns one TalkerEngine and forwards its frames.

A request is one streaming call. Whoever ends the call, by its end, by leaving or by an error, frees
the slot: nothing here outlives the generator. Knows nothing of text, audio or HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from functools import partial

from deployments.engine_metrics import TALKER_TABLE
from deployments.engine_process import TalkerProcess
from deployments.engines import OpenTalker, TalkerEngineLike, TalkerSettings, open_talker
from deployments.replica import EngineReplica
from deployments.tracing import traced_stream
from qwen3tts_core.types import ItemHeader, SpeechRequest

logger = logging.getLogger(__name__)


class Talker(EngineReplica[TalkerEngineLike]):
    """Text in as a prefill plan, frames out."""

    def __init__(self, settings: TalkerSettings, open_engine: OpenTalker = open_talker) -> None:
        if settings.home == "process":
            open_engine = partial(TalkerProcess, "Talker", open_engine)
        super().__init__(
            settings, partial(open_engine, settings), TALKER_TABLE, num_slots=settings.engine.num_slots
        )
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
                async for item in frames:
                    header = ItemHeader.of(item)
                    playback.sent(header.first_frame, header.num_frames)
                    span.sent(header)
                    yield item
                    if header.finish is not None:
                        return
            finally:
                self._free(request.request_id)

    def _free(self, request_id: str) -> None:
        self._engine.cancel(request_id)
