"""`/v1/audio/voices`: named voices made of uploaded clips, beside the checkpoints' own.

A voice is encoded once, at its upload, in context, so that both modes are ready; which weights did
it is noted, and other weights encode it again when it is used (`clone.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from deployments.bodies import BodyReader, content_type_of
from deployments.clone import ClipEncoder
from qwen3tts_core.audio.voice_store import VoiceRecord, VoiceStore
from qwen3tts_core.errors import InvalidRequest

_CLIP_FIELDS = ("audio_sample", "file")
_TEXT_FIELDS = ("name", "ref_text")
_ACCEPTED = "audio_sample (or file), name, ref_text"
_MAX_TEXT_BYTES = 1 << 16  # of a text field
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
                415, f"content-type must be multipart/form-data, got {content_type or 'none'}"
            )
        async with bodies.hold(request, self.max_clip_bytes + _OVERHEAD_BYTES) as parts:
            form = await _read_form(request, parts)
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


async def _read_form(request: Request, parts: AsyncGenerator[bytes, None]) -> VoiceForm:
    """Raises InvalidRequest naming the field at fault."""
    parser = MultiPartParser(
        request.headers, parts, max_files=2, max_fields=len(_TEXT_FIELDS) + 2, max_part_size=_MAX_TEXT_BYTES
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the form can't be read: {error.message}") from error
    try:
        return await _check_form(form)
    finally:
        await form.close()


async def _check_form(form: FormData) -> VoiceForm:
    fields: dict[str, str | UploadFile] = {}
    for field, value in form.multi_items():
        if field not in _CLIP_FIELDS + _TEXT_FIELDS:
            raise InvalidRequest(f"unknown field {field!r}; accepted: {_ACCEPTED}", field)
        if field in fields:
            raise InvalidRequest(f"{field} was sent twice", field)
        if field in _TEXT_FIELDS and not isinstance(value, str):
            raise InvalidRequest(f"{field} must be text, got a file", field)
        if field in _CLIP_FIELDS and not isinstance(value, UploadFile):
            raise InvalidRequest(f"{field} must be a file, got text", field)
        fields[field] = value
    clips = [value for value in fields.values() if isinstance(value, UploadFile)]
    if len(clips) != 1:
        got = "none" if not clips else "both names"
        raise InvalidRequest(f"the clip is one file, audio_sample (or file), got {got}", "audio_sample")
    name = str(fields.get("name", "")).strip()
    if not name:
        raise InvalidRequest("name is required: what requests will call the voice", "name")
    return VoiceForm(name, await clips[0].read(), str(fields.get("ref_text", "")).strip() or None)
