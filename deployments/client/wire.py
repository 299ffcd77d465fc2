"""What goes over the wire and what comes back, for both clients: bodies, headers, events, errors. Does no I/O."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import httpx

URL_VARIABLE = "QWEN3TTS_URL"
KEY_VARIABLE = "QWEN3TTS_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"

SPEECH = "v1/audio/speech"
VOICES = "v1/audio/voices"
MODELS = "v1/models"
SESSION = "v1/audio/speech/stream"

CONNECT_S = 10.0
READ_S = 600.0
"""Between two parts of an answer. A whole body comes in one, when all of it is made."""


BROKEN = (httpx.RemoteProtocolError, httpx.ReadError)
"""The connection ended within a body: closed, or reset."""


class ServerError(Exception):
    """The server refused, or failed; in its words. status: of HTTP, None where there was none, as within a stream.

    param: the field at fault. retry_after_s: when another try makes sense, where the server said so.
    """

    def __init__(
        self,
        message: str,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, status, code, param, retry_after_s)
        self.message, self.status, self.code, self.param = message, status, code, param
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        known = [str(part) for part in (self.status, self.code) if part is not None]
        return f"{' '.join(known)}: {self.message}" if known else self.message


class StreamCut(ServerError):
    """A stream ended before it was whole. What came until then is not all of it."""


@dataclass(frozen=True, slots=True)
class Speech:
    """A whole answer. audio: a file in the format that was asked for."""

    audio: bytes
    content_type: str
    sample_rate_hz: int
    seed: int
    finish_reason: str
    num_frames: int
    audio_seconds: float
    request_id: str

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_bytes(self.audio)


@dataclass(frozen=True, slots=True)
class AudioDelta:
    """An event: the next part of the audio."""

    audio: bytes


@dataclass(frozen=True, slots=True)
class SpeechDone:
    """The last event: what only the end can tell. timings: seconds on the server."""

    finish_reason: str
    num_frames: int
    audio_seconds: float
    seed: int
    request_id: str
    usage: Mapping[str, int]
    timings: Mapping[str, float]


SpeechEvent = AudioDelta | SpeechDone


# ---------------------------------------------------------------- out
def base_url(url: str | None) -> str:
    """The server's address, from the environment if it isn't given; with or without a trailing `/v1`.

    Raises ValueError for what is none.
    """
    url = url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    try:
        scheme = httpx.URL(url).scheme
    except httpx.InvalidURL as error:
        raise ValueError(f"{url!r} is no address: {error}") from None
    if scheme not in ("http", "https"):
        raise ValueError(f"a server's address starts with http:// or https://, got {url!r}")
    return url.rstrip("/").removesuffix("/v1") + "/"


def session_url(url: str) -> str:
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}[parts.scheme]
    return urlunsplit((scheme, parts.netloc, parts.path + SESSION, "", ""))


def headers(api_key: str | None) -> dict[str, str]:
    """api_key: from the environment if it isn't given. Raises ValueError, which doesn't show it."""
    key = api_key or os.environ.get(KEY_VARIABLE)
    if key and not (key.isascii() and key.isprintable()):
        raise ValueError("the API key holds characters that no header can carry")
    return {"Authorization": f"Bearer {key}"} if key else {}


def timeouts(read_s: float) -> httpx.Timeout:
    return httpx.Timeout(read_s, connect=CONNECT_S)


def speech_body(text: str, fields: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """`ref_audio` may be a file or its bytes."""
    return {"input": text, **with_clip(fields), **own}


def with_clip(fields: Mapping[str, Any]) -> dict[str, Any]:
    clip = fields.get("ref_audio")
    if isinstance(clip, os.PathLike):
        clip = Path(clip).read_bytes()
    if isinstance(clip, bytes):
        clip = base64.b64encode(clip).decode("ascii")
    return {name: value for name, value in {**fields, "ref_audio": clip}.items() if value is not None}


def voice_form(
    name: str, clip: str | os.PathLike[str] | bytes, ref_text: str | None
) -> tuple[dict[str, str], dict[str, tuple[str, bytes]]]:
    """Fields and files of an upload. clip: a file, or its bytes."""
    data = clip if isinstance(clip, bytes) else Path(clip).read_bytes()
    fields = {"name": name} if ref_text is None else {"name": name, "ref_text": ref_text}
    return fields, {"audio_sample": ("clip", data)}


def voice_path(name: str) -> str:
    return f"{VOICES}/{quote(name, safe='')}"


# ---------------------------------------------------------------- in
def header(response: httpx.Response, name: str) -> str:
    """Of those that every answer of this server has. Raises ServerError where it isn't there."""
    if name not in response.headers:
        raise _stranger(response)
    found: str = response.headers[name]
    return found


def object_of(response: httpx.Response, *names: str) -> dict[str, Any]:
    """A JSON object with at least these. Raises ServerError."""
    try:
        found = response.json()
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() >= set(names):
        raise _stranger(response)
    return found


def _stranger(response: httpx.Response) -> ServerError:
    kind = response.headers.get("content-type", "nothing known")
    return ServerError(f"{response.url} is no qwen3tts server: it answers with {kind}", response.status_code)


def speech_of(response: httpx.Response) -> Speech:
    return Speech(
        audio=response.content,
        content_type=header(response, "content-type"),
        sample_rate_hz=int(header(response, "x-sample-rate-hz")),
        seed=int(header(response, "x-seed")),
        finish_reason=header(response, "x-finish-reason"),
        num_frames=int(header(response, "x-num-frames")),
        audio_seconds=float(header(response, "x-audio-seconds")),
        request_id=response.headers.get("x-request-id", ""),
    )


def error_of(status: int, told: Mapping[str, str], content: bytes) -> ServerError:
    """Of a response that is no success; an answer that isn't this server's is told as it is."""
    try:
        error = json.loads(content)["error"]
        message, code, param = str(error["message"]), error.get("code"), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        words = " ".join(content.decode(errors="replace").split())
        return ServerError(words[:300] or "no explanation", status)
    return ServerError(message, status, code, param, _seconds(told.get("retry-after")))


def error_of_object(error: Mapping[str, Any]) -> ServerError:
    """Of an error object within a stream."""
    return ServerError(str(error.get("message")), None, error.get("code"), error.get("param"))


def _seconds(header: str | None) -> float | None:
    return float(header) if header is not None and header.isdecimal() else None


class SseReader:
    """Server-sent events, line by line. Source: WHATWG HTML, 9.2.6, "Interpreting an event stream"."""

    def __init__(self) -> None:
        self._data: list[str] = []
        self.is_done = False

    def feed(self, line: str) -> SpeechEvent | None:
        """The event that this line completes. Raises ServerError for one that says so."""
        if line.startswith("data:"):
            self._data.append(line.removeprefix("data:").removeprefix(" "))
        if line or not self._data:
            return None
        event, self._data = json.loads("\n".join(self._data)), []
        if event["type"] == "speech.audio.delta":
            return AudioDelta(base64.b64decode(event["audio"]))
        if event["type"] == "speech.audio.error":
            raise error_of_object(event["error"])
        if event["type"] != "speech.audio.done":
            return None
        self.is_done = True
        return SpeechDone(**{name: event[name] for name in SpeechDone.__slots__})

    def finish(self) -> None:
        """Raises StreamCut if the last event hasn't come."""
        if not self.is_done:
            raise StreamCut("the stream ended before its last event")
