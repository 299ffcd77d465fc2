"""Sends no faster than the reader reads, and not for ever to one that doesn't.

    app ──send──> ReaderPace ──────────────────────────────> socket        Serve's direct ingress, HAProxy
    app ──send──> ReaderPace ──> Serve's queues ──> proxy ──> socket        Serve's own proxy
                      ^───────── bytes taken ────── ReaderCredits

On a socket of its own a replica's `send` waits for the reader. Behind Serve's proxy it never does: the
queues between take a whole long text while the reader has heard its first second. There `ReaderCredits`,
in the proxy, tells how much the reader has taken, and at most WINDOW_BYTES are on their way. A proxy that
runs without it (its variable must be in the environment that starts Ray: launch.py sets it) leaves the
first of the two pictures, with queues that wait for nobody.

A body that waits stops its chain: the engines go on to the end of the piece in hand, not to the next. The messages of a
WebSocket go the same ways, whole; there the app receives all the time, and so hears of what is taken.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.edge import request_id_of
from qwen3tts_core.errors import SlowReader

logger = logging.getLogger(__name__)

READER_TIMEOUT_S = 300.0
"""For a reader that takes nothing. The kernel tells of no progress before a third of what it holds for the reader has
been taken, up to 1.3 MB: half a minute of listening to PCM, but three minutes to MP3 at 64 kbit/s."""
WINDOW_BYTES = 2 << 20
"""On their way through Serve's queues, per response: 44 s of PCM16 at 24 kHz."""
PART_BYTES = 1 << 16
"""Is written at once, or there would be no telling a slow reader from one that has gone."""
MESSAGE_BYTES = 1 << 18
"""Goes through Serve's queues at once: each costs a millisecond."""
REPORT_BYTES = 1 << 16
"""Between two reports of the proxy."""

_RESET = struct.pack(
    "ii", 1, 0
)  # lingering for zero seconds: a close is a reset. Source: socket(7), SO_LINGER
_TAKEN = "qwen3tts.taken"  # a message of ours among those of ASGI, in the order of `receive`
_CREDITS_HEADER = b"x-reader-credits"
_TIMEOUT_HEADER = b"x-reader-timeout"


class ReaderPace:
    """ASGI middleware of the ingress. timeout_s: for a write; 0 waits for ever."""

    def __init__(self, app: ASGIApp, timeout_s: float = READER_TIMEOUT_S) -> None:
        self._app, self._timeout_s = app, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        make_reader = _READERS.get(scope["type"])
        if make_reader is None:
            await self._app(scope, receive, send)
            return
        has_credits = _CREDITS_HEADER.decode() in Headers(scope=scope)
        reader = make_reader(receive, send, self._timeout_s, has_credits, request_id_of(scope))
        await self._app(scope, reader.receive, reader.send)


class _Reader:
    """One response's way to its reader. Raises SlowReader from `send`, from then on always."""

    def __init__(
        self, receive: Receive, send: Send, timeout_s: float, has_credits: bool, request_id: str
    ) -> None:
        self._receive, self._send, self._request_id = receive, send, request_id
        self._timeout_s, self._has_credits = timeout_s, has_credits
        self._num_sent = self._num_taken = 0
        self._has_stalled = self._has_left = False

    async def receive(self) -> Message:
        while self._note(message := await self._receive()):
            pass
        return message

    async def send(self, message: Message) -> None:
        if message["type"] in _BEGINNINGS and self._has_credits:
            headers = [*message.get("headers", ()), (_TIMEOUT_HEADER, str(self._timeout_s).encode())]
            message = {**message, "headers": headers}
        for part in _cut(message, MESSAGE_BYTES if self._has_credits else PART_BYTES):
            await self._pass_on(part)

    async def _pass_on(self, message: Message) -> None:
        size = _num_bytes(message)
        if self._has_stalled:
            raise SlowReader(self._timeout_s)
        if self._has_credits and size:
            counted = min(size, WINDOW_BYTES // 2)  # larger than the window, it would wait for ever
            while self._num_sent - self._num_taken + counted > WINDOW_BYTES and not self._has_left:
                async with self._in_time():
                    await self._hear()
        async with self._in_time():
            await self._send(message)
        self._num_sent += size

    async def _hear(self) -> None:
        """Wait for what may change how much is taken."""
        self._note(await self._receive())

    def _note(self, message: Message) -> bool:
        """Whether it was one of ours."""
        kind: str = message["type"]
        if kind == _TAKEN:
            self._num_taken = message["num_bytes"]
        self._has_left |= kind in _LEAVINGS  # then Serve cancels us; nobody is waited for
        return kind == _TAKEN

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        limit = asyncio.timeout(self._timeout_s or None)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            self._has_stalled = True
            error = SlowReader(self._timeout_s)
            logger.warning("request %s: %s", self._request_id, error)
            raise error from None


class _SocketReader(_Reader):
    """A WebSocket's, whose app receives in one task and sends in others."""

    def __init__(
        self, receive: Receive, send: Send, timeout_s: float, has_credits: bool, request_id: str
    ) -> None:
        super().__init__(receive, send, timeout_s, has_credits, request_id)
        self._noted = asyncio.Event()

    async def _hear(self) -> None:
        self._noted.clear()
        await self._noted.wait()

    def _note(self, message: Message) -> bool:
        is_ours = super()._note(message)
        self._noted.set()
        return is_ours


_READERS = {"http": _Reader, "websocket": _SocketReader}
_BEGINNINGS = ("http.response.start", "websocket.accept")
_LEAVINGS = ("http.disconnect", "websocket.disconnect")


def _num_bytes(message: Message) -> int:
    """Of what the reader gets."""
    text: str | None = message.get("text")
    content = message.get("body") or message.get("bytes") or (text or "").encode()
    return len(content)


def _cut(message: Message, num_bytes: int) -> Iterator[Message]:
    """The same body in messages of so many bytes at most. A WebSocket's message stays whole."""
    content = message.get("body", b"")
    if len(content) <= num_bytes:
        yield message
        return
    for start in range(0, len(content), num_bytes):
        has_more = message.get("more_body", False) or start + num_bytes < len(content)
        yield {**message, "body": content[start : start + num_bytes], "more_body": has_more}


# ---------------------------------------------------------------- in Serve's proxy
def proxy_middlewares() -> list[Middleware]:
    """Named by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH; Serve puts them around its proxy."""
    return [Middleware(ReaderCredits)]


class ReaderCredits:
    """ASGI middleware of the proxy: tells the app behind it what the reader has taken, and drops dead readers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in _READERS:
            await self._app(scope, receive, send)
            return
        headers = [*(h for h in scope["headers"] if h[0] != _CREDITS_HEADER), (_CREDITS_HEADER, b"1")]
        credits = _Credits(receive, send)
        pumping = asyncio.create_task(credits.pump())
        try:
            await self._app({**scope, "headers": headers}, credits.receive, credits.send)
        finally:
            pumping.cancel()
            with suppress(asyncio.CancelledError):
                await pumping


class _Credits:
    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._num_taken = self._num_told = 0
        self._timeout_s = 0.0

    async def pump(self) -> None:
        """What the client sends, and what we tell, share one queue: the app has one `receive`."""
        while True:
            message = await self._receive()
            self._messages.put_nowait(message)
            if message["type"] in _LEAVINGS:
                return

    async def receive(self) -> Message:
        return await self._messages.get()

    async def send(self, message: Message) -> None:
        if message["type"] in _BEGINNINGS:
            message = self._without_timeout(message)
        for part in _cut(message, PART_BYTES):
            await self._write(part)

    async def _write(self, message: Message) -> None:
        limit = asyncio.timeout(self._timeout_s or None)
        try:
            async with limit:
                await self._send(message)
        except TimeoutError:
            if not limit.expired():
                raise
            logger.warning("a client took nothing for %g s: its connection is cut", self._timeout_s)
            _abort(self._send)
            return  # the server now hears of a disconnect, as of a client that has left
        self._num_taken += _num_bytes(message)
        has_more = message.get("more_body") or message["type"] == "websocket.send"
        if has_more and self._num_taken - self._num_told >= REPORT_BYTES:
            self._num_told = self._num_taken
            self._messages.put_nowait({"type": _TAKEN, "num_bytes": self._num_taken})

    def _without_timeout(self, message: Message) -> Message:
        headers = list(message.get("headers", ()))
        told = [value for name, value in headers if name == _TIMEOUT_HEADER]
        self._timeout_s = float(told[0]) if told else 0.0
        return {**message, "headers": [header for header in headers if header[0] != _TIMEOUT_HEADER]}


def _abort(send: Send) -> None:
    """Drop the connection with all that waits for it, also in the kernel. ASGI has no word for it, so: uvicorn's own.

    Closing would be too polite: it waits for the reader to take what is buffered.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        return
    # Our own handle on the same socket: uvloop's transport lends one without `setsockopt`.
    if (number := transport.get_extra_info("socket").fileno()) >= 0:
        with socket.socket(fileno=os.dup(number)) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()  # also one that is closing: a keepalive that failed leaves it so, with all its buffer
