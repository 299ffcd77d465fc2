"""Clients below HTTP's manners: they send what they like, read as slowly as they like, and leave when they like."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

_RESET = struct.pack(
    "ii", 1, 0
)  # SO_LINGER on, zero seconds: close() sends RST, as a crashed client's kernel does


def request_bytes(url: str, path: str, content: Mapping[str, Any]) -> bytes:
    """A POST of JSON. url: the app's, with a slash at its end."""
    parts = urlsplit(url)
    encoded = json.dumps(content).encode()
    head = (
        f"POST {parts.path}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded


class RawClient:
    """One TCP connection. receive_buffer: bytes that the kernel takes for a reader that doesn't read; 0: its default."""

    def __init__(self, url: str, receive_buffer: int = 0) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = parts.hostname, parts.port
        self._socket = socket.socket()
        self._socket.setblocking(False)
        if receive_buffer:  # before the connection: it bounds the window that is offered
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)

    async def __aenter__(self) -> RawClient:
        await asyncio.get_running_loop().sock_connect(self._socket, self._address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()

    async def send(self, content: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, content)

    async def receive(self, num_bytes: int = 1 << 16) -> bytes:
        """Some bytes, at most so many; empty when the server has closed. Raises ConnectionResetError when it broke."""
        return await asyncio.get_running_loop().sock_recv(self._socket, num_bytes)

    def reset(self) -> None:
        """Leave without a goodbye."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._socket.close()
