"""How each server wants a streamed speech request, and how its body becomes PCM16.

Source: `POST /v1/audio/speech` of vllm-omni 0.30.0 (entrypoints/openai/protocol/audio.py), sglang-omni
0.1.9 (serve/protocol.py) and mstar's `tts_speech_bench` (its pull request 184 and the one after it).
Knows no sockets and no clocks.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

WAV_HEADER_BYTES = 44
SAMPLE_RATE_HZ = 24_000
BYTES_PER_SAMPLE = 2
BYTES_PER_FRAME = 1_920 * BYTES_PER_SAMPLE
"""80 ms of the 12 Hz codec."""


class BrokenStream(Exception):
    """The body ended, or went on, as the protocol does not allow."""


@dataclass(frozen=True, slots=True)
class Clip:
    """A voice to clone: base64 of an audio file, and what is said in it."""

    name: str
    audio_base64: str
    text: str

    @property
    def data_uri(self) -> str:
        return f"data:audio/wav;base64,{self.audio_base64}"


@dataclass(frozen=True, slots=True)
class SpeechJob:
    """One request, whoever serves it. max_frames: its limit, 80 ms each; None is the server's default."""

    number: int
    text: str
    seed: int | None = None
    max_frames: int | None = None
    voice: str | None = None
    clip: Clip | None = None


class BodyReader(Protocol):
    """Bytes of the body in, PCM16 out. num_frames: as the server told it, if it does."""

    num_frames: int | None

    def feed(self, data: bytes) -> bytes: ...

    def finish(self) -> None:
        """Call at the body's clean end. Raises BrokenStream."""


class RawReader:
    """PCM16 as it is, behind `skip` bytes of a header."""

    def __init__(self, skip: int = 0) -> None:
        self._skip = skip
        self.num_frames: int | None = None

    def feed(self, data: bytes) -> bytes:
        if self._skip:
            dropped = min(self._skip, len(data))
            self._skip -= dropped
            return data[dropped:]
        return data

    def finish(self) -> None:
        if self._skip:
            raise BrokenStream("the body ended inside its header")


class EventReader:
    """OpenAI's server-sent events: `speech.audio.delta`, then `.done` or `.error`."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_done = False
        self.num_frames: int | None = None

    def feed(self, data: bytes) -> bytes:
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(self._audio_of(block) for block in blocks)

    def _audio_of(self, block: bytes) -> bytes:
        data = b"\n".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
        try:
            event = json.loads(data)
            kind = event["type"]
            if kind == "speech.audio.delta":
                return base64.b64decode(event["audio"], validate=True)
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise BrokenStream(f"not an event: {block[:80]!r}") from error
        if kind == "speech.audio.error":
            raise BrokenStream(f"speech.audio.error: {json.dumps(event.get('error'))[:300]}")
        if kind == "speech.audio.done":
            self._is_done, self.num_frames = True, event.get("num_frames")
        return b""

    def finish(self) -> None:
        if not self._is_done:
            raise BrokenStream("the events ended without speech.audio.done")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One server's dialect.

    fields: always sent. frame_limit: the name of its frame limit, or None where a request can't set one.
    event_fields: what asks for events instead of raw audio; None where there are none.
    """

    name: str
    fields: Mapping[str, Any]
    header_bytes: int = 0
    frame_limit: str | None = "max_new_tokens"
    event_fields: Mapping[str, Any] | None = None
    clone_fields: Mapping[str, Any] = field(default_factory=dict)
    uploads_voices: bool = False

    def body(
        self, job: SpeechJob, model: str | None, extra: Mapping[str, Any], events: bool = False
    ) -> bytes:
        """The JSON of one streamed request. extra: goes over everything else; a None in it takes a field out.

        Raises ValueError when the job asks for what this server does not have.
        """
        body: dict[str, Any] = {"input": job.text, **self.fields}
        if events:
            if self.event_fields is None:
                raise ValueError(f"{self.name} is asked for raw audio alone")
            body.update(self.event_fields)
        if job.max_frames is not None:
            if self.frame_limit is None:
                raise ValueError(f"{self.name} takes no frame limit of a request: leave --frames out")
            body[self.frame_limit] = job.max_frames
        if job.clip is not None:
            body.update(self.clone_fields, ref_audio=job.clip.data_uri, ref_text=job.clip.text)
        body.update(_known(model=model, voice=job.voice, seed=job.seed))
        body.update(extra)
        return json.dumps({name: value for name, value in body.items() if value is not None}).encode()

    def reader(self, events: bool = False) -> BodyReader:
        return EventReader() if events else RawReader(self.header_bytes)


def _known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


_RAW = {"stream": True, "response_format": "pcm", "stream_format": "audio"}

ADAPTERS = {
    adapter.name: adapter
    for adapter in (
        Adapter("ours", _RAW, event_fields={"stream_format": "sse"}, uploads_voices=True),
        Adapter("vllm-omni", _RAW, clone_fields={"task_type": "Base"}),
        Adapter("sglang-omni", {"stream": True, "response_format": "pcm"}),
        Adapter(
            "mstar",
            {"stream": True, "response_format": "wav"},
            header_bytes=WAV_HEADER_BYTES,
            frame_limit=None,
        ),
    )
}
