"""How a replica and the process of its engine speak: frames over one socket, in order.

    replica ── OPEN; then BEGIN, CALL and END of streams, ASK ──> engine's process
            <── READY or FAILED; then ITEM and ERROR of streams, ANSWER ──    LOG at any time

A stream goes by a number: its id may come again, the number never does. What is no item is pickled; both
ends are this project's, and nobody else holds the socket.
"""

from __future__ import annotations

import pickle
import struct
from enum import IntEnum
from typing import Any, NamedTuple

from qwen3tts_core.errors import EngineFault

_HEADER = struct.Struct("<BQI")  # kind, stream, bytes of the payload
READ_BYTES = 1 << 18


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
    """Frames of what was read, however it was cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Those that are whole by now."""
        self._buffer += data
        frames, at = [], 0
        with memoryview(self._buffer) as view:
            while (begins := at + _HEADER.size) <= len(view):
                kind, stream, num_bytes = _HEADER.unpack_from(view, at)
                if (ends := begins + num_bytes) > len(view):
                    break
                frames.append(Frame(Kind(kind), stream, bytes(view[begins:ends])))
                at = ends
        del self._buffer[:at]
        return frames
