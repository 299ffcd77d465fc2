"""Every failure as an HTTP status and an OpenAI error object. One table, walked by the type's MRO.

    {"error": {"message": "…", "type": "invalid_request_error", "param": "voice", "code": "unknown_voice"}}

What is the caller's fault is told in full; of what is ours the caller learns only that, and the log
the rest. Source of the walk: starlette 1.10, `_exception_handler.py`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from deployments.handles import root_cause
from qwen3tts_core.errors import (
    EncoderUnavailable,
    EngineDown,
    FirstAudioTimeout,
    InvalidReferenceAudio,
    InvalidRequest,
    Overloaded,
    SlowReader,
    StorageFull,
    StreamCancelled,
    StreamLost,
    TextTooLong,
    UnknownLanguage,
    UnknownModel,
    UnknownVoice,
    VoiceNameTaken,
)

_OVERLOADED_TEXT = "the server is at its limit, nothing was started"
_UNAVAILABLE_TEXT = "a part of the server is restarting"
_FAULT_TEXT = "the server failed on this request"


class _Row(NamedTuple):
    """text: what the client is told; None means the error's own words."""

    status: int
    type: str
    code: str
    text: str | None = None


_TABLE: dict[type[BaseException], _Row] = {
    InvalidRequest: _Row(400, "invalid_request_error", "invalid_value"),
    TextTooLong: _Row(400, "invalid_request_error", "text_too_long"),
    UnknownVoice: _Row(400, "invalid_request_error", "unknown_voice"),
    UnknownLanguage: _Row(400, "invalid_request_error", "unknown_language"),
    UnknownModel: _Row(404, "invalid_request_error", "model_not_found"),
    VoiceNameTaken: _Row(409, "invalid_request_error", "voice_name_taken"),
    EncoderUnavailable: _Row(400, "invalid_request_error", "encoder_unavailable"),
    InvalidReferenceAudio: _Row(400, "invalid_request_error", "invalid_reference_audio"),
    Overloaded: _Row(503, "server_error", "overloaded"),
    BackPressureError: _Row(503, "server_error", "overloaded", _OVERLOADED_TEXT),
    DeploymentUnavailableError: _Row(503, "server_error", "unavailable", _UNAVAILABLE_TEXT),
    RayActorError: _Row(503, "server_error", "unavailable", _UNAVAILABLE_TEXT),
    EngineDown: _Row(503, "server_error", "unavailable", _UNAVAILABLE_TEXT),
    StreamLost: _Row(503, "server_error", "unavailable", _UNAVAILABLE_TEXT),
    FirstAudioTimeout: _Row(504, "server_error", "first_audio_timeout"),
    StorageFull: _Row(507, "server_error", "storage_full"),
    SlowReader: _Row(499, "server_error", "slow_reader"),
    StreamCancelled: _Row(499, "server_error", "cancelled", "the request was cancelled"),
    ClientDisconnect: _Row(499, "server_error", "cancelled", "the client left before its body was read"),
    # What Serve raises when a client that leaves has its calls cancelled; we cancel for no other reason.
    TaskCancelledError: _Row(499, "server_error", "cancelled", "the request was cancelled"),
    RequestCancelledError: _Row(499, "server_error", "cancelled", "the request was cancelled"),
    BaseException: _Row(500, "server_error", "internal_error", _FAULT_TEXT),
}

_HTTP_CODES = {
    401: "invalid_api_key",
    403: "origin_not_allowed",
    404: "not_found",
    405: "method_not_allowed",
    408: "body_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
}


class HttpError(NamedTuple):
    """What the client gets."""

    status: int
    error: dict[str, Any]
    headers: dict[str, str]

    @property
    def is_ours(self) -> bool:
        """Worth a stack trace in the log."""
        return self.status == 500

    def response(self) -> JSONResponse:
        return JSONResponse({"error": self.error}, self.status, self.headers)


def describe(error: BaseException) -> HttpError:
    """The HTTP face of any error, also of one that crossed replicas in Ray's wrapping."""
    error = root_cause(error)
    if isinstance(error, HTTPException):
        code = _HTTP_CODES.get(error.status_code, "http_error")
        body = _error_object(str(error.detail), "invalid_request_error", None, code)
        return HttpError(error.status_code, body, dict(error.headers or {}))
    row = next(_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE)
    body = _error_object(row.text or str(error), row.type, getattr(error, "param", None), row.code)
    headers = {}
    if row.status == 503:
        wait_s = getattr(error, "retry_after_s", None) or 1.0
        headers["Retry-After"] = str(max(1, math.ceil(wait_s)))  # whole seconds, RFC 9110 section 10.2.3
    return HttpError(row.status, body, headers)


def _error_object(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"message": message, "type": kind, "param": param, "code": code}
