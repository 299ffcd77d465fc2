"""`/v1/audio/voices`: named voices made of uploaded clips, beside the checkpoints' own.

A voice is encoded once, at its upload, in context, so that both modes are ready; which weights did
it is noted, and other weights encode it again when it is used (`clone.py`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from deployments.bodies import BodyReader, check_charset, content_type_of
from deployments.clone import ClipEncoder
from deployments.forms import FormPart, read_form
from qwen3tts_core.audio.voice_store import VoiceRecord, VoiceStore
from qwen3tts_core.errors import InvalidRequest
from qwen3tts_core.text.prompt import has_words

_CLIP_FIELDS = ("audio_sample", "file")
_TEXT_FIELDS = ("name", "ref_text")
_ACCEPTED = "audio_sample (or file), name, ref_text"
_OVERHEAD_BYTES = 1 << 18  # of a form around its clip


UPLOAD_OPENAPI: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["audio_sample", "name"],
                    "properties": {
                        "audio_sample": {
                            "type": "string",
                            "format": "binary",
                            "description": "An audio file; or under the name `file`.",
                        },
                        "name": {"type": "string", "description": "What requests will call the voice."},
                        "ref_text": {"type": "string", "description": "What is said in the clip."},
                    },
                }
            }
        },
    }
}
"""The form is read by hand, bounded; the docs still show it."""


class VoiceForm(NamedTuple):
    """What was uploaded. clip: an audio file. transcript: what is said in it."""

    name: str
    clip: bytes
    transcript: str | None


@dataclass(frozen=True, slots=True)
class NamedVoices:
    """Uploads and deletions. encoder: of the first Base model. max_clip_bytes: of an uploaded file."""

    store: VoiceStore
    encoder: ClipEncoder
    max_clip_bytes: int

    async def upload(self, request: Request, bodies: BodyReader) -> VoiceRecord:
        """Encode the clip and give it a name, or give the name another clip.

        Raises InvalidRequest, InvalidReferenceAudio, VoiceNameTaken, HTTPException 413 or 415.
        """
        if (content_type := content_type_of(request)) != "multipart/form-data":
            raise HTTPException(
                415, f"content-type must be multipart/form-data, got {content_type[:60] or 'none'}"
            )
        check_charset(request)
        async with bodies.hold(request, self.max_clip_bytes + _OVERHEAD_BYTES) as parts:
            form = _check_form(await read_form(request.headers["content-type"], parts))
            self.store.check_name(form.name)
            if len(form.clip) > self.max_clip_bytes:
                raise HTTPException(
                    413, f"the clip is {len(form.clip):,} bytes, the limit is {self.max_clip_bytes:,}"
                )
            clip, encoded = await self.encoder.encode_upload(form.clip)
        return await asyncio.to_thread(
            self.store.put,
            form.name,
            clip,
            encoded.voice,
            encoded.num_groups,
            encoded.encoder,
            form.transcript,
        )

    async def records(self) -> list[VoiceRecord]:
        return await asyncio.to_thread(self.store.records)

    async def delete(self, name: str) -> None:
        """Raises UnknownVoice, or InvalidRequest for a built-in or impossible name."""
        await asyncio.to_thread(self.store.delete, name)


def _check_form(parts: list[FormPart]) -> VoiceForm:
    """Raises InvalidRequest naming the field at fault."""
    fields: dict[str, FormPart] = {}
    for part in parts:
        if part.name not in _CLIP_FIELDS + _TEXT_FIELDS:
            name = part.name[:60]
            raise InvalidRequest(f"unknown field {name!r}; accepted: {_ACCEPTED}", name)
        if part.name in fields:
            raise InvalidRequest(f"{part.name} was sent twice", part.name)
        if part.is_file != (part.name in _CLIP_FIELDS):
            expected, got = ("text", "a file") if part.is_file else ("a file", "text")
            raise InvalidRequest(f"{part.name} must be {expected}, got {got}", part.name)
        fields[part.name] = part
    clips = [fields[name] for name in _CLIP_FIELDS if name in fields]
    if len(clips) != 1:
        got = "both names" if clips else "none"
        raise InvalidRequest(f"the clip is one file, audio_sample (or file), got {got}", "audio_sample")
    name, transcript = (fields[key].text().strip() if key in fields else "" for key in _TEXT_FIELDS)
    if not name:
        raise InvalidRequest("name is required: what requests will call the voice", "name")
    if transcript and not has_words(transcript):
        raise InvalidRequest("ref_text must hold text, got only invisible characters", "ref_text")
    return VoiceForm(name, bytes(clips[0].data), transcript or None)
