"""The Ingress deployment: the HTTP API. Runs on CPU, holds no model.

Routes only; `speech.py` has the life of a speech request, `frontend.py` what a body means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from deployments.edge import Edge, request_id_of
from deployments.frontend import Frontend
from deployments.handles import Transport, bind_ask, bind_stream
from deployments.http_errors import describe
from deployments.logs import send_logs_to_stderr
from deployments.readiness import Readiness
from deployments.schemas import SpeechBody
from deployments.speech import SpeechCall, SpeechParts
from qwen3tts_core.errors import UnknownModel
from qwen3tts_core.model.checkpoint import resolve_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """checkpoint: a local folder or a hub id. max_positions: what a talker holds for one request."""

    checkpoint: str
    model_name: str
    max_positions: int


class Ingress:
    """Text in over HTTP, audio out. Serve calls `__serve_build_asgi_app__` after the constructor."""

    def __init__(
        self, settings: IngressSettings, codec: Any, talker: Any, codec_transport: Transport
    ) -> None:
        send_logs_to_stderr()
        _warn_without_uvloop()
        self._frontend = Frontend.from_checkpoint(
            resolve_checkpoint(settings.checkpoint),
            model_name=settings.model_name,
            max_positions=settings.max_positions,
        )
        self._parts = SpeechParts(self._frontend, bind_stream(codec, "decode", codec_transport))
        self._readiness = Readiness({"Codec": bind_ask(codec, "ready"), "Talker": bind_ask(talker, "ready")})
        logger.info("ingress ready: %s, audio by %s", settings, codec_transport)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self.build_http_app()

    def build_http_app(self) -> FastAPI:
        """The whole API as an ASGI app; its lifespan runs the readiness task."""
        app = FastAPI(title="qwen3tts-serve", lifespan=self._lifespan, redirect_slashes=False, redoc_url=None)
        app.add_middleware(Edge)
        app.add_exception_handler(HTTPException, _http_exception)
        add = app.add_api_route
        add("/v1/audio/speech", self.speech, methods=["POST"], openapi_extra=_speech_openapi())
        add("/v1/audio/voices", self.list_voices, methods=["GET"])
        add("/v1/models", self.list_models, methods=["GET"])
        add("/v1/models/{model:path}", self.get_model, methods=["GET"])
        add("/health", self.health, methods=["GET"])
        return app

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._readiness.watch())
        try:
            yield
        finally:
            watching.cancel()

    # ------------------------------------------------------------ routes
    async def speech(self, request: Request) -> Response:
        """Speak the input. Audio, or server-sent events; see the README for every field."""
        return SpeechCall(self._parts, request, request_id_of(request.scope))

    async def list_voices(self) -> JSONResponse:
        """Built-in voices, the one used when a request names none, and the languages."""
        dialects = self._frontend.config.speaker_dialects
        data = [
            {"id": name, "object": "voice", "built_in": True, "dialect": dialects.get(name)}
            for name in self._frontend.voices
        ]
        return JSONResponse(
            {
                "object": "list",
                "data": data,
                "voices": list(self._frontend.voices),
                "default": self._frontend.default_voice or None,
                "languages": list(self._frontend.languages),
            }
        )

    async def list_models(self) -> JSONResponse:
        """What this server speaks with."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def get_model(self, model: str) -> JSONResponse:
        if model != self._frontend.model_name:
            raise UnknownModel(model, (self._frontend.model_name,))
        return JSONResponse(self._model())

    async def health(self) -> JSONResponse:
        """200 when every deployment answers; 503 that names those that don't."""
        problems = self._readiness.problems()
        if not problems:
            return JSONResponse({"status": "ready"})
        message = ", ".join(f"{name} {problem}" for name, problem in problems.items())
        error = {"message": message, "type": "server_error", "param": None, "code": "not_ready"}
        return JSONResponse({"status": "not ready", "error": error}, 503, {"Retry-After": "1"})

    def _model(self) -> dict[str, Any]:
        config = self._frontend.config
        return {
            "id": self._frontend.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "qwen3tts-serve",
            "task_type": config.model_type,
            "size": config.model_size,
            "sample_rate_hz": config.codec.sample_rate_hz,
            "max_new_tokens": config.max_new_tokens,
        }


async def _http_exception(request: Request, error: Exception) -> Response:
    """404, 405, 413, 415: as error objects too."""
    described = describe(error)
    described.error["message"] = f"{request.method} {request.url.path}: {described.error['message']}"
    return described.response()


def _speech_openapi() -> dict[str, Any]:
    """The body is parsed by hand, for our own wording of refusals; the docs still show its schema."""
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": SpeechBody.model_json_schema()}},
        }
    }


def _warn_without_uvloop() -> None:
    loop = type(asyncio.get_running_loop())
    if not loop.__module__.startswith("uvloop"):
        logger.warning(
            "the event loop is %s.%s, not uvloop's: every reused connection will wait 40 ms for its first bytes",
            loop.__module__,
            loop.__qualname__,
        )
