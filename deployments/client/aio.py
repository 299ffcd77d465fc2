"""The client for asyncio; the same as `sync.py`, verb for verb."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any

import httpx

from deployments.client import wire
from deployments.client.sessions import AsyncSession
from deployments.client.wire import BROKEN, Speech, SpeechEvent, SseReader, StreamCut


class AsyncAudioStream:
    """Audio as it is made: an iterator of bytes. sample_rate_hz, seed: known before the first."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.content_type = wire.header(response, "content-type")
        self.sample_rate_hz = int(wire.header(response, "x-sample-rate-hz"))
        self.seed = int(wire.header(response, "x-seed"))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Raises StreamCut when the server fails on the way."""
        try:
            async for part in self._response.aiter_raw():
                yield part
        except BROKEN as error:
            raise StreamCut("the server broke the stream off") from error


class AsyncEventStream(AsyncAudioStream):
    """Server-sent events: AudioDelta …, then SpeechDone."""

    async def events(self) -> AsyncIterator[SpeechEvent]:
        """Raises ServerError when the server says that it failed, StreamCut when it doesn't."""
        reader = SseReader()
        try:
            async for line in self._response.aiter_lines():
                if (event := reader.feed(line)) is not None:
                    yield event
        except BROKEN as error:
            raise StreamCut("the server broke the stream off") from error
        reader.finish()


class AsyncClient:
    """One server's. url, api_key: by default `QWEN3TTS_URL` and `QWEN3TTS_API_KEY` of the environment.

    fields, everywhere: those of a speech request (README, API): `voice`, `seed`, `response_format`, …; `ref_audio` may
    be a path or bytes. Every call raises ServerError with the server's words, or httpx's own errors where
    nothing answers. ValueError: no address, or no key.
    """

    def __init__(
        self, url: str | None = None, api_key: str | None = None, *, read_timeout_s: float = wire.READ_S
    ) -> None:
        self._url, self._headers = wire.base_url(url), wire.headers(api_key)
        self._http = httpx.AsyncClient(
            base_url=self._url, headers=self._headers, timeout=wire.timeouts(read_timeout_s)
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # ------------------------------------------------------------ speech
    async def speak(self, text: str, **fields: Any) -> Speech:
        """The whole of it, once it is made."""
        return wire.speech_of(await self._call("POST", wire.SPEECH, json=wire.speech_body(text, fields)))

    @asynccontextmanager
    async def stream(self, text: str, **fields: Any) -> AsyncIterator[AsyncAudioStream]:
        """The bytes as they are made. Leaving the `with` early cancels the rest."""
        async with self._open(wire.speech_body(text, fields, stream=True)) as response:
            yield AsyncAudioStream(response)

    @asynccontextmanager
    async def events(self, text: str, **fields: Any) -> AsyncIterator[AsyncEventStream]:
        """The same as events, which also tell how it ended."""
        async with self._open(wire.speech_body(text, fields, stream=True, stream_format="sse")) as response:
            yield AsyncEventStream(response)

    @asynccontextmanager
    async def session(self, **fields: Any) -> AsyncIterator[AsyncSession]:
        """A WebSocket: text in as it is written, audio out as it is made."""
        async with AsyncSession.open(
            wire.session_url(self._url), self._headers, wire.with_clip(fields)
        ) as session:
            yield session

    # ------------------------------------------------------------ the rest
    async def models(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = wire.object_of(await self._call("GET", wire.MODELS), "data")["data"]
        return found

    async def voices(self, model: str | None = None) -> dict[str, Any]:
        """`data`: every voice, or that model's; `default`; `languages`."""
        params = {} if model is None else {"model": model}
        return wire.object_of(
            await self._call("GET", wire.VOICES, params=params), "data", "default", "languages"
        )

    async def add_voice(
        self, name: str, clip: str | os.PathLike[str] | bytes, ref_text: str | None = None
    ) -> dict[str, Any]:
        """Give a clip's voice a name. ref_text: what is said in it."""
        data, files = wire.voice_form(name, clip, ref_text)
        return wire.object_of(await self._call("POST", wire.VOICES, data=data, files=files), "id")

    async def delete_voice(self, name: str) -> None:
        await self._call("DELETE", wire.voice_path(name))

    async def _call(self, method: str, path: str, **request: Any) -> httpx.Response:
        response = await self._http.request(method, path, **request)
        if not response.is_success:
            raise wire.error_of(response.status_code, response.headers, response.content)
        return response

    @asynccontextmanager
    async def _open(self, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        async with self._http.stream("POST", wire.SPEECH, json=body) as response:
            if not response.is_success:
                raise wire.error_of(response.status_code, response.headers, await response.aread())
            yield response
