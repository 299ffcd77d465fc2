"""How a replica and the process of its engine speak: frames over one socket, in order.

    replica ── OPEN; then BEGIN, CALL and END of streams, ASK ──> engine's process
            <── READY or FAILED; then ITEM and ERROR of streams, ANSWER ──    LOG at any time

A stream goes by a number: its id may come again, the number never does. What is no item is pickled; both
ends are this project's, and nobody else holds the socket.
"""

from __future__ import annotations

import pickle
import socket
import struct
from enum import IntEnum
from typing import Any, NamedTuple

from qwen3tts_core.errors import EngineFault

_HEADER = struct.Struct("<BQI")  # kind, stream, bytes of the payload


class Kind(IntEnum):
    OPEN = 0  # (opener, settings)
    READY = 1  # as ANSWER
    FAILED = 2  # why it can't be opened
    BEGIN = 3  # (request id, method, arguments)
    CALL = 4  # the same
    END = 5  # the same
    ITEM = 6  # the item itself
    ERROR = 7  # what the reader gets in an item's place
    ASK = 8  # nothing
    ANSWER = 9  # (what `check_health` raised, or None; what `stats` returned)
    LOG = 10  # a record


class Frame(NamedTuple):
    kind: Kind
    stream: int
    payload: bytes


def header_of(kind: Kind, payload: bytes, stream: int = 0) -> bytes:
    return _HEADER.pack(kind, stream, len(payload))


def pack(kind: Kind, content: Any = None, stream: int = 0) -> bytes:
    """A frame of anything that can be pickled."""
    payload = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return header_of(kind, payload, stream) + payload


def pack_error(kind: Kind, error: BaseException, stream: int = 0) -> bytes:
    """One that can't be pickled crosses as an EngineFault of its words."""
    try:
        frame = pack(kind, error, stream)
        pickle.loads(frame[_HEADER.size :])
    except Exception:  # noqa: BLE001 - whatever its class does when it is copied, its words must arrive
        return pack(kind, EngineFault(f"{type(error).__name__}: {error}"), stream)
    return frame


class FrameReader:
    """Frames as they come out of a socket, however they were cut."""

    def __init__(self, own: socket.socket, num_bytes: int = 1 << 20) -> None:
        """num_bytes: read at once, at most; more where a frame is larger."""
        self._socket = own
        self._buffer = bytearray(num_bytes)
        self._num_bytes = 0  # of a frame that isn't whole yet

    def read(self) -> list[Frame] | None:
        """What is whole after one read; None at the socket's end. Raises BlockingIOError where there is nothing."""
        if self._num_bytes == len(self._buffer):
            self._buffer.extend(bytes(len(self._buffer)))
        with memoryview(self._buffer) as view:
            try:
                num_read = self._socket.recv_into(view[self._num_bytes :])
            except ConnectionError:
                num_read = 0
            if not num_read:
                return None
            frames, at, end = [], 0, self._num_bytes + num_read
            while (begins := at + _HEADER.size) <= end:
                kind, stream, num_bytes = _HEADER.unpack_from(view, at)
                if begins + num_bytes > end:
                    break
                frames.append(Frame(Kind(kind), stream, bytes(view[begins : begins + num_bytes])))
                at = begins + num_bytes
            self._num_bytes = end - at
            view[: self._num_bytes] = view[at:end]
        return frames
