"""A replica's end of the socket to its engine's process. Before `attach` its calls wait; from then on an event loop has
it, and nothing waits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from deployments.engine_wire import Frame, FrameReader

_MOST_READS = 16
"""In one turn of the loop, should more come all the time: megabytes, and a socket holds less than one."""


class EngineLink:
    def __init__(self, own: socket.socket) -> None:
        self._socket = own
        self._reader = FrameReader(own)
        self._unsent = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None

    def read(self) -> list[Frame] | None:
        """Wait for what comes next; None when the other end is gone."""
        return self._reader.read()

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[list[Frame]], None],
        lost: Callable[[], None],
    ) -> None:
        """take: called with what there is to read. lost: called once, when the other end is gone or can't be understood;
        the link is closed then."""
        self._loop, self._take, self._lost = loop, take, lost
        self._socket.setblocking(False)
        loop.add_reader(self._socket, self._on_readable)

    def send(self, frame: bytes) -> None:
        """Now, or when there is room."""
        if self._loop is None:
            self._socket.sendall(frame)
            return
        if not self._unsent:
            frame = frame[self._send_now(frame) :]
            if not frame:
                return
            self._loop.add_writer(self._socket, self._on_writable)
        self._unsent += frame

    @property
    def num_unsent(self) -> int:
        """Bytes that the other end has left no room for."""
        return len(self._unsent)

    @property
    def is_closed(self) -> bool:
        return self._socket.fileno() < 0

    def close(self) -> None:
        if self._loop is not None and not self.is_closed:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket.close()

    def _on_readable(self) -> None:
        """All there is, so that one turn of the loop has a whole step's items."""
        is_over = True
        try:
            frames, is_gone = self._read_all()
            self._take(frames)
            is_over = is_gone
        finally:
            if is_over:
                self.close()
                self._lost()

    def _read_all(self) -> tuple[list[Frame], bool]:
        """With whether the other end is gone."""
        frames: list[Frame] = []
        for _ in range(_MOST_READS):
            try:
                more = self._reader.read()
            except BlockingIOError:
                break
            if more is None:
                return frames, True
            frames += more
        return frames, False

    def _send_now(self, data: bytes | bytearray) -> int:
        """Bytes that are out of our hands."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # nobody is there, and reading will tell
            return len(data)

    def _on_writable(self) -> None:
        assert self._loop is not None, "only a loop calls this"
        del self._unsent[: self._send_now(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._socket)
