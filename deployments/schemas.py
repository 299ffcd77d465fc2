"""HTTP bodies: what a client may send, in strict JSON types, and how a refusal is worded.

`null` is the same as leaving the field out. Nothing is coerced: "false" is no boolean, true is no
number. Which names and sizes the loaded checkpoint accepts is decided later, in `frontend.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qwen3tts_core.audio.encoding import MAX_SPEED, MIN_SPEED, AudioFormat, SampleRate
from qwen3tts_core.errors import InvalidRequest

_INT64 = 2**63
_MAX_TEXT_CHARS = (
    1 << 18
)  # more than any model takes; the body's own limit is far above, for the sake of clips
_MAX_TRANSCRIPT_CHARS = 4_096  # as of an uploaded voice
_LONG_VALUE = 1 << 16  # characters

TaskType = Literal["CustomVoice", "VoiceDesign", "Base"]

Temperature = Annotated[float, Field(ge=0, le=10)]
TopK = Annotated[int, Field(ge=0, le=1_000_000)]
TopP = Annotated[float, Field(gt=0, le=1)]
# "" is refused where the accepted names are known, so that they can be told.
Name = Annotated[str, Field(max_length=256, json_schema_extra={"minLength": 1})]
Text = Annotated[str, Field(max_length=_MAX_TEXT_CHARS)]


class SpeechBody(BaseModel):
    """Body of `POST /v1/audio/speech`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    model: Name | None = Field(None, description="A name of /v1/models; absent means the served one.")
    input: Text = Field(description="The text to speak.")
    voice: Name | None = Field(None, description="A name of /v1/audio/voices; absent means its default.")
    speaker: Name | None = Field(None, description="An alias of `voice`.")
    instructions: Text | None = Field(
        None,
        description="How to speak, or (VoiceDesign) a description of the voice; where the checkpoint takes it.",
    )
    task_type: TaskType | None = Field(None, description="What the model must be; absent means what it is.")
    ref_audio: str | None = Field(
        None, description="Base: a clip of the voice; an https URL, a data: URI, or base64."
    )
    ref_text: Annotated[str, Field(max_length=_MAX_TRANSCRIPT_CHARS)] | None = Field(
        None, description="Base: what is said in the clip; required unless x_vector_only_mode is true."
    )
    x_vector_only_mode: bool | None = Field(
        None, description="Base: true takes the voice from the clip, and not its manner."
    )
    language: Name | None = Field(None, description="A language of /v1/audio/voices; absent means Auto.")
    response_format: AudioFormat | None = Field(
        None, description="wav (default); pcm: mono PCM16 LE; mp3; opus, in Ogg; aac, in ADTS; flac."
    )
    sample_rate: SampleRate | None = Field(
        None, description="Of the audio sent, Hz; absent: the model's own."
    )
    speed: Annotated[float, Field(ge=MIN_SPEED, le=MAX_SPEED)] | None = Field(
        None, description="How many times as fast, the pitch kept; default 1."
    )
    stream: bool | None = Field(None, description="Send audio as it is made; default false.")
    stream_format: Literal["audio", "sse"] | None = Field(
        None, description="audio (default): the bytes themselves; sse: server-sent events, streamed."
    )
    seed: Annotated[int, Field(ge=-_INT64, le=_INT64 - 1)] | None = Field(
        None, description="Same seed, same request: same codes. Absent: random, see X-Seed."
    )
    do_sample: bool | None = Field(None, description="false: the likeliest code of group 0, always.")
    temperature: Temperature | None = Field(None, description="Of group 0; 0 is the same as do_sample false.")
    top_k: TopK | None = Field(None, description="0 is off.")
    top_p: TopP | None = Field(None, description="1 is off.")
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(None, description="1 is off.")
    subtalker_dosample: bool | None = Field(None, description="As do_sample, for the other code groups.")
    subtalker_temperature: Temperature | None = Field(None, description="As temperature, for those.")
    subtalker_top_k: TopK | None = Field(None, description="As top_k, for those.")
    subtalker_top_p: TopP | None = Field(None, description="As top_p, for those.")
    max_new_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The most frames (80 ms each) returned; absent: a limit that grows with the text."
    )
    non_streaming_mode: bool | None = Field(
        None, description="true: the whole text is in the prompt; false: it follows frame by frame."
    )

    @property
    def voice_name(self) -> str | None:
        """By either of its fields."""
        return self.speaker if self.voice is None else self.voice

    @property
    def audio_format(self) -> AudioFormat:
        return self.response_format or "wav"

    @property
    def is_streaming(self) -> bool:
        return bool(self.stream) or self.stream_format == "sse"


def parse_speech_body(raw: bytes) -> SpeechBody:
    """Raises InvalidRequest that names the field and what it accepts."""
    try:
        body = SpeechBody.model_validate_json(raw)
    except ValidationError as error:
        raise as_invalid_request(error) from None
    check_keys(raw, [body.ref_audio or ""])
    if body.voice is not None and body.speaker is not None and body.voice != body.speaker:
        raise InvalidRequest(
            f"voice and speaker mean the same and differ: {shown(body.voice)}, {shown(body.speaker)}",
            "speaker",
        )
    if body.stream is False and body.stream_format == "sse":
        raise InvalidRequest("stream_format sse needs stream true, got false", "stream_format")
    return body


def accepted_fields() -> tuple[str, ...]:
    return tuple(SpeechBody.model_fields)


def check_keys(raw: bytes, clips: Iterable[str]) -> None:
    """Refuse an object that has a key twice: parsers differ in which one counts. raw: valid JSON.

    clips: values in it that may be megabytes; they are left out, since Python's parser is slow.
    """
    for clip in clips:
        if len(clip) > _LONG_VALUE:
            head, _, tail = raw.partition(clip.encode())
            raw = head + tail
    # Numbers as they are: none of them counts here, and Python refuses to read the longest.
    json.loads(raw, object_pairs_hook=_refuse_twins, parse_int=str, parse_float=str)


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidRequest(f"{shown(key)} is there twice", _cut_short(key))
        found[key] = value
    return found


_NOUNS = {
    "dict_type": "an object",
    "list_type": "a list",
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
}
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def as_invalid_request(
    error: ValidationError, whole: str = "the body", ranges: type[BaseModel] = SpeechBody
) -> InvalidRequest:
    """The first of its complaints, in words of ours. whole: what it is about when it is about no field;
    ranges: whose fields' bounds are told."""
    first = error.errors(include_url=False)[0]
    kind, context = first["type"], first.get("ctx", {})
    if not first["loc"]:
        if kind == "json_invalid":
            return InvalidRequest(f"{whole} is not valid JSON: {context['error']}")
        return InvalidRequest(f"{whole} must be a JSON object, got {shown(first['input'])}")
    field = str(first["loc"][0])
    got = shown(first["input"])
    if kind == "extra_forbidden":
        known = ", ".join(accepted_fields())
        return InvalidRequest(f"unknown field {shown(field)}; accepted: {known}", _cut_short(field))
    if kind == "missing":
        return InvalidRequest(f"{field} is required", field)
    if kind == "literal_error":
        expected = context["expected"].replace("'", '"')
        return InvalidRequest(f"{field} must be {expected}, got {got}", field)
    if kind in _NOUNS:
        return InvalidRequest(f"{field} must be {_NOUNS[kind]}, got {got}", field)
    if kind in _BOUNDS and (accepted := _ranges(ranges).get(field)):
        return InvalidRequest(f"{field} must be {accepted}, got {got}", field)
    return InvalidRequest(f"{field}: {first['msg']}, got {got}", field)


@cache
def _ranges(model: type[BaseModel]) -> dict[str, str]:
    """Of each field that is a number: what it may be, in words."""
    found = {}
    for field, described in model.model_json_schema()["properties"].items():
        for spec in described.get("anyOf", [described]):
            bounds = [
                f"{word} {_plain(spec[key])}"
                for key, word in (
                    ("minimum", "at least"),
                    ("exclusiveMinimum", "above"),
                    ("maximum", "at most"),
                    ("exclusiveMaximum", "below"),
                )
                if key in spec
            ]
            if bounds:
                found[field] = " and ".join(bounds)
    return found


def _plain(bound: float) -> str:
    return str(int(bound) if bound == int(bound) else bound)


def shown(value: Any) -> str:
    """A value in a message: as JSON, which is what the client sent, and not all of it if it is long."""
    is_text = isinstance(value, str)
    return _cut_short(json.dumps(value[:60] if is_text else value, ensure_ascii=False, default=repr))


def _cut_short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
