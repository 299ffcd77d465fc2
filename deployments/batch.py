"""`POST /v1/audio/speech/batch`: several texts in one request, each spoken, refused or failed on its own.

    {"items": [{"input": …}, {"input": …, "voice": …}], "voice": …, "response_format": …}

Fields beside `items` are defaults for all of them. Every item runs as the speech request that it
would be alone, a few at a time, so a batch never holds more places than `_AT_ONCE`; what is refused
by a full server is tried again for a while. The answer is 200 once the batch itself could be read;
each result has a status of its own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from deployments.http_errors import HttpError, describe
from deployments.schemas import SpeechBody, as_invalid_request, check_keys, parse_speech_body
from deployments.speech import SpeechCall, SpeechParts, read_json
from qwen3tts_core.errors import InvalidRequest

logger = logging.getLogger(__name__)

MAX_ITEMS = 32
MAX_AUDIO_BYTES = 256 << 20
"""Of all items' audio together, since the answer is put together in memory."""
BODY_FACTOR = 4
"""A batch's body may be this many times a single one's."""
TRY_AGAIN_FOR_S = 20.0
"""How long an item that finds no room is tried again."""
_AT_ONCE = 8
_SAME_VOICE = ("voice", "speaker")  # one field by two names: an item's overrides either of the defaults'

_LISTED_AT = {
    "model": "/v1/models",
    **dict.fromkeys(("voice", "speaker", "language"), "/v1/audio/voices"),
}


class BatchBody(BaseModel):
    """Body of the batch route. Every other field is one of `SpeechBody`'s, and a default for the items."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    items: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ITEMS)]


def parse_batch_body(raw: bytes) -> list[dict[str, Any]]:
    """Each item with the defaults that it doesn't override; not checked any further.

    Raises InvalidRequest for a body that is no batch, or for defaults that no request may have.
    """
    try:
        body = BatchBody.model_validate_json(raw)
    except ValidationError as error:
        raise as_invalid_request(error) from None
    clips = (item.get("ref_audio") for item in [*body.items, body.model_extra or {}])
    check_keys(raw, [clip for clip in clips if isinstance(clip, str)])
    defaults = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    _check_defaults(defaults)
    return [_merge(defaults, item) for item in body.items]


def _check_defaults(defaults: dict[str, Any]) -> None:
    parsed = parse_speech_body(json.dumps({"input": "", **defaults}).encode())
    _refuse_streams(parsed)
    for name, where in _LISTED_AT.items():
        if defaults.get(name) == "":
            raise InvalidRequest(f'{name} must be one of those that GET {where} lists, got ""', name)


def _refuse_streams(body: SpeechBody) -> None:
    if body.is_streaming:
        raise InvalidRequest("a batch is answered as a whole, so its items can't be streamed", "stream")


def _merge(defaults: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in item.items() if value is not None}
    if any(name in own for name in _SAME_VOICE):
        defaults = {name: value for name, value in defaults.items() if name not in _SAME_VOICE}
    return {**defaults, **own}


class BatchCall(Response):
    """A response that does its work as it is sent. A client that leaves cancels it, and so every item."""

    def __init__(self, parts: SpeechParts, request: Request, request_id: str) -> None:
        super().__init__()
        self._parts = parts
        self._request = request
        self._request_id = request_id
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._parts.bodies.hold(self._request, BODY_FACTOR * self._parts.max_body_bytes) as parts:
            items = parse_batch_body(await read_json(self._request, parts))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._speak(scope, *numbered)) for numbered in enumerate(items)]
        results = [task.result() for task in tasks]
        # Megabytes: not on the loop of everybody's audio.
        content = await asyncio.to_thread(_as_json, results)
        async with self._parts.unread.holding(len(content)):
            await Response(content, media_type="application/json")(scope, receive, send)

    async def _speak(self, scope: Scope, index: int, item: dict[str, Any]) -> dict[str, Any]:
        request_id = f"{self._request_id}-{index}"
        async with self._places:
            try:
                raw = json.dumps(item).encode()
                _refuse_streams(parse_speech_body(raw))
                spoken = await self._speak_within_bound(scope, request_id, raw)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this item's, and told as such
                return _failed(index, request_id, describe(error))
        return {"index": index, "request_id": request_id, "status": 200, **spoken}

    async def _speak_within_bound(self, scope: Scope, request_id: str, raw: bytes) -> dict[str, Any]:
        """Try again after a refusal for lack of room, as long as that makes sense."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + TRY_AGAIN_FOR_S
        while True:
            try:
                return self._count(await _speak_once(self._parts, scope, request_id, raw))
            except Exception as error:
                described = describe(error)
                wait_s = float(described.headers.get("Retry-After", 0))
                if described.error["code"] != "overloaded" or loop.time() + wait_s > give_up_at:
                    raise
            await asyncio.sleep(wait_s)

    def _count(self, whole: _Whole) -> dict[str, Any]:
        self._num_bytes += len(whole.content)
        if self._num_bytes > MAX_AUDIO_BYTES:
            raise InvalidRequest(
                f"the batch's audio is beyond {MAX_AUDIO_BYTES:,} bytes; send fewer items", "items"
            )
        return whole.fields()


class _Whole:
    """An ASGI client in memory, for a response that comes as a whole."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._headers: dict[str, str] = {}
        self.content = bytearray()

    async def receive(self) -> Message:
        return {"type": "http.request", "body": self._raw, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]
            }
        else:
            self.content += message.get("body", b"")

    def fields(self) -> dict[str, Any]:
        num_in, num_out = int(self._headers["x-input-tokens"]), int(self._headers["x-num-frames"])
        return {
            "audio": self.content,
            "content_type": self._headers["content-type"],
            "finish_reason": self._headers["x-finish-reason"],
            "num_frames": num_out,
            "audio_seconds": float(self._headers["x-audio-seconds"]),
            "seed": int(self._headers["x-seed"]),
            "usage": _usage(num_in, num_out),
        }


async def _speak_once(parts: SpeechParts, scope: Scope, request_id: str, raw: bytes) -> _Whole:
    """One item's own request. Raises as `SpeechCall` does."""
    whole = _Whole(raw)
    own_scope = {**scope, "headers": [(b"content-type", b"application/json")]}
    call = SpeechCall(parts, Request(own_scope, whole.receive), request_id)
    await call(own_scope, whole.receive, whole.send)
    return whole


def _failed(index: int, request_id: str, described: HttpError) -> dict[str, Any]:
    if described.is_ours:
        logger.exception("request %s: failed", request_id)
    return {"index": index, "request_id": request_id, "status": described.status, "error": described.error}


def _as_json(results: Sequence[dict[str, Any]]) -> bytes:
    usages = [result["usage"] for result in results if "usage" in result]
    total = _usage(*(sum(usage[key] for usage in usages) for key in ("input_tokens", "output_tokens")))
    for result in results:
        if "audio" in result:
            result["audio"] = base64.b64encode(result["audio"]).decode("ascii")
    num_failed = sum(result["status"] != 200 for result in results)
    return bytes(
        JSONResponse({"object": "list", "data": results, "num_failed": num_failed, "usage": total}).body
    )


def _usage(num_in: int, num_out: int) -> dict[str, int]:
    return {"input_tokens": num_in, "output_tokens": num_out, "total_tokens": num_in + num_out}
