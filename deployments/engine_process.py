"""An engine in a process of its own, as its replica has it: the same calls, and items into the same outbox.

    replica's event loop ── engine_wire ──> engine_child.py: an interpreter (GIL) that the engine shares with nobody

The engine's steps and the replica's streaming calls then cost each other no time. Nothing here waits but the
constructor and `stop`: calls are sent, and a refusal is the first item of its stream. Either process ends
when the other does.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from deployments.engine_link import EngineLink
from deployments.engine_wire import Frame, Kind, header_of, pack
from deployments.engines import EngineLike
from qwen3tts_core.engine.outbox import Outbox
from qwen3tts_core.errors import EngineDown, EngineFault
from qwen3tts_core.types import FrameBatch, ReferenceVoice, SpeechRequest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

_ASK_EVERY_S = 1.0
_STUCK_AFTER_S = 60.0
"""An answer takes microseconds, whatever the engine does: it comes from another thread."""
_ANSWER_WITHIN_S = 10.0  # for whoever waits for it
_END_WITHIN_S = 5.0  # a step, and the process's own end
_MOST_UNSENT = 64 << 20
"""Bytes that the process has not taken; a request has some kilobytes."""

_SEND_BUFFER_BYTES = 4 << 20  # or what the machine allows (net.core.wmem_max)

Settings = TypeVar("Settings")


class _Question(NamedTuple):
    asked_at: float
    answered: asyncio.Future[None] | None


class EngineProcess:
    """What both kinds have in common. On one event loop, but for `stop`.

    open_engine: called over there, so it must be importable, and settings must pickle. Returns when the
    engine is warm; raises what opening it raised, EngineFault for a process that just ended.
    """

    def __init__(
        self,
        name: str,
        open_engine: Callable[[Settings, Outbox[bytes]], EngineLike],
        settings: Settings,
        outbox: Outbox[bytes],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """name: of the deployment, for messages, and on the process's command line."""
        self._name, self._outbox, self._clock = name, outbox, clock
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._streams: dict[str, int] = {}
        self._request_ids: dict[int, str] = {}
        self._questions: deque[_Question] = deque()
        self._health: Exception | None = None
        self._stats: DataclassInstance | None = None
        self._why_down = ""
        self._process, own = _spawn(name)
        self._link = EngineLink(own)
        try:
            self._link.send(pack(Kind.OPEN, (open_engine, settings)))
            while not self._is_open():
                self._take(self._read_opening())
        except BaseException:
            self._link.close()
            self._process.kill()
            self._process.wait()
            raise
        self._link.attach(self._loop, self._take, self._lost)
        self._loop.call_later(_ASK_EVERY_S, self._ask_again)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """The engine has been started over there."""

    def stop(self) -> None:
        """End the process, after the engine's step in flight; open streams get an EngineDown. Any thread."""
        self._fail_all(f"the {self._name} is stopped")
        self._process.terminate()
        try:
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            logger.warning("the %s engine's process %d doesn't end, and is killed", self._name, self.pid)
            self._process.kill()
            self._process.wait()

    def check_health(self) -> None:
        """Raises what the engine's own check raised a second ago, EngineDown for an engine whose process is gone,
        EngineFault for one that doesn't answer."""
        self._raise_if_down()
        if self._questions:
            silent_s = self._clock() - self._questions[0].asked_at
            if silent_s > _STUCK_AFTER_S:
                raise EngineFault(f"the {self._name} engine's process hasn't answered for {silent_s:.0f} s")
        if self._health is not None:
            raise copy.copy(self._health)

    def stats(self) -> DataclassInstance:
        """As of a second ago, or of the last `refresh`."""
        assert self._stats is not None, "the constructor waits for the first"
        return self._stats

    async def refresh(self) -> None:
        """`stats` and `check_health` then know of everything that was called before this. Raises EngineDown,
        EngineFault when nothing is answered."""
        self._raise_if_down()
        answered: asyncio.Future[None] = self._loop.create_future()
        self._ask(answered)
        try:
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                await answered
        except TimeoutError as error:
            raise EngineFault(f"the {self._name} engine's process doesn't answer") from error

    # ------------------------------------------------------------ what the kinds are made of
    def _begin(self, request_id: str, method: str, *arguments: Any) -> None:
        """Open a stream. What the method raises over there is the first thing that the stream's reader gets."""
        self._raise_if_down()
        if request_id in self._streams:
            raise EngineFault(f"request id {request_id!r} is already running")
        stream = next(self._numbers)
        self._streams[request_id], self._request_ids[stream] = stream, request_id
        self._link.send(pack(Kind.BEGIN, (request_id, method, arguments), stream))

    def _call(self, request_id: str, method: str, *arguments: Any) -> None:
        """For an open stream; errors as with `_begin`."""
        self._raise_if_down()
        stream = self._streams.get(request_id)
        if stream is None:
            raise EngineFault(f"request id {request_id!r} isn't open")
        self._link.send(pack(Kind.CALL, (request_id, method, arguments), stream))

    def _end(self, request_id: str, method: str) -> None:
        """Close a stream: its reader gets nothing more, whatever is on its way. Unknown ids are fine."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            del self._request_ids[stream]
            if not self._why_down:
                self._link.send(pack(Kind.END, (request_id, method, (request_id,)), stream))

    def _raise_if_down(self) -> None:
        if self._why_down:
            raise EngineDown(self._why_down)
        if self._link.num_unsent > _MOST_UNSENT:
            raise EngineDown(
                f"the {self._name} engine's process has left {self._link.num_unsent:,} bytes unread"
            )

    # ------------------------------------------------------------ what comes
    def _is_open(self) -> bool:
        return self._stats is not None

    def _read_opening(self) -> list[Frame]:
        """Raises EngineFault when the process has ended."""
        frames = self._link.read()
        if frames is None:
            code = self._process.wait()
            raise EngineFault(f"the {self._name} engine's process ended with {code} before it was ready")
        return frames

    def _take(self, frames: list[Frame]) -> None:
        for kind, stream, payload in frames:
            if kind is Kind.ITEM:
                self._pass_on(stream, payload)
            elif kind is Kind.ERROR:
                self._pass_on(stream, pickle.loads(payload))
            elif kind is Kind.LOG:
                record = pickle.loads(payload)
                logging.getLogger(record.name).handle(record)
            elif kind is Kind.FAILED:
                raise pickle.loads(payload)
            else:
                self._health, self._stats = pickle.loads(payload)
                if kind is Kind.ANSWER:
                    self._answered()
        self._outbox.flush()

    def _pass_on(self, stream: int, item: bytes | Exception) -> None:
        request_id = self._request_ids.get(stream)
        if request_id is not None:
            self._outbox.put(request_id, item)

    # ------------------------------------------------------------ questions
    def _ask_again(self) -> None:
        if not self._why_down:
            if not self._questions:
                self._ask()
            self._loop.call_later(_ASK_EVERY_S, self._ask_again)

    def _ask(self, answered: asyncio.Future[None] | None = None) -> None:
        self._questions.append(_Question(self._clock(), answered))
        self._link.send(header_of(Kind.ASK, b""))

    def _answered(self) -> None:
        future = self._questions.popleft().answered
        if future is not None and not future.done():
            future.set_result(None)

    # ------------------------------------------------------------ its end
    def _lost(self) -> None:
        """The process has ended, whoever did it."""
        level = logging.INFO if self._why_down else logging.ERROR
        self._fail_all(f"the {self._name} engine's process has ended")
        while self._questions:
            future = self._questions.popleft().answered
            if future is not None and not future.done():
                future.set_exception(EngineDown(self._why_down))
        # It may still be giving back what it held, and the loop has streams to tell.
        threading.Thread(target=self._reap, args=(level,), name="reaper", daemon=True).start()

    def _reap(self, level: int) -> None:
        code = self._process.wait()
        logger.log(level, "the %s engine's process %d ended with %d", self._name, self.pid, code)

    def _fail_all(self, why: str) -> None:
        """Once; a later reason is none."""
        if self._why_down:
            return
        self._why_down = why
        for request_id in list(self._streams):
            self._outbox.put(request_id, EngineDown(why))
        self._outbox.flush()


class TalkerProcess(EngineProcess):
    """A `TalkerEngineLike`."""

    def submit(self, request: SpeechRequest) -> None:
        self._begin(request.request_id, "submit", request)

    def cancel(self, request_id: str) -> None:
        self._end(request_id, "cancel")


class CodecProcess(EngineProcess):
    """A `CodecEngineLike`."""

    def open(self, request_id: str, reference: ReferenceVoice | None = None) -> None:
        self._begin(request_id, "open", request_id, reference)

    def submit(self, request_id: str, frames: FrameBatch) -> None:
        self._call(request_id, "submit", request_id, frames)

    def replay(self, request_id: str, codes: bytes, cuts: Sequence[int] = ()) -> None:
        self._call(request_id, "replay", request_id, codes, cuts)

    def close(self, request_id: str) -> None:
        self._end(request_id, "close")


def _spawn(name: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, with the same environment and modules as this one, and our end of the socket to it."""
    own, its = socket.socketpair()
    with its:
        its.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        process = subprocess.Popen(
            [sys.executable, "-m", "deployments.engine_child", name, str(its.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[its.fileno()],
        )
    return process, own
