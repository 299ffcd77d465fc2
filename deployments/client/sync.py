"""The client for code that waits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import httpx

from deployments.client import wire
from deployments.client.sessions import Session
from deployments.client.wire import BROKEN, Speech, SpeechEvent, SseReader, StreamCut


class AudioStream:
    """Audio as it is made: an iterator of bytes. sample_rate_hz, seed: known before the first."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.content_type = wire.header(response, "content-type")
        self.sample_rate_hz = int(wire.header(response, "x-sample-rate-hz"))
        self.seed = int(wire.header(response, "x-seed"))

    def __iter__(self) -> Iterator[bytes]:
        """Raises StreamCut when the server fails on the way."""
        try:
            yield from self._response.iter_raw()
        except BROKEN as error:
            raise StreamCut("the server broke the stream off") from error


class EventStream(AudioStream):
    """Server-sent events: AudioDelta …, then SpeechDone."""

    def events(self) -> Iterator[SpeechEvent]:
        """Raises ServerError when the server says that it failed, StreamCut when it doesn't."""
        reader = SseReader()
        try:
            for line in self._response.iter_lines():
                if (event := reader.feed(line)) is not None:
                    yield event
        except BROKEN as error:
            raise StreamCut("the server broke the stream off") from error
        reader.finish()


class Client:
    """One server's. url, api_key: by default `QWEN3TTS_URL` and `QWEN3TTS_API_KEY` of the environment.

    fields, everywhere: those of a speech request (README, API): `voice`, `seed`, `response_format`, …; `ref_audio` may
    be a path or bytes. Every call raises ServerError with the server's words, or httpx's own errors where
    nothing answers. ValueError: no address, or no key.
    """

    def __init__(
        self, url: str | None = None, api_key: str | None = None, *, read_timeout_s: float = wire.READ_S
    ) -> None:
        self._url, self._headers = wire.base_url(url), wire.headers(api_key)
        self._http = httpx.Client(
            base_url=self._url, headers=self._headers, timeout=wire.timeouts(read_timeout_s)
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # ------------------------------------------------------------ speech
    def speak(self, text: str, **fields: Any) -> Speech:
        """The whole of it, once it is made."""
        return wire.speech_of(self._call("POST", wire.SPEECH, json=wire.speech_body(text, fields)))

    @contextmanager
    def stream(self, text: str, **fields: Any) -> Iterator[AudioStream]:
        """The bytes as they are made. Leaving the `with` early cancels the rest."""
        with self._open(wire.speech_body(text, fields, stream=True)) as response:
            yield AudioStream(response)

    @contextmanager
    def events(self, text: str, **fields: Any) -> Iterator[EventStream]:
        """The same as events, which also tell how it ended."""
        with self._open(wire.speech_body(text, fields, stream=True, stream_format="sse")) as response:
            yield EventStream(response)

    @contextmanager
    def session(self, **fields: Any) -> Iterator[Session]:
        """A WebSocket: text in as it is written, audio out as it is made."""
        with Session.open(wire.session_url(self._url), self._headers, wire.with_clip(fields)) as session:
            yield session

    # ------------------------------------------------------------ the rest
    def models(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = wire.object_of(self._call("GET", wire.MODELS), "data")["data"]
        return found

    def voices(self, model: str | None = None) -> dict[str, Any]:
        """`data`: every voice, or that model's; `default`; `languages`."""
        params = {} if model is None else {"model": model}
        return wire.object_of(self._call("GET", wire.VOICES, params=params), "data", "default", "languages")

    def add_voice(
        self, name: str, clip: str | os.PathLike[str] | bytes, ref_text: str | None = None
    ) -> dict[str, Any]:
        """Give a clip's voice a name. ref_text: what is said in it."""
        data, files = wire.voice_form(name, clip, ref_text)
        return wire.object_of(self._call("POST", wire.VOICES, data=data, files=files), "id")

    def delete_voice(self, name: str) -> None:
        self._call("DELETE", wire.voice_path(name))

    def _call(self, method: str, path: str, **request: Any) -> httpx.Response:
        response = self._http.request(method, path, **request)
        if not response.is_success:
            raise wire.error_of(response.status_code, response.headers, response.content)
        return response

    @contextmanager
    def _open(self, body: dict[str, Any]) -> Iterator[httpx.Response]:
        with self._http.stream("POST", wire.SPEECH, json=body) as response:
            if not response.is_success:
                raise wire.error_of(response.status_code, response.headers, response.read())
            yield response
