"""The process of one engine: `python -m deployments.engine_child Talker FD`, FD a socket to its replica.

    main thread       opens the engine, then waits for SIGTERM, which ends it in order
    "replica" thread  reads the socket and calls the engine; the end of the socket is the end of this process
    engine's thread   writes what it made to the socket, as it flushes its outbox
    "backlog" thread  writes what the socket had no room for, so that no step waits for the replica's event loop

Knows nothing of Ray: all that is Serve's stays in the replica (`engine_process.py`).
"""

from __future__ import annotations

import ctypes
import logging
import logging.handlers
import os
import pickle
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from deployments.engine_wire import Frame, FrameReader, Kind, header_of, pack, pack_error
from deployments.engines import EngineLike

logger = logging.getLogger("deployments.engine_child")

_MOST_BACKLOG = 256 << 20
"""Bytes, some minutes of audio for each of 64 streams. Beyond it the engine waits, and is taken for stuck some day."""
_MOST_PARTS = 1024  # of one sendmsg: IOV_MAX
_PR_SET_PDEATHSIG = 1


class ReplicaLink:
    """This end of the socket. Any thread may send; what one sends together stays together."""

    def __init__(self, own: socket.socket) -> None:
        self._socket = own
        self._backlog: deque[memoryview] = deque()
        self._num_waiting = 0  # bytes
        self._changed = threading.Condition()
        threading.Thread(target=self._send_backlog, name="backlog", daemon=True).start()

    def frames(self) -> Iterator[Frame]:
        """Until the replica is gone."""
        reader = FrameReader(self._socket)
        while (frames := reader.read()) is not None:
            yield from frames

    def send(self, parts: Sequence[bytes]) -> None:
        """As much as there is room for now, the rest soon."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_waiting < _MOST_BACKLOG)
            rest = self._send_now(parts) if not self._backlog else memoryview(b"".join(parts))
            if rest:
                self._backlog.append(rest)
                self._num_waiting += len(rest)
                self._changed.notify_all()

    def drain(self) -> None:
        """Wait until everything is sent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._backlog)

    def _send_now(self, parts: Sequence[bytes]) -> memoryview:
        """Returns the rest."""
        if len(parts) > _MOST_PARTS:
            parts = [b"".join(parts)]
        try:
            num_sent = self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            num_sent = 0
        except OSError:  # the replica is gone, and the thread that reads ends this process
            return memoryview(b"")
        if num_sent == sum(map(len, parts)):
            return memoryview(b"")
        return memoryview(b"".join(parts))[num_sent:]

    def _send_backlog(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog)
                first = self._backlog[0]
            try:
                self._socket.sendall(first)
            except OSError:
                return  # as above
            with self._changed:
                self._backlog.popleft()
                self._num_waiting -= len(first)
                self._changed.notify_all()


class LinkOutbox:
    """The engine's outbox: items of open streams, by their numbers, onto the link. Any thread."""

    def __init__(self, link: ReplicaLink) -> None:
        self._link = link
        self._streams: dict[str, int] = {}
        self._pending: list[bytes] = []
        self._lock = threading.Lock()

    def begin(self, request_id: str, stream: int) -> None:
        self._streams[request_id] = stream

    def is_open(self, request_id: str, stream: int) -> bool:
        return self._streams.get(request_id) == stream

    def end(self, request_id: str) -> None:
        """Nothing of it crosses any more."""
        self._streams.pop(request_id, None)

    def put(self, request_id: str, item: bytes | Exception) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if isinstance(item, Exception):
            parts = [pack_error(Kind.ERROR, item, stream)]
        else:
            parts = [header_of(Kind.ITEM, item, stream), item]
        with self._lock:
            self._pending += parts

    def flush(self) -> None:
        with self._lock:  # held while it is sent: no later flush may overtake
            parts, self._pending = self._pending, []
            if parts:
                self._link.send(parts)


class Caller:
    """What the replica asks for, done to the engine in the order in which it was asked. One thread."""

    def __init__(self, link: ReplicaLink, outbox: LinkOutbox) -> None:
        self._link, self._outbox = link, outbox
        self.engine: EngineLike | None = None

    def take(self, frame: Frame) -> None:
        assert self.engine is not None, "nothing is asked for before READY"
        if frame.kind is Kind.ASK:
            self._link.send([pack(Kind.ANSWER, state_of(self.engine))])
            return
        request_id, method, arguments = pickle.loads(frame.payload)
        if frame.kind is Kind.BEGIN:
            self._outbox.begin(request_id, frame.stream)
        elif not self._outbox.is_open(request_id, frame.stream):
            return  # it was refused
        if frame.kind is Kind.END:
            self._outbox.end(request_id)
        try:
            getattr(self.engine, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, the stream's reader gets it
            self._outbox.put(request_id, error)
            self._outbox.flush()
            if frame.kind is Kind.BEGIN:
                self._outbox.end(request_id)  # nothing is held for it, and what else comes is in vain


def state_of(engine: EngineLike) -> tuple[Exception | None, Any]:
    """The content of an answer."""
    try:
        engine.check_health()
    except Exception as error:  # noqa: BLE001 - the replica's own check raises it
        return error, engine.stats()
    return None, engine.stats()


class LogToReplica(logging.handlers.QueueHandler):
    """Records to the replica, which writes them as it writes its own."""

    def __init__(self, link: ReplicaLink) -> None:
        super().__init__(SimpleQueue())  # which `enqueue` alone would use
        self._link = link

    def enqueue(self, record: logging.LogRecord) -> None:
        self._link.send([pack(Kind.LOG, record)])


def main() -> None:
    own = socket.socket(fileno=int(sys.argv[2]))
    own.set_inheritable(False)  # compilers that the engine starts must not keep it open
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the replica, which ends this process
    end_with_the_replica()
    link = ReplicaLink(own)
    frames = link.frames()
    opening = next(frames, None)
    if opening is None:
        return
    send_logs_to(link)
    outbox = LinkOutbox(link)
    caller = Caller(link, outbox)
    threading.Thread(target=serve, args=(frames, caller), name="replica", daemon=True).start()
    try:
        open_engine, settings = pickle.loads(opening.payload)
        engine: EngineLike = open_engine(settings, outbox)
        engine.start()
    except BaseException as error:
        logger.exception("the engine can't be opened")
        link.send([pack_error(Kind.FAILED, error)])
        link.drain()
        os._exit(1)
    caller.engine = engine
    ended = on_sigterm()
    link.send([pack(Kind.READY, state_of(engine))])
    ended.recv(1)
    engine.stop()  # after its step in flight: others may share the GPU through one server
    os._exit(0)


def serve(frames: Iterator[Frame], caller: Caller) -> None:
    """End the process when the replica is gone, at once: its successor needs the memory."""
    try:
        for frame in frames:
            caller.take(frame)
    except BaseException:
        logger.exception("the engine's process can't go on")
    os._exit(0)


def on_sigterm() -> socket.socket:
    """Has something to read once that has come. Waiting for a lock would miss a signal that is a moment early."""
    told, tells = socket.socketpair()
    tells.setblocking(False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(tells.detach())
    return told


def end_with_the_replica() -> None:
    """Also while a thread holds the interpreter for good, so that nobody sees the socket end. The kernel means the
    thread over there that started this process: its event loop's, which lasts as long as it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def send_logs_to(link: ReplicaLink) -> None:
    for name in ("deployments", "qwen3tts_core"):
        package = logging.getLogger(name)
        package.addHandler(LogToReplica(link))
        package.setLevel(logging.INFO)


if __name__ == "__main__":
    main()
