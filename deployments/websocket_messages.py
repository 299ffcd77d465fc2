"""What is said on the WebSocket `/v1/audio/speech/stream`: messages of both sides, and how they are read.

    client   session.config   input.text …   input.done   input.cancel   session.close
    server   session.configured   audio.start   <binary>…   audio.done   session.done   error

The names are those that vllm-omni (0.30, `serving_speech_stream.py`) and sglang-omni (0.1.9, `speech_ws.py`)
use, so that their clients work here; `input.cancel` is ours. Types are strict, as in the HTTP bodies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from deployments.http_errors import describe
from deployments.schemas import SpeechBody, as_invalid_request, check_keys, parse_speech_body, shown
from qwen3tts_core.errors import InvalidRequest
from qwen3tts_core.text.splitter import SplitGranularity

MessageType = Literal["session.config", "input.text", "input.done", "input.cancel", "session.close"]
MESSAGE_TYPES: tuple[MessageType, ...] = get_args(MessageType)

MAX_TEXT_MESSAGE_BYTES = 128 << 10
"""Of every message but `session.config`, which may bring a clip."""
LOOK_AHEAD_S = 60.0
"""How much audio may be ahead of a listener before the next sentence is held back."""
_NOT_OF_A_SESSION = ("input", "stream", "stream_format")
_STAND_IN = "Hello."  # of the text that isn't here yet
_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any], config=ConfigDict(strict=True))


GUIDE = f"""
## WebSocket `/v1/audio/speech/stream`

Text in as it is written, audio out as it is made. Messages are JSON objects with a `type`; audio is binary.

Client: `session.config` first, then any number of utterances.

- `session.config`: the fields of `SpeechBody` but for {", ".join(f"`{name}`" for name in _NOT_OF_A_SESSION)}, and
  `stream_audio` (false: one binary message a sentence), `split_granularity` (`sentence`, `clause`, `none`),
  `look_ahead_s` ({LOOK_AHEAD_S:g}: how much audio may be ahead of a listener before the next sentence is held back;
  10 for a client that reads no faster than it plays, or the server's pings reach it too late).
  Again between utterances, for those that follow. One that is refused ends the session.
- `input.text` with `text`: the next part of the utterance, cut anywhere.
- `input.done`: the utterance is whole. `input.cancel`: end it, and drop all that isn't spoken yet.
- `session.close`: close once all is said; it ends an utterance that lacks its `input.done`.

Server:

- `session.configured`: `session_id`, `model`, `voice`, `seed`, `response_format`, `sample_rate`, `stream_audio`,
  `split_granularity`.
- `audio.start` with `sentence_text`, `format`, `sample_rate`, `channels`; binary messages; `audio.done` with `total_bytes`,
  `error`, `finish_reason`, `num_frames`, `audio_seconds`, or `cancelled`: for each sentence, in order. Both name it by `id`,
  `utterance_index`, `sentence_index`.
- `session.done` for each `input.done` and each `input.cancel`: `total_sentences`, `num_frames`, `audio_seconds`, `usage`,
  `error`, `cancelled`.
- `error`: `message`, and `error` as the other routes have it. With `action: discard`, the sentence's audio so far is not all.

Close codes: 1000 after `session.close`, 1001 silence, 1008 a refused or missing config, 1009 a message too large, 1011 our
fault, 1013 no room. API keys are asked for in the handshake (401).
"""


class SessionOptions(BaseModel):
    """What a session has beside the fields of a speech request."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    stream_audio: bool | None = Field(
        None, description="true: audio as it is made; false (default): one binary message for each sentence."
    )
    split_granularity: SplitGranularity | None = Field(
        None, description="Where text is cut: sentence (default), clause, or none: at input.done alone."
    )
    look_ahead_s: Annotated[float, Field(ge=1, le=3600)] | None = Field(
        None,
        description="Seconds of audio that may be ahead of a listener who hears it as it comes; default 60.",
    )


SESSION_FIELDS = tuple(
    name for name in (*SpeechBody.model_fields, *SessionOptions.model_fields) if name not in _NOT_OF_A_SESSION
)


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """body: of every sentence, but for its text. num_bytes: of the message."""

    body: SpeechBody
    stream_audio: bool
    split_granularity: SplitGranularity
    look_ahead_s: float
    num_bytes: int

    def with_body(self, **fields: Any) -> SessionConfig:
        """The same with other fields of the body."""
        return replace(self, body=self.body.model_copy(update=fields))


class MessageTooLarge(InvalidRequest):
    """A message is more bytes than its kind may have."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"the message is {size:,} bytes, the limit is {limit:,}")
        self.args = (size, limit)


@dataclass(frozen=True, slots=True)
class ClientMessage:
    """A message of a known type whose fields nobody has looked at. num_bytes: of all of it."""

    type: MessageType
    fields: Mapping[str, Any]
    num_bytes: int

    @classmethod
    def parse(cls, raw: str | bytes, max_config_bytes: int) -> ClientMessage:
        """Raises InvalidRequest, MessageTooLarge."""
        if isinstance(raw, bytes):
            raise InvalidRequest("a client's messages are text that holds JSON, got a binary one")
        encoded = raw.encode("utf-8", "surrogatepass")
        if len(encoded) > max_config_bytes:
            raise MessageTooLarge(len(encoded), max_config_bytes)
        try:
            fields = _OBJECT.validate_json(encoded)
        except ValidationError as error:
            raise as_invalid_request(error, "the message") from None
        kind = fields.pop("type", None)
        if kind not in MESSAGE_TYPES:
            raise InvalidRequest(f"type must be one of {', '.join(MESSAGE_TYPES)}, got {shown(kind)}", "type")
        if kind != "session.config" and len(encoded) > MAX_TEXT_MESSAGE_BYTES:
            raise MessageTooLarge(len(encoded), MAX_TEXT_MESSAGE_BYTES)
        clip = _flat(fields).get("ref_audio")
        check_keys(encoded, [clip] if isinstance(clip, str) else [])
        return cls(kind, fields, len(encoded))

    def config(self) -> SessionConfig:
        """Of `session.config`. Raises InvalidRequest that names the field."""
        if "session" in self.fields:
            _refuse_unknown(self.fields, ("session",))
            if not isinstance(self.fields["session"], dict):
                raise InvalidRequest(
                    f"session must be an object, got {shown(self.fields['session'])}", "session"
                )
        fields = _flat(self.fields)
        _refuse_unknown(fields, SESSION_FIELDS)
        try:
            options = SessionOptions.model_validate(fields)
        except ValidationError as error:
            raise as_invalid_request(error, ranges=SessionOptions) from None
        body = parse_speech_body(json.dumps({**(options.model_extra or {}), "input": _STAND_IN}).encode())
        is_streaming = bool(options.stream_audio)
        return SessionConfig(
            body.model_copy(update={"stream": is_streaming}),  # a whole file's header has its size
            is_streaming,
            options.split_granularity or "sentence",
            options.look_ahead_s or LOOK_AHEAD_S,
            self.num_bytes,
        )

    def text(self) -> str:
        """Of `input.text`. Raises InvalidRequest."""
        _refuse_unknown(self.fields, ("text",))
        text = self.fields.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"text must be a string, got {shown(text)}", "text")
        return text

    def check_bare(self) -> None:
        """Of the others, which have no field. Raises InvalidRequest."""
        _refuse_unknown(self.fields, ())


def _flat(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config's fields: sglang-omni's clients put them into an object of their own."""
    session = fields.get("session")
    return session if isinstance(session, dict) else fields


def _refuse_unknown(fields: Mapping[str, Any], accepted: Sequence[str]) -> None:
    for name in fields:
        if name not in accepted:
            listed = ", ".join(accepted) or "none beside type"
            raise InvalidRequest(f"unknown field {shown(name)}; accepted: {listed}", name[:60])


def error_message(error: BaseException, **where: Any) -> dict[str, Any]:
    """`error`, as the HTTP routes tell it; its words are also where vllm-omni's clients look for them."""
    told = describe(error).error
    return {"type": "error", "message": told["message"], "error": told, **where}
