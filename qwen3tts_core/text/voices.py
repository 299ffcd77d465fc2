"""Names a request may give, and the ids behind them: speakers, dialects, languages.

Everything comes from the checkpoint's config and is compared in lower case. Uploaded voices are
none of this module's business: they reach the model as vectors, not as ids.
Source: spec sections 1.2, 3.1 and 3.2.
"""

from __future__ import annotations

from typing import NamedTuple

from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.errors import UnknownLanguage, UnknownVoice

AUTO_LANGUAGE = "Auto"
"""The model decides from the text; also what no language means."""

_DIALECT_MARK = "dialect"
_LANGUAGES_A_DIALECT_REPLACES = ("auto", "chinese")


class Speaker(NamedTuple):
    """A built-in voice. codec_id: its row of the codec embedding. dialect: a language, or None."""

    name: str
    codec_id: int
    dialect: str | None


def list_speakers(config: CheckpointConfig) -> tuple[str, ...]:
    """Names of the built-in voices, in the checkpoint's order; empty for other than CustomVoice."""
    return tuple(config.speakers)


def find_speaker(config: CheckpointConfig, name: str) -> Speaker:
    """The built-in voice of that name, in any case. Raises UnknownVoice with the accepted names."""
    key = name.lower()
    if key not in config.speakers:
        raise UnknownVoice(name, list_speakers(config))
    return Speaker(key, config.speakers[key], config.speaker_dialects.get(key))


def list_languages(config: CheckpointConfig) -> tuple[str, ...]:
    """What `language` may be. A dialect isn't: it belongs to the speakers that speak it (quirk Q13)."""
    return (AUTO_LANGUAGE, *(name for name in config.languages if _DIALECT_MARK not in name))


def find_language(config: CheckpointConfig, name: str | None, speaker: Speaker | None = None) -> int | None:
    """The codec id of the language to be spoken; None leaves it to the model.

    None and "Auto" are the same. A speaker with a dialect speaks it when the language is auto or
    Chinese; any other language given by name wins over the dialect.
    Raises UnknownLanguage with the accepted names.
    """
    key = (name or AUTO_LANGUAGE).lower()
    accepted = list_languages(config)
    if key not in (language.lower() for language in accepted):
        raise UnknownLanguage(name or "", accepted)
    if speaker is not None and speaker.dialect is not None and key in _LANGUAGES_A_DIALECT_REPLACES:
        key = speaker.dialect
    return config.languages.get(key)
