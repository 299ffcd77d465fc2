"""The Ingress deployment: the HTTP API. Runs on CPU, holds no model.

Routes only; `speech.py` has the life of a speech request, `frontend.py` what a body means, `clone.py` whose
voice it asks for, `voices.py` the uploaded ones.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.websockets import WebSocket

from deployments.api_keys import ApiKeys
from deployments.audio_formats import warn_of_missing_formats
from deployments.batch import BatchCall
from deployments.bodies import SMALL_BODY_BYTES, BodyReader
from deployments.catalogue import describe_model, describe_voice, describe_voices
from deployments.clone import ClipEncoder, VoiceCloner
from deployments.cluster_metrics import MEDIA_TYPE as METRICS_TYPE
from deployments.cluster_metrics import ClusterMetrics, NoMetrics
from deployments.deadline import FIRST_AUDIO_TIMEOUT_S
from deployments.edge import Edge, request_id_of
from deployments.engine_metrics import VOICES_TABLE, start_publishing
from deployments.exported import RaySink
from deployments.frontend import Frontend
from deployments.handles import Transport, bind_ask, bind_stream, bind_tell
from deployments.http_errors import describe
from deployments.leases import LEASE_S
from deployments.logs import send_logs_to_stderr
from deployments.openapi import api_document
from deployments.other_sites import OtherSites
from deployments.page_files import PAGE_PATHS, PageFiles
from deployments.read_ahead import READER_AHEAD_S, UnreadAudio
from deployments.reader_pace import READER_TIMEOUT_S, ReaderPace
from deployments.readiness import Readiness
from deployments.reference_fetch import FetchPolicy, ReferenceFetcher, max_base64_bytes
from deployments.request_metrics import RequestMetrics
from deployments.roll_call import RollCall
from deployments.served_models import ServedModel, ServedModels
from deployments.sleepers import COLD_START_S, Sleepers
from deployments.speech import SpeechCall, SpeechParts
from deployments.utterance import RESUME_TIMEOUT_S, Chains
from deployments.voice_aliases import VoiceAliases, check_no_upload_is_hidden
from deployments.voices import NamedVoices
from deployments.websocket import SpeechSocket
from qwen3tts_core.audio.voice_store import DEFAULT_MAX_VOICES, VoiceStore
from qwen3tts_core.errors import EngineFault, InvalidRequest, UnknownVoice
from qwen3tts_core.model.checkpoint import resolve_checkpoint
from qwen3tts_core.text.sentences import LongText

logger = logging.getLogger(__name__)

_LONGEST_ECHO = 256  # of a path, in a message


@dataclass(frozen=True, slots=True)
class IngressModel:
    """checkpoint: a local folder or a hub id. max_positions: what a talker holds for one request.
    codec, talker, encoder: names of its deployments; the encoder of Base checkpoints alone.
    sleepers: names of those that may have no replica."""

    checkpoint: str
    model_name: str
    max_positions: int
    codec: str = "Codec"
    talker: str = "Talker"
    encoder: str | None = None
    aliases: tuple[str, ...] = ()
    sleepers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """models: the default one first. voices_folder, max_voices: of uploaded voices, if any model clones voices.
    fetch: what clips may be fetched, and how large they and uploaded ones may be.
    reader_timeout_s: for a client that takes nothing of its body; 0 is no limit. reader_ahead_s: of audio that
    waits for a slow one.
    voice_aliases: other names of voices. first_audio_timeout_s: 0 is no limit; cold_start_s: on top of it, for a
    request that found a deployment asleep. resume_timeout_s: how long a stream whose engine died waits for another.
    allowed_origins: of sites whose pages may use the API, see `OtherSites`.
    api_key_hashes: SHA-256 of the keys that are let in; none lets everybody in.
    long_text: when a text is cut into pieces, and how long it may be."""

    models: tuple[IngressModel, ...]
    voices_folder: Path
    fetch: FetchPolicy
    max_voices: int = DEFAULT_MAX_VOICES
    voice_aliases: Mapping[str, str] = field(default_factory=dict)
    first_audio_timeout_s: float = FIRST_AUDIO_TIMEOUT_S
    reader_timeout_s: float = READER_TIMEOUT_S
    reader_ahead_s: float = READER_AHEAD_S
    cold_start_s: float = COLD_START_S
    resume_timeout_s: float = RESUME_TIMEOUT_S
    roll_call_period_s: float = LEASE_S / 5
    allowed_origins: tuple[str, ...] = ()
    api_key_hashes: tuple[bytes, ...] = field(default=(), repr=False)
    long_text: LongText = field(default_factory=LongText)


class Ingress:
    """Text in over HTTP, audio out. Serve calls `__serve_build_asgi_app__` after the constructor."""

    def __init__(
        self, settings: IngressSettings, handles: Mapping[str, Any], codec_transport: Transport
    ) -> None:
        """handles: of every deployment of the app, by its name."""
        send_logs_to_stderr()
        self._sink = RaySink()
        self._cluster_metrics = ClusterMetrics()
        self._watching: list[asyncio.Task[None]] = []
        _warn_without_uvloop()
        warn_of_missing_formats()
        frontends = [
            Frontend.from_checkpoint(
                resolve_checkpoint(model.checkpoint),
                model_name=model.model_name,
                max_positions=model.max_positions,
                long_text=settings.long_text,
            )
            for model in settings.models
        ]
        self._voices: NamedVoices | None = None
        self._aliases = VoiceAliases(settings.voice_aliases)
        cloners = self._open_cloners(settings, frontends, handles)
        self._roll_calls = [
            RollCall(
                [bind_tell(handles[name], "roll_call") for name in (model.codec, model.talker)],
                settings.roll_call_period_s,
            )
            for model in settings.models
        ]
        self._models = ServedModels(
            [
                ServedModel(
                    frontend,
                    Chains(
                        bind_stream(handles[model.codec], "decode", codec_transport),
                        settings.resume_timeout_s,
                        roll_call,
                    ),
                    cloners.get(model.encoder),
                    model.aliases,
                    model.sleepers,
                    tuple(
                        name for name in model.sleepers if name != model.encoder
                    ),  # it is called first anyway
                )
                for model, frontend, roll_call in zip(
                    settings.models, frontends, self._roll_calls, strict=True
                )
            ]
        )
        self._bodies = BodyReader()
        max_body_bytes = SMALL_BODY_BYTES + (max_base64_bytes(settings.fetch.max_bytes) if cloners else 0)
        asks = {name: bind_ask(handle, "ready") for name, handle in handles.items()}
        sleepers = {name for model in settings.models for name in model.sleepers}
        self._readiness = Readiness({name: ask for name, ask in asks.items() if name not in sleepers})
        self._sleepers = Sleepers({name: asks[name] for name in sleepers}, cold_start_s=settings.cold_start_s)
        self._parts = SpeechParts(
            self._models,
            self._bodies,
            max_body_bytes,
            self._aliases,
            settings.first_audio_timeout_s,
            self._sleepers,
            RequestMetrics(self._sink, [model.model_name for model in settings.models]),
            UnreadAudio(settings.reader_ahead_s),
        )
        self._long_text = settings.long_text
        self._api_key_hashes = settings.api_key_hashes
        self._allowed_origins = settings.allowed_origins
        self._reader_timeout_s = settings.reader_timeout_s
        self._page = PageFiles()
        logger.info("ingress ready: %s, audio by %s", settings, codec_transport)

    def _open_cloners(
        self, settings: IngressSettings, frontends: Sequence[Frontend], handles: Mapping[str, Any]
    ) -> Mapping[str | None, VoiceCloner]:
        """By the name of the encoder; none, and no uploaded voices, without Base checkpoints."""
        encoders = {name: ClipEncoder(handles[name]) for model in settings.models if (name := model.encoder)}
        if not encoders:
            return {}
        fetcher = ReferenceFetcher(settings.fetch)
        built_in = [name for frontend in frontends for name in frontend.voices]
        store = VoiceStore(settings.voices_folder, [*built_in, *self._aliases], settings.max_voices)
        check_no_upload_is_hidden(self._aliases, [record.name for record in store.records()])
        self._voices = NamedVoices(store, next(iter(encoders.values())), settings.fetch.max_bytes)
        for encoder in encoders.values():
            start_publishing(encoder.lookups, VOICES_TABLE, self._sink)
        return {name: VoiceCloner(encoder, fetcher, store) for name, encoder in encoders.items()}

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self.build_http_app()

    def build_http_app(self) -> FastAPI:
        """The whole API as an ASGI app; its lifespan runs the readiness task."""
        app = FastAPI(title="qwen3tts-serve", lifespan=self._lifespan, redirect_slashes=False, redoc_url=None)
        if self._api_key_hashes:
            app.add_middleware(ApiKeys, hashes=self._api_key_hashes)
        app.add_middleware(ReaderPace, timeout_s=self._reader_timeout_s)
        app.add_middleware(OtherSites, allowed=self._allowed_origins)
        app.add_middleware(Edge)  # around everything else: errors of the layers within get its face
        if self._allowed_origins:  # around the errors, too: a page could not read them otherwise
            origins = list(self._allowed_origins)
            app.add_middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["*"],
            )
        app.add_exception_handler(HTTPException, _http_exception)
        # The description is ours; FastAPI's own would know neither bodies nor refusals.
        app.openapi = partial(api_document, self._models, bool(self._api_key_hashes))  # type: ignore[method-assign]
        add = app.add_api_route
        add("/v1/audio/speech", self.speech, methods=["POST"])
        add("/v1/audio/speech/batch", self.speech_batch, methods=["POST"])
        add("/v1/audio/voices", self.list_voices, methods=["GET"])
        add("/v1/audio/voices", self.upload_voice, methods=["POST"])
        add("/v1/audio/voices/{name:path}", self.delete_voice, methods=["DELETE"])
        app.add_api_websocket_route("/v1/audio/speech/stream", self.speech_stream)
        add("/v1/models", self.list_models, methods=["GET"])
        add("/v1/models/{model:path}", self.get_model, methods=["GET"])
        add("/health", self.health, methods=["GET"])
        add("/metrics", self.metrics, methods=["GET"])
        index, folder = PAGE_PATHS
        add(index, self.page, methods=["GET", "HEAD"], include_in_schema=False)
        add(folder + "{name:path}", self.page_file, methods=["GET", "HEAD"], include_in_schema=False)
        return app

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        watches = {
            "readiness": self._readiness.watch,
            "sleepers": self._sleepers.watch,
            **{f"roll call {number}": roll_call.run for number, roll_call in enumerate(self._roll_calls)},
        }
        self._watching = [asyncio.create_task(watch(), name=name) for name, watch in watches.items()]
        try:
            yield
        finally:
            for task in self._watching:
                task.cancel()
            self._sleepers.close()

    def check_health(self) -> None:
        """Called by Serve: raises EngineFault when a task that watches over the other deployments has died."""
        for task in filter(_has_died, self._watching):
            raise EngineFault(f"the ingress's {task.get_name()} task has died: {task!r}")

    # ------------------------------------------------------------ routes
    async def speech(self, request: Request) -> Response:
        """Speak the input. Audio, or server-sent events; see the README for every field."""
        return SpeechCall(self._parts, request, request_id_of(request.scope))

    async def speech_batch(self, request: Request) -> Response:
        """Speak up to 32 inputs, each with a result of its own."""
        return BatchCall(self._parts, request, request_id_of(request.scope))

    async def speech_stream(self, websocket: WebSocket) -> None:
        """Speak a text while it is written."""
        session_id = request_id_of(websocket.scope) or uuid.uuid4().hex
        await SpeechSocket(self._parts, websocket, session_id, self._long_text).run()

    async def list_voices(self, model: str | None = None) -> JSONResponse:
        """Every voice; with `?model=`, that model's. Built-in and uploaded, the default, the languages."""
        only = None if model is None else self._models.find(model)
        records = [] if self._voices is None else await self._voices.records()
        return JSONResponse(describe_voices(self._models, records, only, self._aliases))

    async def upload_voice(self, request: Request) -> JSONResponse:
        """Name a clip's voice, or give a name another clip."""
        record = await self._require_voices().upload(request, self._bodies)
        return JSONResponse(describe_voice(record, self._cloning_models()))

    async def delete_voice(self, name: str) -> JSONResponse:
        """Gone for every request from now on."""
        try:
            await self._require_voices().delete(name)
        except UnknownVoice as error:  # here it is the resource itself that isn't there
            return describe(error)._replace(status=404).response()
        return JSONResponse({"id": name, "object": "voice", "deleted": True})

    def _require_voices(self) -> NamedVoices:
        if self._voices is None:
            raise InvalidRequest("uploaded voices need a Base checkpoint, and this server has none")
        return self._voices

    def _cloning_models(self) -> list[str]:
        return [model.name for model in self._models if model.cloner is not None]

    async def list_models(self) -> JSONResponse:
        """What this server speaks with."""
        return JSONResponse({"object": "list", "data": [describe_model(model) for model in self._models]})

    async def get_model(self, model: str) -> JSONResponse:
        return JSONResponse(describe_model(self._models.find(model)))

    async def health(self) -> JSONResponse:
        """200 when every deployment answers; 503 that names those that don't."""
        problems = {**self._readiness.problems(), **self._sleepers.problems()}
        if any(map(_has_died, self._watching)):
            problems["Ingress"] = "watches nothing any more"
        if not problems:
            return JSONResponse({"status": "ready"})
        message = ", ".join(f"{name} {problem}" for name, problem in problems.items())
        error = {"message": message, "type": "server_error", "param": None, "code": "not_ready"}
        return JSONResponse({"status": "not ready", "error": error}, 503, {"Retry-After": "1"})

    async def metrics(self) -> Response:
        """The whole cluster's, for Prometheus."""
        try:
            return Response(await self._cluster_metrics.page(), media_type=METRICS_TYPE)
        except NoMetrics as problem:
            error = {"message": str(problem), "type": "server_error", "param": None, "code": "no_metrics"}
            return JSONResponse({"error": error}, 503, {"Retry-After": "1"})

    async def page(self, request: Request) -> Response:
        """For people: type, choose, listen."""
        return await self._page.answer("index.html", request.scope)

    async def page_file(self, name: str, request: Request) -> Response:
        return await self._page.answer(name, request.scope)


async def _http_exception(request: Request, error: Exception) -> Response:
    """404, 405, 413, 415: as error objects too."""
    described = describe(error)
    if described.status == 405:  # the framework knows only the first of the path's routes
        matching = [
            route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE
        ]
        described.headers["Allow"] = ", ".join(
            sorted({method for route in matching for method in route.methods})
        )
    described.error["message"] = (
        f"{request.method} {request.url.path[:_LONGEST_ECHO]}: {described.error['message']}"
    )
    return described.response()


def _has_died(task: asyncio.Task[None]) -> bool:
    """Not so one that found nothing to do."""
    return task.done() and (task.cancelled() or task.exception() is not None)


def _warn_without_uvloop() -> None:
    loop = type(asyncio.get_running_loop())
    if not loop.__module__.startswith("uvloop"):
        logger.warning(
            "the event loop is %s.%s, not uvloop's: every reused connection will wait 40 ms for its first bytes",
            loop.__module__,
            loop.__qualname__,
        )
