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
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from deployments.codec import Codec
from deployments.engines import CodecSettings, OpenCodec, open_codec
from deployments.handles import Transport
from deployments.in_process import InProcessHandle
from deployments.ingress import Ingress, IngressSettings


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

    def check_health(self) -> None:
        """Called by Serve: raises EngineFault when either half can't go on."""
        super().check_health()
        self._ingress.check_health()
