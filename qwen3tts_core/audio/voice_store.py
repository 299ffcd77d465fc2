"""Named voices in a directory that several processes, also on several machines, share.

    ada.json                                the record: the name, its transcript, which payload is hers
    ada.3f2a…-91c0….voice.safetensors       x_vector [D] float32, codes [F, G] int16
    ada.3f2a…-91c0….clip.safetensors        samples [n] float32 at 24 kHz, to encode again for other weights

The directory is the only truth: nothing is remembered between calls, so an upload or a deletion
elsewhere counts at once. Every file appears by rename, whole or not at all. A payload's name holds
the clip's hash and a number drawn for the upload, so it is written once and never changes; the
record is the one file that is replaced, and replacing it is what gives a name another voice. A
reader that lost the race against a replacement finds its payload gone and reads the record again.
No locks: they don't hold on every shared filesystem. On NFS, mount with `lookupcache=positive`, or
a client may believe for seconds that a name isn't there.

Blocking: call it on a worker thread.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from qwen3tts_core.audio.clip import ReferenceClip, voice_key
from qwen3tts_core.errors import EngineFault, InvalidRequest, StorageFull, UnknownVoice, VoiceNameTaken
from qwen3tts_core.types import ReferenceVoice

logger = logging.getLogger(__name__)

DEFAULT_MAX_VOICES = 1_000
MAX_TRANSCRIPT_CHARS = 4_096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LEFT_OVER_S = 600.0  # a file no record names is a crashed upload's, or a race's, once it is this old
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READS = 20  # of a record whose payload is gone; each needs another upload to have come in between


@dataclass(frozen=True, slots=True)
class VoiceRecord:
    """What `ada.json` says. encoder: fingerprint of the weights that encoded the clip. created_at: Unix seconds."""

    name: str
    payload: str
    clip_digest: str
    clip_seconds: float
    encoder: str
    transcript: str | None
    created_at: float


@dataclass(frozen=True, slots=True)
class StoredVoice:
    """A record with its encoded arrays (as in ReferenceVoice), good for the weights that `record.encoder` names."""

    record: VoiceRecord
    x_vector: bytes
    codes: bytes

    def reference(self, in_context: bool) -> ReferenceVoice:
        """The same voice that encoding the clip gives."""
        key = voice_key(self.record.clip_digest, in_context)
        return ReferenceVoice(key, self.x_vector, self.codes if in_context else b"")


def is_voice_name(name: str) -> bool:
    """Whether an uploaded voice may be called so."""
    return _NAME.fullmatch(name) is not None


class VoiceStore:
    """Put, get, list and delete voices by name; upper and lower case are one name.

    reserved: the checkpoint's own speakers, whose names can't be taken. max_voices: how many the
    directory may hold.
    """

    def __init__(
        self, folder: Path, reserved: Iterable[str] = (), max_voices: int = DEFAULT_MAX_VOICES
    ) -> None:
        self._folder = folder
        self._reserved = frozenset(name.lower() for name in reserved)
        self._max_voices = max_voices
        folder.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def put(
        self,
        name: str,
        clip: ReferenceClip,
        reference: ReferenceVoice,
        num_groups: int,
        encoder: str,
        transcript: str | None = None,
    ) -> VoiceRecord:
        """Store a voice, or give its name another one.

        reference: the clip encoded in context, so that both modes can be served; num_groups: codes a frame.
        Raises VoiceNameTaken for a built-in name, InvalidRequest for a name, transcript or number of
        voices beyond the limits, StorageFull for a full disk; then nothing has changed.
        """
        key = self.check_name(name)
        assert reference.key == clip.voice_key(in_context=True), "not this clip's in-context voice"
        transcript = (transcript or "").strip() or None
        if transcript is not None and len(transcript) > MAX_TRANSCRIPT_CHARS:
            raise InvalidRequest(
                f"ref_text is {len(transcript):,} characters, the limit is {MAX_TRANSCRIPT_CHARS:,}",
                "ref_text",
            )
        replaced = self._read_record(key)
        if replaced is None and self._count() >= self._max_voices:
            raise self._full()
        record = VoiceRecord(
            name=name,
            payload=f"{key}.{clip.digest[:16]}-{secrets.token_hex(8)}",
            clip_digest=clip.digest,
            clip_seconds=clip.seconds,
            encoder=encoder,
            transcript=transcript,
            created_at=time.time(),
        )
        arrays = {
            "x_vector": np.frombuffer(reference.x_vector, "<f4"),
            "codes": np.frombuffer(reference.codes, "<i2").reshape(-1, num_groups),
        }
        try:
            self._write(
                f"{record.payload}.clip.safetensors", safetensors.numpy.save({"samples": clip.samples})
            )
            self._write(f"{record.payload}.voice.safetensors", safetensors.numpy.save(arrays))
            self._write(f"{key}.json", json.dumps(asdict(record), indent=1).encode())
        except OSError as error:
            if (
                self._read_record(key) != record
            ):  # else it is whole, and another process may speak with it by now
                self._drop_payload(record)
            if error.errno in _NO_ROOM:
                raise StorageFull(
                    "the server has no room left for this voice; nothing of it was kept"
                ) from error
            raise
        if replaced is not None:
            self._drop_payload(replaced)
        elif self._count() > self._max_voices:  # others came in at the same time: none of us may stay
            self._take_away(key)
            raise self._full()
        self._sweep(key)
        return record

    def get(self, name: str) -> StoredVoice:
        """The voice as it is now. Raises UnknownVoice, or EngineFault for files that don't belong together."""
        if not _NAME.fullmatch(name):
            raise self._unknown(name)
        for _ in range(_READS):
            record = self._read_record(name.lower())
            if record is None:
                raise self._unknown(name)
            arrays = self._read_payload(record, "voice")
            if arrays is not None:
                return StoredVoice(record, *(arrays[part].tobytes() for part in ("x_vector", "codes")))
        raise EngineFault(f"voice {name!r}: the payload that its record names is missing")

    def clip(self, record: VoiceRecord) -> ReferenceClip:
        """The clip a voice was made from. Raises UnknownVoice when it was deleted or replaced since."""
        arrays = self._read_payload(record, "clip")
        if arrays is None:
            raise self._unknown(record.name)
        return ReferenceClip(arrays["samples"])

    def records(self) -> list[VoiceRecord]:
        """Every voice, by name. A record that can't be read is logged and left out."""
        found = []
        for path in self._folder.glob("*.json"):
            try:
                record = self._read_record(path.stem)
            except EngineFault as error:
                logger.error("%s", error)
                continue
            if record is not None:
                found.append(record)
        return sorted(found, key=lambda record: record.name.lower())

    def delete(self, name: str) -> None:
        """Gone for every request that asks from now on. Raises UnknownVoice, or InvalidRequest for a built-in name."""
        if name.lower() in self._reserved:
            raise InvalidRequest(f"{name!r} is a built-in voice, only uploaded ones can be deleted", "name")
        key = self.check_name(name)
        if not self._take_away(key):
            raise self._unknown(name)
        self._sweep(key)

    def check_name(self, name: str) -> str:
        """The name's key in the directory. Raises InvalidRequest or VoiceNameTaken; for an early refusal."""
        if not _NAME.fullmatch(name):
            shown = name if len(name) <= 80 else name[:80] + "…"
            raise InvalidRequest(
                f"{shown!r} can't name a voice; expected 1 to 64 ASCII letters, digits, '-' or '_', "
                "a letter or digit first",
                "name",
            )
        if name.lower() in self._reserved:
            raise VoiceNameTaken(name)
        return name.lower()

    # ------------------------------------------------------------ files
    def _write(self, name: str, data: bytes) -> None:
        """Make the file appear whole, and survive a power cut."""
        temporary = self._folder / f".{secrets.token_hex(8)}.tmp"
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._folder / name)
        finally:
            temporary.unlink(missing_ok=True)
        self._sync_folder()

    def _sync_folder(self) -> None:
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read_record(self, key: str) -> VoiceRecord | None:
        path = self._folder / f"{key}.json"
        data = _read_if_there(path)
        return None if data is None else _parse_record(path, data)

    def _read_payload(self, record: VoiceRecord, part: str) -> Mapping[str, np.ndarray[Any, Any]] | None:
        path = self._folder / f"{record.payload}.{part}.safetensors"
        data = _read_if_there(path)
        try:
            return None if data is None else safetensors.numpy.load(data)
        except SafetensorError as error:
            raise EngineFault(f"{path}: {error}") from error

    def _take_away(self, key: str) -> bool:
        """Remove record and payload. The rename decides which of several deletions has removed it."""
        taken = self._folder / f".{secrets.token_hex(8)}.tmp"
        try:
            (self._folder / f"{key}.json").rename(taken)
        except FileNotFoundError:
            return False
        try:
            self._sync_folder()
            self._drop_payload(_parse_record(taken, taken.read_bytes()))
        finally:
            taken.unlink(missing_ok=True)
        return True

    def _drop_payload(self, record: VoiceRecord) -> None:
        for part in ("voice", "clip"):
            (self._folder / f"{record.payload}.{part}.safetensors").unlink(missing_ok=True)

    def _sweep(self, key: str | None = None) -> None:
        """Remove what crashed uploads and lost races left: payloads (of one name) without a record, old temporaries."""
        now = time.time()
        for path in [*self._folder.glob(f"{key or '*'}.*.safetensors"), *self._folder.glob(".*.tmp")]:
            try:
                if now - path.stat().st_mtime < _LEFT_OVER_S:
                    continue
                if path.suffix != ".tmp":
                    owner, payload = path.name.split(".")[0], path.name.rsplit(".", 2)[0]
                    record = self._read_record(owner)
                    if record is not None and record.payload == payload:
                        continue
                path.unlink(missing_ok=True)
                logger.info("%s: left over, removed", path)
            except FileNotFoundError:
                continue  # another process sweeps as well
            except EngineFault as error:
                logger.error("%s", error)

    def _count(self) -> int:
        return sum(1 for _ in self._folder.glob("*.json"))

    def _full(self) -> InvalidRequest:
        return InvalidRequest(
            f"the server holds {self._max_voices:,} voices, which is its limit; delete one first", "name"
        )

    def _unknown(self, name: str) -> UnknownVoice:
        return UnknownVoice(name, [record.name for record in self.records()])


def _read_if_there(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # NFS: removed on another machine while we read
            return None
        raise


def _parse_record(path: Path, data: bytes) -> VoiceRecord:
    try:
        content = json.loads(data)
        return VoiceRecord(**{field.name: content[field.name] for field in fields(VoiceRecord)})
    except (ValueError, KeyError, TypeError) as error:
        raise EngineFault(f"{path}: not a voice record: {error!r}") from error
