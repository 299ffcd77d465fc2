"""WebSocket `/v1/audio/speech/stream`: text in as it is written, audio out as it is made.

    client ──messages──> SpeechSocket ──voice, sentences, ends──> Speaker ──chain──> audio ──> client
                         reads, always

Reading never waits for speaking, so a client that leaves is noticed at once, and what it had started is cancelled.
A session ends with a close code:

    1000  the client's `session.close`, once all is said     1008  its config was refused, or didn't come
    1001  nothing came for a while                           1009  a message was too large
    1011  a fault of ours                                    1013  too many clips in work; try again later
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.websockets import WebSocket, WebSocketDisconnect

from deployments.http_errors import describe
from deployments.speech import SpeechParts
from deployments.websocket_messages import (
    ClientMessage,
    MessageTooLarge,
    SessionConfig,
    error_message,
)
from deployments.websocket_speaker import ConfigRefused, Speaker
from qwen3tts_core.errors import InvalidRequest, Overloaded, TextTooLong
from qwen3tts_core.text.prompt import has_words
from qwen3tts_core.text.sentences import LongText
from qwen3tts_core.text.splitter import TextSplitter

logger = logging.getLogger(__name__)

_LARGE_MESSAGE_BYTES = 1 << 16  # read off the event loop, which is everybody's
_LONGEST_REASON_BYTES = 123  # RFC 6455, section 5.5: a control frame has 125, the code takes two
_LEFT = 1006
_CODES = {500: 1011, 503: 1013, 504: 1013}
_MAX_WAITING_TURNS = 64
"""Configs and ends of utterances that wait behind what is being spoken."""
_MOST_COMPLAINTS = 64
"""Of messages that can't be read, to a client that doesn't read either."""

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class SocketLimits:
    """config_timeout_s: until the first `session.config`. idle_timeout_s: without a message, while nothing is spoken."""

    config_timeout_s: float = 10.0
    idle_timeout_s: float = 30.0


class _Over(Exception):
    """The session ends. error: that the client is told before, if any."""

    def __init__(self, code: int, error: BaseException | None = None) -> None:
        super().__init__(code, error)
        self.code, self.error = code, error


class SpeechSocket:
    """One session, from its acceptance to its end. long_text: how much may wait, and where it is cut."""

    def __init__(
        self,
        parts: SpeechParts,
        websocket: WebSocket,
        session_id: str,
        long_text: LongText,
        limits: SocketLimits = SocketLimits(),
    ) -> None:
        self._parts, self._websocket, self._session_id = parts, websocket, session_id
        self._long_text, self._limits = long_text, limits
        self._sending = asyncio.Lock()
        self._complaints: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_MOST_COMPLAINTS)
        self._speaker = Speaker(parts, self, session_id)
        self._splitter: TextSplitter | None = None  # none before the first config
        self._is_within_utterance = False

    async def run(self) -> None:
        await self._websocket.accept()
        over = _Over(_LEFT)  # where Serve notices that first, it cancels us
        try:
            over = await self._talk()
        finally:
            self._log(over)

    async def _talk(self) -> _Over:
        """Read and speak until one of them is over; nothing of it is left then."""
        reading = asyncio.create_task(self._read())
        speaking = asyncio.create_task(self._speaker.run())
        complaining = asyncio.create_task(self._complain())
        told = asyncio.create_task(self._all_told(speaking))
        tasks = (reading, complaining, speaking, told)
        try:
            await asyncio.wait({reading, complaining, told}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        over = _why(reading, complaining, told)
        if over.code != _LEFT:
            await self._end(over)
        return over

    async def _end(self, over: _Over) -> None:
        reason = ""
        try:
            if over.error is not None:
                message = error_message(over.error)
                reason = message["message"]
                await self.json(message)
            await self._websocket.close(
                over.code, reason.encode()[:_LONGEST_REASON_BYTES].decode(errors="ignore")
            )
        except (WebSocketDisconnect, RuntimeError):
            logger.info("session %s: the client left as it was told of the end", self._session_id)

    def _log(self, over: _Over) -> None:
        line: dict[str, Any] = {
            "session_id": self._session_id,
            "close_code": over.code,
            "sentences": self._speaker.num_sentences,
        }
        if over.error is not None:
            told = describe(over.error)
            line["param"], line["code"] = told.error["param"], told.error["code"]
            if told.is_ours:
                logger.error("session %s: failed", self._session_id, exc_info=over.error)
        logger.info("session %s", json.dumps(line))

    # ------------------------------------------------------------ Sender
    async def json(self, fields: dict[str, Any]) -> None:
        async with self._sending:
            await self._websocket.send_json(fields)

    async def audio(self, part: bytes) -> None:
        async with self._sending:
            await self._websocket.send_bytes(part)

    # ------------------------------------------------------------ reading
    async def _read(self) -> None:
        """Raises _Over; a client that leaves is one reason for it."""
        while True:
            raw = await self._receive()
            try:
                await self._take(raw)
            except MessageTooLarge as error:
                raise _Over(1009, error) from None
            except Overloaded as error:
                raise _Over(1013, error) from None
            except InvalidRequest as error:
                if self._splitter is None or self._complaints.full():
                    raise _Over(1008, error) from None
                self._complaints.put_nowait(error_message(error))

    async def _all_told(self, speaking: asyncio.Task[None]) -> None:
        """Returns once all is said, complaints too; raises what ended the speaking."""
        await speaking
        await self._complaints.join()

    async def _complain(self) -> None:
        """Of messages that couldn't be read. Not where they are read: what is sent waits for the reader, and how
        much that has taken is told by what is received (`reader_pace.py`)."""
        while True:
            await self.json(await self._complaints.get())
            self._complaints.task_done()

    async def _receive(self) -> str | bytes:
        clock = asyncio.get_running_loop().time
        limit_s = self._limits.config_timeout_s if self._splitter is None else self._limits.idle_timeout_s
        asked_at = clock()
        receiving = asyncio.ensure_future(self._websocket.receive())
        try:
            while not receiving.done():
                idle_since = self._speaker.idle_since
                now = clock()
                quiet_s = 0.0 if idle_since is None else now - max(idle_since, asked_at)
                if quiet_s >= limit_s:
                    raise self._too_quiet(limit_s)
                await asyncio.wait({receiving}, timeout=limit_s - quiet_s)
        finally:
            receiving.cancel()
        message = receiving.result()
        if message["type"] == "websocket.disconnect":
            raise _Over(_LEFT)
        text: str | None = message.get("text")
        return message["bytes"] if text is None else text

    def _too_quiet(self, limit_s: float) -> _Over:
        if self._splitter is None:
            return _Over(1008, InvalidRequest(f"no session.config came within {limit_s:g} s", "type"))
        return _Over(1001, InvalidRequest(f"no message came for {limit_s:g} s"))

    async def _take(self, raw: str | bytes) -> None:
        message = await _off_loop(len(raw), lambda: ClientMessage.parse(raw, self._parts.max_body_bytes))
        if message.type == "session.config":
            try:
                config = await _off_loop(message.num_bytes, message.config)
            except (
                InvalidRequest
            ) as error:  # what comes next would be spoken with another voice than was asked for
                raise _Over(1008, error) from None
            self._configure(config)
            return
        if self._splitter is None:
            raise InvalidRequest(f"the first message must be session.config, got {message.type}", "type")
        if message.type == "input.text":
            self._add(self._splitter, message.text())
            return
        message.check_bare()
        if message.type == "session.close":
            if self._is_within_utterance:  # its text was sent to be heard
                self._end_utterance(self._splitter, is_cancelled=False)
            self._speaker.close()
        else:
            self._end_utterance(self._splitter, is_cancelled=message.type == "input.cancel")

    def _configure(self, config: SessionConfig) -> None:
        if self._is_within_utterance:
            raise InvalidRequest(
                "session.config can't come within an utterance: send input.done or input.cancel first", "type"
            )
        self._check_turns()
        self._splitter = TextSplitter(config.split_granularity, self._long_text)
        self._speaker.configure(config)

    def _add(self, splitter: TextSplitter, text: str) -> None:
        limit = self._long_text.max_chars
        length = self._speaker.num_waiting_chars + splitter.num_waiting_chars + len(text)
        if length > limit:
            raise TextTooLong(length, limit, "text", "characters with those that wait to be spoken")
        self._is_within_utterance |= bool(text)
        self._say(splitter.feed(text))

    def _end_utterance(self, splitter: TextSplitter, is_cancelled: bool) -> None:
        if is_cancelled:
            splitter.clear()
            self._speaker.cancel()
        else:
            self._check_turns()
            self._say(splitter.finish())
            self._speaker.end_utterance()
        self._is_within_utterance = False

    def _check_turns(self) -> None:
        if self._speaker.num_waiting_turns >= _MAX_WAITING_TURNS:
            raise InvalidRequest(
                f"{_MAX_WAITING_TURNS} utterances and configs wait to be spoken already; wait for a session.done",
                "type",
            )

    def _say(self, texts: list[str]) -> None:
        for text in texts:
            if has_words(text):
                self._speaker.say(text)


async def _off_loop(num_bytes: int, work: Callable[[], _Read]) -> _Read:
    """A clip in a message is megabytes, and the loop is everybody's."""
    return await asyncio.to_thread(work) if num_bytes > _LARGE_MESSAGE_BYTES else work()


def _why(*tasks: asyncio.Task[None]) -> _Over:
    """What ended the session; that the client has left goes before what came of it."""
    reasons = [_reason(task) for task in tasks if not task.cancelled()]
    return min(reasons, key=lambda over: over.code != _LEFT)


def _reason(ended: asyncio.Task[None]) -> _Over:
    error = ended.exception()
    if error is None:
        return _Over(1000)
    if isinstance(error, _Over):
        return error
    if isinstance(error, WebSocketDisconnect) or describe(error).status == 499:
        return _Over(_LEFT)
    if isinstance(error, ConfigRefused):
        cause = error.__cause__ or error
        return _Over(_CODES.get(describe(cause).status, 1008), cause)
    return _Over(1011, error)
