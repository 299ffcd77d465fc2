"""One call of `POST /v1/audio/speech`, from its body to its last byte.

    read, clone, prepare ──> start the chain ──> first chunk ──> 200 ──> the rest
    └──────────── an error is still a status ──────────────┘    └─ an error cuts the body

Nothing is answered before the first chunk is here. What was started is freed where it was started,
by the same `async with`, whether the call ends, fails, or is cancelled because the client left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from functools import partial
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.audio_formats import (
    SSE_MEDIA_TYPE,
    ResponseEncoder,
    response_encoder,
    sse_delta,
    sse_event,
)
from deployments.bodies import BodyReader, check_charset, content_type_of
from deployments.deadline import FirstAudioDeadline
from deployments.frontend import Clone, PreparedSpeech
from deployments.http_errors import describe
from deployments.metrics import RequestRecord
from deployments.pieces import join_pieces
from deployments.read_ahead import UnreadAudio
from deployments.request_metrics import RequestMetrics
from deployments.schemas import SpeechBody, parse_speech_body
from deployments.served_models import ServedModel, ServedModels
from deployments.sleepers import Sleepers
from deployments.tracing import traced_request
from deployments.voice_aliases import VoiceAliases
from qwen3tts_core.errors import InvalidRequest
from qwen3tts_core.types import AudioChunk

_LONG_TEXT = 1_000  # characters; below, cutting and tokenising take less than a millisecond or two
_JSON_TYPES = ("application/json", "text/json")


class SpeechParts(NamedTuple):
    """What every call needs; made once per replica. max_body_bytes: of one body."""

    models: ServedModels
    bodies: BodyReader
    max_body_bytes: int
    voice_aliases: VoiceAliases
    first_audio_timeout_s: float
    sleepers: Sleepers
    metrics: RequestMetrics
    unread: UnreadAudio

    def record(self, request_id: str, sample_rate_hz: int) -> RequestRecord:
        """Of one speech request, for its log line and its metrics."""
        return RequestRecord(request_id, sample_rate_hz, report=self.metrics.ended)


class SpeechCall(Response):
    """A response that does its work as it is sent, so that one function owns the request's life."""

    def __init__(self, parts: SpeechParts, request: Request, request_id: str) -> None:
        super().__init__()
        self._parts = parts
        self._request = request
        self._request_id = request_id
        extra_s = partial(self._extra_s, parts.sleepers.now())
        self._deadline = FirstAudioDeadline(parts.first_audio_timeout_s, extra_s)
        self._take(parts.models.default)

    def _take(self, model: ServedModel) -> None:
        self._model = model
        self._codec = model.frontend.config.codec

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own_record = self._parts.record(self._request_id, self._codec.sample_rate_hz)
        with traced_request(own_record) as record:
            self._parts.unread.check()
            body, clone = await self._read()
            record.note(model=self._model.name)
            record.sample_rate_hz = self._codec.sample_rate_hz
            prepared = await prepare_speech(self._model, body, clone)
            note_prepared(record, self._model, body, prepared)
            async with (
                # First the encoder: a refusal comes before anything is started.
                open_encoder(self._model, body) as encoder,
                aclosing(self._chunks(prepared, record)) as chunks,
            ):
                async with self._deadline.waiting():
                    first = await anext(chunks)
                record.reached("first_audio")
                headers = self._speech_headers(body, prepared, record, encoder)
                if body.is_streaming:
                    await _start(send, headers)
                    audio = self._parts.unread.ahead(encoded(encoder, prepend(first, chunks)))
                    async with aclosing(audio):
                        await self._send_stream(send, body, prepared, record, audio)
                else:
                    parts = [part async for part in encoded(encoder, prepend(first, chunks))]
                    await self._send_whole(send, headers, record, b"".join(parts))

    def _extra_s(self, since: float) -> float:
        return self._parts.sleepers.extra_s(self._model.sleepers, since)

    async def _read(self) -> tuple[SpeechBody, Clone | None]:
        """What is asked for, and of which model; on a Base model, the clip turned into a voice."""
        async with self._parts.bodies.hold(self._request, self._parts.max_body_bytes) as parts:
            body = parse_speech_body(await read_json(self._request, parts))
            body = self._parts.voice_aliases.apply(body)
            self._take(self._parts.models.find(body.model))
            self._model.chains.admission.check()
            self._parts.sleepers.wake(self._model.wakes)
            if self._model.cloner is None:
                return body, None
            with fields_as_sent(body):
                self._model.frontend.check(body)
                async with self._deadline.waiting():
                    clone = await self._model.cloner.find(body)
        return body.model_copy(update={"ref_audio": None}), clone  # megabytes that nobody needs any more

    # ------------------------------------------------------------ audio
    async def _chunks(
        self, prepared: PreparedSpeech, record: RequestRecord
    ) -> AsyncGenerator[AudioChunk, None]:
        """The chain's audio, of all pieces; its end says why."""
        joined = join_pieces(
            self._model.chains,
            prepared.requests,
            self._codec.samples_per_frame,
            prepared.max_frames,
            on_death=record.resumed,
        )
        async with aclosing(joined):
            async for chunk in joined:
                record.add(chunk)
                yield chunk

    # ------------------------------------------------------------ bytes
    async def _send_whole(
        self, send: Send, headers: dict[str, str], record: RequestRecord, content: bytes
    ) -> None:
        headers["content-length"] = str(len(content))
        headers["x-finish-reason"] = str(record.finish)
        headers["server-timing"] = record.server_timing()
        headers["x-num-frames"] = str(record.num_frames)
        headers["x-audio-seconds"] = f"{record.audio_s:.2f}"
        await _start(send, headers)
        async with self._parts.unread.holding(len(content)):
            await send({"type": "http.response.body", "body": content})
        record.wrote_audio()

    async def _send_stream(
        self,
        send: Send,
        body: SpeechBody,
        prepared: PreparedSpeech,
        record: RequestRecord,
        audio: AsyncIterator[bytes],
    ) -> None:
        is_sse = body.stream_format == "sse"
        try:
            async for part in audio:
                await _send_part(send, sse_delta(part) if is_sse else part)
                record.wrote_audio()
        except Exception as error:
            if is_sse:  # a raw body can only be cut; here there is a word for it
                await _send_part(send, sse_event("speech.audio.error", {"error": describe(error).error}))
            raise
        if is_sse:
            await _send_part(send, sse_event("speech.audio.done", _done_fields(prepared, record)))
        await send({"type": "http.response.body", "body": b""})

    def _speech_headers(
        self, body: SpeechBody, prepared: PreparedSpeech, record: RequestRecord, encoder: ResponseEncoder
    ) -> dict[str, str]:
        is_sse = body.stream_format == "sse"
        headers = {
            "content-type": SSE_MEDIA_TYPE if is_sse else encoder.media_type,
            "x-seed": str(prepared.request.seed),
            "x-sample-rate-hz": str(encoder.sample_rate_hz),
            "x-input-tokens": str(prepared.num_text_tokens),
            "server-timing": record.server_timing(),
        }
        if record.finish is not None:
            headers["x-finish-reason"] = record.finish
        if body.is_streaming:
            headers["cache-control"] = "no-store"
            headers["x-accel-buffering"] = "no"  # proxies must pass chunks on as they come
        return headers


async def prepare_speech(model: ServedModel, body: SpeechBody, clone: Clone | None) -> PreparedSpeech:
    """Off the event loop for a text that would hold up everybody's audio. Raises InvalidRequest and its kinds."""
    prepare = model.frontend.prepare
    with fields_as_sent(body):
        if len(body.input) + len(body.instructions or "") < _LONG_TEXT:
            return prepare(body, clone)
        return await asyncio.to_thread(prepare, body, clone)


def note_prepared(
    record: RequestRecord, model: ServedModel, body: SpeechBody, prepared: PreparedSpeech
) -> None:
    """What the record's line says of every speech request."""
    record.reached("prepared")
    record.note(
        engine_request_id=prepared.request.request_id,
        model=model.name,
        voice=prepared.voice,
        seed=prepared.request.seed,
        text_tokens=prepared.num_text_tokens,
        pieces=len(prepared.requests),
        format=body.audio_format,
        streamed=body.is_streaming,
    )
    record.speed = body.speed or 1.0


def open_encoder(model: ServedModel, body: SpeechBody) -> AbstractAsyncContextManager[ResponseEncoder]:
    """For what the body asks for. Raises as `audio.encoding.open_encoder` does."""
    return response_encoder(
        body.audio_format,
        model.frontend.config.codec.sample_rate_hz,
        body.sample_rate,
        body.speed or 1.0,
        is_streaming=body.is_streaming,
    )


async def encoded(encoder: ResponseEncoder, chunks: AsyncIterator[AudioChunk]) -> AsyncIterator[bytes]:
    """What there is to send after each chunk, and after the last."""
    async for chunk in chunks:
        if chunk.pcm and (part := await encoder.feed(chunk.pcm)):
            yield part
    if rest := await encoder.finish():
        yield rest


def _done_fields(prepared: PreparedSpeech, record: RequestRecord) -> dict[str, object]:
    num_in, num_out = prepared.num_text_tokens, record.num_frames
    return {
        "finish_reason": record.finish,
        "usage": {"input_tokens": num_in, "output_tokens": num_out, "total_tokens": num_in + num_out},
        "num_frames": num_out,
        "audio_seconds": round(record.audio_s, 4),
        "seed": prepared.request.seed,
        "request_id": record.request_id,
        "timings": record.timings(),
    }


async def prepend(first: AudioChunk, rest: AsyncIterator[AudioChunk]) -> AsyncIterator[AudioChunk]:
    yield first
    async for chunk in rest:
        yield chunk


@contextmanager
def fields_as_sent(body: SpeechBody) -> Iterator[None]:
    """A refusal of `voice` names `speaker` where the client called it so."""
    try:
        yield
    except InvalidRequest as error:
        if error.param == "voice" and body.voice is None and body.speaker is not None:
            error.param = "speaker"
        raise


async def read_json(request: Request, parts: AsyncIterator[bytes]) -> bytes:
    """The raw body. Raises HTTPException 415 for another content type, or another charset than UTF-8."""
    content_type = content_type_of(request, "application/json")
    if content_type not in _JSON_TYPES:
        raise HTTPException(415, f"content-type must be application/json, got {content_type[:60]}")
    check_charset(request)
    return b"".join([part async for part in parts])


async def _start(send: Send, headers: dict[str, str]) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})
