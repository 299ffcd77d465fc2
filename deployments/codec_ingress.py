"""Codec and Ingress as one deployment, `ingress: codec`: its replicas answer HTTP, and decode what they send.

    client ──HTTP──> Ingress ─in process─> Codec.decode ──generate──> Talker
                     └──────── one replica ───────────┘

A call through Serve less than apart, for TTFA and for the CPU that a chunk costs. What it gives up: a connection dies
with its codec, where a stream of the separate shape goes on with another. Both halves are as they are alone, and know
nothing of each other: the Ingress calls an `InProcessHandle`. Their event loop is one, beside the engine's thread,
which `threads.py` lets in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, cast

from fastapi import FastAPI

from deployments.codec import Codec
from deployments.engines import CodecSettings, OpenCodec, open_codec
from deployments.handles import Transport
from deployments.in_process import InProcessHandle
from deployments.ingress import Ingress, IngressSettings
from qwen3tts_core.errors import EngineDown, EngineFault, StreamLost
from qwen3tts_core.types import SpeechRequest


class CodecIngress(Codec):
    """To Serve, and whoever asks for counts, a Codec that takes HTTP besides."""

    def __init__(
        self,
        codec_settings: CodecSettings,
        ingress_settings: IngressSettings,
        handles: Mapping[str, Any],
        talker_transport: Transport,
        open_engine: OpenCodec = open_codec,
    ) -> None:
        """handles: of every other deployment of the app, by its name. All models of the ingress have this codec."""
        (own_name,) = {model.codec for model in ingress_settings.models}
        talkers = {model.model_name: handles[model.talker] for model in ingress_settings.models}
        # Whoever gives up a stream is here, and ends it: there is nobody to be missed.
        super().__init__(
            dataclasses.replace(codec_settings, lease_s=0.0), talkers, talker_transport, open_engine
        )
        own = InProcessHandle(_OwnCodec(self))
        self._ingress = Ingress(ingress_settings, {**handles, own_name: own}, "value")

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._ingress.build_http_app()

    def check_health(self) -> None:
        """Called by Serve: raises EngineFault when either half can't go on."""
        super().check_health()
        self._ingress.check_health()


class _OwnCodec:
    """The codec as its own ingress calls it. If its engine is dead no other can be reached from here: a stream
    that went on trying would hang, and keep this replica from being replaced."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    async def decode(self, request: SpeechRequest) -> AsyncGenerator[bytes, None]:
        """Raises as `Codec.decode` does, and StreamLost in place of an EngineDown that is the codec's own."""
        items = cast("AsyncGenerator[bytes, None]", self._codec.decode(request))
        async with aclosing(items):
            try:
                async for item in items:
                    yield item
            except EngineDown as error:
                try:
                    self._codec.check_health()
                except EngineFault:
                    raise StreamLost(str(error), 0.0) from error
                raise

    def __getattr__(self, method: str) -> Any:
        return getattr(self._codec, method)
