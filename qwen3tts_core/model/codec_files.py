"""Whether two checkpoints bring the same codec: by the SHA-256 of the files it is loaded from.

The published checkpoints each carry a copy of one codec, 0.7 GB; one engine can serve them all.
Hashing is remembered in a small file on this machine, under (path, size, modification time).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

_FOLDER = "speech_tokenizer"
_PATTERNS = ("config.json", "*.safetensors", "*.safetensors.index.json")  # what a codec engine reads
_MOST_ENTRIES = 1_000


class FileHashes:
    """SHA-256 of files, each computed once per (path, size, time). memory: the file they are kept in.

    Memory that can't be read or written costs time, never the start.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, str] = _read(memory)

    def of(self, file: Path) -> str:
        path = file.resolve()
        found = path.stat()
        key = f"{path}\n{found.st_size}\n{found.st_mtime_ns}"
        if key not in self._known:
            with path.open("rb") as opened:
                self._known[key] = hashlib.file_digest(opened, "sha256").hexdigest()
            self._write()
        return self._known[key]

    def _write(self) -> None:
        newest = dict(list(self._known.items())[-_MOST_ENTRIES:])
        temporary = self._memory.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(newest, indent=0), encoding="utf-8")
            temporary.replace(self._memory)
        except OSError as error:
            logger.warning("hashes of files can't be remembered: %s", error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def codec_digest(checkpoint: Path, hashes: FileHashes) -> str:
    """Equal for checkpoints whose codec files are equal, names included. Raises OSError."""
    folder = checkpoint / _FOLDER
    files = sorted({file for pattern in _PATTERNS for file in folder.glob(pattern)})
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.name} {hashes.of(file)}\n".encode())
    return whole.hexdigest()


def _read(memory: Path) -> dict[str, str]:
    try:
        content = json.loads(memory.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s: not read, files are hashed again: %s", memory, error)
        return {}
    if not isinstance(content, Mapping):
        logger.warning("%s: holds no mapping, files are hashed again", memory)
        return {}
    return {str(key): str(value) for key, value in content.items()}
