"""multipart/form-data, as far as an upload needs it: few parts, all in memory, which the reader of the body bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from qwen3tts_core.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MAX_PARTS = 16


@dataclass(slots=True)
class FormPart:
    """One field. is_file: it came with a file's name, which is not looked at any further."""

    name: str
    is_file: bool
    data: bytearray = field(default_factory=bytearray)

    def text(self) -> str:
        """Raises InvalidRequest for what isn't UTF-8."""
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{self.name} must be UTF-8: {error.reason}", self.name) from None


class _Collector:
    """The parser's callbacks."""

    def __init__(self) -> None:
        self.parts: list[FormPart] = []
        self.is_whole = False
        self._name, self._value = bytearray(), bytearray()
        self._disposition = b""

    def on_part_begin(self) -> None:
        if len(self.parts) == _MAX_PARTS:
            raise FormParserError(f"it has more than {_MAX_PARTS} parts")
        self._disposition = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._name, self._value = bytearray(), bytearray()

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise FormParserError("a part has no name")
        name = options[b"name"].decode("utf-8", "replace")
        self.parts.append(FormPart(name, b"filename" in options))

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].data += data[start:end]

    def on_end(self) -> None:
        self.is_whole = True


async def read_form(content_type: str, body: AsyncIterator[bytes]) -> list[FormPart]:
    """The parts in their order. Raises InvalidRequest for a body that is no whole form."""
    _, options = parse_options_header(content_type)
    collector = _Collector()
    callbacks: MultipartCallbacks = {
        "on_part_begin": collector.on_part_begin,
        "on_header_field": collector.on_header_field,
        "on_header_value": collector.on_header_value,
        "on_header_end": collector.on_header_end,
        "on_headers_finished": collector.on_headers_finished,
        "on_part_data": collector.on_part_data,
        "on_end": collector.on_end,
    }
    try:
        if b"boundary" not in options:
            raise FormParserError("its content-type names no boundary")
        parser = MultipartParser(options[b"boundary"], callbacks)
        async for data in body:
            parser.write(data)
        parser.finalize()
        if not collector.is_whole:
            raise FormParserError("it ends before its closing boundary")
    except FormParserError as error:
        raise InvalidRequest(f"the form can't be read: {error}") from error
    return collector.parts
