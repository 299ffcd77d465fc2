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
        self._ingress = Ingress(ingress_settings, {**handles, own_name: InProcessHandle(self)}, "value")

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._ingress.build_http_app()

    async def decode(self, request: SpeechRequest) -> AsyncGenerator[bytes, None]:
        """Called by the ingress in here. Raises as `Codec.decode` does, but StreamLost for an EngineDown that is its own:
        no other codec can be reached from here, and a stream that went on trying would hang, and keep this replica from
        being replaced."""
        items = cast("AsyncGenerator[bytes, None]", super().decode(request))
        async with aclosing(items):
            try:
                async for item in items:
                    yield item
            except EngineDown as error:
                try:
                    self.check_health()
                except EngineFault:
                    raise StreamLost(str(error), 0.0) from error
                raise

    def check_health(self) -> None:
        """Called by Serve: raises EngineFault when either half can't go on."""
        super().check_health()
        self._ingress.check_health()
