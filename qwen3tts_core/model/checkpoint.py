"""From a name to a folder on this machine: a path, one of our short names, or a hub id.

Downloads only what the models read, and only when the hub's cache lacks it. Knows nothing of what
is in the files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from qwen3tts_core.errors import CheckpointMismatch

logger = logging.getLogger(__name__)

CHECKPOINTS: Mapping[str, str] = MappingProxyType(
    {
        "qwen3_tts": "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice",
        "qwen3_tts_1p7b": "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice",
        "qwen3_tts_voicedesign": "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
        "qwen3_tts_base": "Qwen/Qwen3-TTS-12Hz-1.7B-Base",
        "qwen3_tts_base_0p6b": "Qwen/Qwen3-TTS-12Hz-0.6B-Base",
    }
)
"""Short names of the published checkpoints and their hub ids."""

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
_FILES = (
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    *_WEIGHTS,
    "speech_tokenizer/config.json",
    *(f"speech_tokenizer/{pattern}" for pattern in _WEIGHTS),
)
CONFIG_FILES = ("config.json", "generation_config.json", "speech_tokenizer/config.json")
"""What `CheckpointConfig` is read from."""
CODEC_FILES = (*CONFIG_FILES, *(file for file in _FILES if file.startswith("speech_tokenizer/model")))
"""The same and the codec's weights, without the talker's gigabytes."""

_ADVICE = "to use files you have, give the path of a folder that holds config.json"


def resolve_checkpoint(name: str, files: Sequence[str] = _FILES) -> Path:
    """The local folder of a checkpoint, fetched from the hub if it must be.

    name: a folder that holds config.json; else a short name of `CHECKPOINTS`; else a hub id,
        "owner/name" or "owner/name@revision". Without a network, or with HF_HUB_OFFLINE=1, the
        hub's cache on this machine is used.
    files: patterns of what must be there, `config.json` among them; by default all that the models read.
    Raises CheckpointMismatch that says what was looked for, where, and what to do.
    """
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        return folder.resolve()
    hub_id = CHECKPOINTS.get(name, name)
    match = _HUB_ID.fullmatch(hub_id)
    looks_like_a_path = name.startswith(("/", "~", "./", "../")) or name in (".", "..")
    if looks_like_a_path or match is None or (folder.is_dir() and name not in CHECKPOINTS):
        raise _not_a_folder(name, folder)
    return _fetch(name, match["repo"], match["revision"], files)


def _not_a_folder(name: str, folder: Path) -> CheckpointMismatch:
    if folder.is_dir():
        return CheckpointMismatch(name, [f"the folder {folder.resolve()} holds no config.json"])
    return CheckpointMismatch(
        name,
        [
            f"no such folder: {folder.absolute()}",
            f"not a short name: {', '.join(CHECKPOINTS)}",
            'not a hub id: "owner/name" or "owner/name@revision"',
        ],
    )


def _fetch(name: str, repo: str, revision: str | None, files: Sequence[str]) -> Path:
    # Slow to import, and never needed with a local folder.
    from huggingface_hub import constants, snapshot_download

    logger.info("checkpoint %s: looking for %s on %s", name, repo, constants.ENDPOINT)
    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=list(files))
    except Exception as error:  # besides its own errors the hub's client lets its HTTP library's through
        raise CheckpointMismatch(
            name,
            [
                f"no folder {Path(name).absolute()}",
                f"{repo} ({revision or 'default revision'}) couldn't be fetched from {constants.ENDPOINT} "
                f"and isn't whole in the cache {constants.HF_HUB_CACHE}: {_first_line(error)}",
                _ADVICE,
            ],
        ) from error
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise CheckpointMismatch(name, [f"{repo} holds no config.json (looked in {path})", _ADVICE])
    return path


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"
