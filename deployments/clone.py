"""The voice a Base request asks for: fetched, encoded, remembered.

    ref_audio ──> ReferenceFetcher ──> hash ──┐
                                              ├─ known? ── no ──> ReferenceEncoder ──> ReferenceVoice
    voice ──> VoiceStore ─────────────────────┘    └─ yes: no call at all

A clip that was heard before costs its hash; an uploaded voice, two small files. Nothing here decodes
audio, and nothing blocks the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Any

from deployments.async_memo import AsyncMemo
from deployments.frontend import Clone
from deployments.handles import Ask, bind_ask, root_cause
from deployments.reference_encoder import EncodedVoice
from deployments.reference_fetch import ReferenceFetcher
from deployments.schemas import SpeechBody
from deployments.tasks import missing_transcript
from qwen3tts_core.audio.clip import ReferenceClip
from qwen3tts_core.audio.voice_store import StoredVoice, VoiceRecord, VoiceStore
from qwen3tts_core.errors import InvalidReferenceAudio, UnknownVoice
from qwen3tts_core.types import ReferenceVoice

MEMO_BYTES = 32 << 20
"""Room for about 1,500 half-minute voices of the 1.7B checkpoint (20 KB each), in every ingress replica."""
_READS = 5  # of a stored voice; each beyond the first needs an upload of the name to have come in between


@dataclass(frozen=True, slots=True)
class VoiceLookups:
    """How voices were found: clips in this replica's memory, awaited with others, or encoded; uploaded voices as
    they were kept, or, since other weights had encoded them, as clips."""

    num_hits: int
    num_joined: int
    num_runs: int
    stored_hits: int
    stored_misses: int


class ClipEncoder:
    """One ReferenceEncoder deployment as the ingress sees it: with a memory of its own."""

    def __init__(self, handle: Any, memo_bytes: int = MEMO_BYTES) -> None:
        # By object ref: messages by value end at 4 MiB.
        self._encode: Ask = bind_ask(handle, "encode", "object_ref")
        self._ask_fingerprint: Ask = bind_ask(handle, "fingerprint")
        self._fingerprint: str | None = None
        self._memo: AsyncMemo[ReferenceVoice] = AsyncMemo(memo_bytes, _size_of)
        self._stored_hits = self._stored_misses = 0

    def lookups(self) -> VoiceLookups:
        clips = self._memo.stats()
        return VoiceLookups(
            clips.num_hits, clips.num_joined, clips.num_runs, self._stored_hits, self._stored_misses
        )

    async def encode_file(self, data: bytes, in_context: bool) -> ReferenceVoice:
        """The voice of an audio file. Raises InvalidReferenceAudio."""
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        return await self._memo.get(
            f"file {digest} {_mode(in_context)}", lambda: self._voice_of(data, in_context)
        )

    async def encode_upload(self, data: bytes) -> tuple[ReferenceClip, EncodedVoice]:
        """Everything that is kept of an uploaded voice. Raises InvalidReferenceAudio."""
        try:
            encoded: EncodedVoice = await self._encode(data, True, True)
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, InvalidReferenceAudio):
                raise InvalidReferenceAudio(cause.message, "audio_sample") from error
            raise
        assert encoded.clip is not None, "the encoder was asked for the clip"
        return encoded.clip, encoded

    async def encode_stored(self, store: VoiceStore, stored: StoredVoice, in_context: bool) -> ReferenceVoice:
        """The voice as this encoder's weights give it, whatever weights encoded it at its upload.

        Raises UnknownVoice when it was deleted or replaced meanwhile.
        """
        record = stored.record
        if record.encoder == await self._own_fingerprint():
            self._stored_hits += 1
        else:
            self._stored_misses += 1
            whole = await self._memo.get(
                f"clip {record.clip_digest}", lambda: self._voice_of_record(store, record)
            )
            stored = StoredVoice(record, whole.x_vector, whole.codes)
        return stored.reference(in_context)

    async def _voice_of_record(self, store: VoiceStore, record: VoiceRecord) -> ReferenceVoice:
        return await self._voice_of(await asyncio.to_thread(store.clip, record), in_context=True)

    async def _voice_of(self, clip: bytes | ReferenceClip, in_context: bool) -> ReferenceVoice:
        encoded: EncodedVoice = await self._encode(clip, in_context)
        return encoded.voice

    async def _own_fingerprint(self) -> str:
        """Asked for once: other weights are another deployment, with other ingress replicas."""
        if self._fingerprint is None:
            self._fingerprint = await self._ask_fingerprint()
        return self._fingerprint


class VoiceCloner:
    """From a checked body to its voice, for one Base model."""

    def __init__(self, encoder: ClipEncoder, fetcher: ReferenceFetcher, store: VoiceStore) -> None:
        self._encoder, self._fetcher, self._store = encoder, fetcher, store

    async def find(self, body: SpeechBody) -> Clone:
        """The body has passed `check_task`. Raises InvalidReferenceAudio, UnknownVoice, InvalidRequest, Overloaded."""
        if body.ref_audio is None:
            return await self._find_stored(body)
        in_context = not body.x_vector_only_mode
        data = await self._fetcher.fetch(body.ref_audio)
        voice = await self._encoder.encode_file(data, in_context)
        return Clone("", voice, body.ref_text if in_context else None)

    async def _find_stored(self, body: SpeechBody) -> Clone:
        """In context if there is a transcript, the request's or the voice's own, unless the request says otherwise."""
        name = body.voice_name
        assert name is not None, "checked before"
        for reads_left in reversed(range(_READS)):
            stored = await asyncio.to_thread(self._store.get, name)
            transcript = body.ref_text or stored.record.transcript
            in_context = (
                transcript is not None if body.x_vector_only_mode is None else not body.x_vector_only_mode
            )
            if in_context and transcript is None:
                raise missing_transcript(f"the clip of voice {name!r}")
            try:
                voice = await self._encoder.encode_stored(self._store, stored, in_context)
            except UnknownVoice:
                if reads_left:
                    continue  # replaced since it was read, or deleted: then reading it again says so
                raise
            return Clone(stored.record.name, voice, transcript if in_context else None)
        raise AssertionError("the last read raises or returns")


def _mode(in_context: bool) -> str:
    return "in-context" if in_context else "x-vector"


def _size_of(voice: ReferenceVoice) -> int:
    return len(voice.key) + len(voice.x_vector) + len(voice.codes)
