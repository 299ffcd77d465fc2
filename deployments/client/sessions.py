"""WebSocket sessions: text in as it is written, audio out as it is made. README "WebSocket" has the messages."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from deployments.client import wire
from deployments.client.wire import StreamCut

if TYPE_CHECKING:
    from websockets import ConnectionClosed, InvalidHandshake
    from websockets.asyncio.client import ClientConnection as AsyncConnection
    from websockets.sync.client import ClientConnection

_MAX_MESSAGE_BYTES = 256 << 20  # a whole sentence, where audio isn't streamed
_OPTIONS: dict[str, Any] = {"max_size": _MAX_MESSAGE_BYTES, "compression": None}  # audio hardly shrinks

Message = dict[str, Any] | bytes
"""What the server says, or a part of its audio."""


class _Turns:
    """Which utterance is whose: the server counts them from 0, one for each `input.done` or `input.cancel`."""

    def __init__(self) -> None:
        self.current = 0

    def said(self, kind: str) -> None:
        self.current += kind in ("input.done", "input.cancel")


class _Audio:
    """Picks one utterance's audio out of a session's messages."""

    def __init__(self, utterance: int) -> None:
        self._utterance, self._is_mine = utterance, False
        self.is_over = False

    def take(self, message: Message) -> bytes | None:
        """Raises ServerError when the server says that it failed."""
        if isinstance(message, bytes):
            return message if self._is_mine else None
        kind, index = message["type"], message.get("utterance_index", self._utterance)
        if kind == "audio.start":
            self._is_mine = index == self._utterance
        elif index == self._utterance and kind == "error":
            raise wire.error_of_object(message["error"])
        elif index == self._utterance and kind == "session.done":
            self.is_over = True
        return None


def _parsed(raw: str | bytes) -> Message:
    if isinstance(raw, bytes):
        return raw
    message: dict[str, Any] = json.loads(raw)
    return message


def _configured(message: Message) -> dict[str, Any] | None:
    if isinstance(message, bytes):
        return None
    if message["type"] == "error":
        raise wire.error_of_object(message["error"])
    return message if message["type"] == "session.configured" else None


def _said(kind: str, fields: dict[str, Any]) -> str:
    return json.dumps({"type": kind, **fields})


def _cut(error: ConnectionClosed) -> StreamCut:
    received = error.rcvd
    if received is None:
        return StreamCut("the connection broke")
    return StreamCut(received.reason or "the server closed the session", code=f"closed_{received.code}")


def _refused(error: InvalidHandshake) -> wire.ServerError:
    from websockets import InvalidStatus

    if not isinstance(error, InvalidStatus):
        return wire.ServerError(f"this is no qwen3tts server: {error}")
    response = error.response
    return wire.error_of(response.status_code, response.headers, bytes(response.body or b""))


# ---------------------------------------------------------------- for code that waits
class Session:
    """An open one. configured: what the server made of the fields, its `seed` and `sample_rate` among it.

    One thread reads; others may `send`, `done` and `cancel` meanwhile.
    """

    configured: dict[str, Any]

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._turns = connection, _Turns()

    @classmethod
    @contextmanager
    def open(cls, url: str, headers: dict[str, str], fields: dict[str, Any]) -> Iterator[Session]:
        from websockets import InvalidHandshake
        from websockets.sync.client import connect

        try:
            connection = connect(url, additional_headers=headers, open_timeout=wire.CONNECT_S, **_OPTIONS)
        except InvalidHandshake as error:
            raise _refused(error) from error
        with connection:
            session = cls(connection)
            session.configure(**fields)
            yield session

    def configure(self, **fields: Any) -> dict[str, Any]:
        """Other fields for the utterances that follow; only while none is spoken."""
        self._say("session.config", {"stream_audio": True, **wire.with_clip(fields)})
        while (configured := _configured(self.receive())) is None:
            pass
        self.configured = configured
        return configured

    def speak(self, texts: str | Iterable[str]) -> Generator[bytes]:
        """One utterance: its text, as it comes, and its audio, as it comes. An iterable is read by a thread.

        Raises ServerError when the server fails, and whatever the iterable raises. Left early, it is cancelled.
        """
        audio, fed = _Audio(self._turns.current), _Feeding(self, texts)
        try:
            while not audio.is_over:
                if (part := audio.take(self.receive())) is not None:
                    yield part
        finally:
            fed.stop(is_early=not audio.is_over)
        if fed.error is not None:
            raise fed.error

    def send(self, text: str) -> None:
        """The next part of the utterance, cut anywhere."""
        self._say("input.text", {"text": text})

    def done(self) -> None:
        """The utterance is whole."""
        self._say("input.done", {})

    def cancel(self) -> None:
        """End the utterance; what isn't spoken yet never is."""
        self._say("input.cancel", {})

    def receive(self) -> Message:
        """The next thing the server says. Raises StreamCut when it has closed the session."""
        from websockets import ConnectionClosed

        try:
            return _parsed(self._connection.recv())
        except ConnectionClosed as error:
            raise _cut(error) from error

    def _say(self, kind: str, fields: dict[str, Any]) -> None:
        from websockets import ConnectionClosed

        try:
            self._connection.send(_said(kind, fields))
        except ConnectionClosed:
            return  # why is in what the server said before, and `receive` tells it
        self._turns.said(kind)


class _Feeding:
    """Sends an utterance's text while its audio is read."""

    def __init__(self, session: Session, texts: str | Iterable[str]) -> None:
        self._session, self._lock, self._is_over = session, threading.Lock(), False
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        if isinstance(texts, str):
            self._run([texts])
        else:
            self._thread = threading.Thread(target=self._run, args=(texts,), daemon=True)
            self._thread.start()

    def _run(self, texts: Iterable[str]) -> None:
        try:
            for text in texts:
                with self._lock:
                    if self._is_over:
                        return
                    self._session.send(text)
        except Exception as error:  # noqa: BLE001 - the caller's own: told there, on the caller's thread
            self.error = error
            self._end(self._session.cancel)
        else:
            self._end(self._session.done)

    def stop(self, is_early: bool) -> None:
        """is_early: the reader has left, or failed. The text may be whole by then: an empty utterance more is
        cancelled with it."""
        if is_early:
            with self._lock:
                self._is_over = True
                self._session.cancel()
        elif self._thread is not None:
            self._thread.join()

    def _end(self, verb: Callable[[], None]) -> None:
        """Once, so that nothing is said that would begin another utterance."""
        with self._lock:
            if not self._is_over:
                self._is_over = True
                verb()


# ---------------------------------------------------------------- for asyncio
class AsyncSession:
    """The same for asyncio. One task reads; others may `send`, `done` and `cancel` meanwhile."""

    configured: dict[str, Any]

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection, self._turns = connection, _Turns()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str, headers: dict[str, str], fields: dict[str, Any]
    ) -> AsyncIterator[AsyncSession]:
        from websockets import InvalidHandshake
        from websockets.asyncio.client import connect

        try:
            connection = await connect(
                url, additional_headers=headers, open_timeout=wire.CONNECT_S, **_OPTIONS
            )
        except InvalidHandshake as error:
            raise _refused(error) from error
        async with connection:
            session = cls(connection)
            await session.configure(**fields)
            yield session

    async def configure(self, **fields: Any) -> dict[str, Any]:
        """Other fields for the utterances that follow; only while none is spoken."""
        await self._say("session.config", {"stream_audio": True, **wire.with_clip(fields)})
        while (configured := _configured(await self.receive())) is None:
            pass
        self.configured = configured
        return configured

    async def speak(self, texts: str | Iterable[str] | AsyncIterable[str]) -> AsyncGenerator[bytes]:
        """One utterance: its text, as it comes, and its audio, as it comes.

        Raises ServerError when the server fails, and whatever `texts` raises. Left early, it is cancelled.
        """
        audio = _Audio(self._turns.current)
        feeding = asyncio.create_task(self._feed(texts))
        try:
            while not audio.is_over:
                if (part := audio.take(await self.receive())) is not None:
                    yield part
            await feeding
        finally:
            if not audio.is_over:
                feeding.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await feeding
                await self.cancel()

    async def _feed(self, texts: str | Iterable[str] | AsyncIterable[str]) -> None:
        try:
            if isinstance(texts, AsyncIterable):
                async for text in texts:
                    await self.send(text)
            else:
                for text in [texts] if isinstance(texts, str) else texts:
                    await self.send(text)
        except Exception:
            await self.cancel()
            raise
        await self.done()

    async def send(self, text: str) -> None:
        """The next part of the utterance, cut anywhere."""
        await self._say("input.text", {"text": text})

    async def done(self) -> None:
        """The utterance is whole."""
        await self._say("input.done", {})

    async def cancel(self) -> None:
        """End the utterance; what isn't spoken yet never is."""
        await self._say("input.cancel", {})

    async def receive(self) -> Message:
        """The next thing the server says. Raises StreamCut when it has closed the session."""
        from websockets import ConnectionClosed

        try:
            return _parsed(await self._connection.recv())
        except ConnectionClosed as error:
            raise _cut(error) from error

    async def _say(self, kind: str, fields: dict[str, Any]) -> None:
        from websockets import ConnectionClosed

        try:
            await self._connection.send(_said(kind, fields))
        except ConnectionClosed:
            return  # why is in what the server said before, and `receive` tells it
        self._turns.said(kind)
