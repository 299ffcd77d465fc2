"""Other names for voices, from the config: for clients that know only their own, such as OpenAI's.

An alias is a name a request may give and nothing else. What it leads to is looked up as if the request
had named that itself, and no alias may hide a voice that is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from deployments.schemas import SpeechBody
from qwen3tts_core.audio.voice_store import is_voice_name


class VoiceAliases:
    """alias -> voice; upper and lower case of an alias are one name."""

    def __init__(self, voices: Mapping[str, str]) -> None:
        self._voices = {alias.lower(): voice for alias, voice in voices.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._voices)

    def items(self) -> Iterable[tuple[str, str]]:
        return self._voices.items()

    def apply(self, body: SpeechBody) -> SpeechBody:
        """The body with the alias in it replaced by its voice; as it is without one."""
        voice = self._voices.get((body.voice_name or "").lower())
        if voice is None:
            return body
        return body.model_copy(update={"voice": voice, "speaker": None})


def check_voice_aliases(aliases: Mapping[str, str], built_in: Iterable[str], clones: bool) -> None:
    """Raises ValueError for an alias that hides a voice or leads nowhere.

    built_in: voices of every model. clones: a model speaks with uploaded voices, which may come later.
    """
    voices = {name.lower() for name in built_in}
    for alias, voice in aliases.items():
        if alias.lower() in voices:
            raise ValueError(f"voice_aliases: {alias!r} is a voice itself; choose another alias")
        if voice.lower() in voices or (clones and is_voice_name(voice) and not _has(aliases, voice)):
            continue
        expected = ", ".join(sorted(voices)) or "none"
        if clones:
            expected += ", or the name of an uploaded voice"
        raise ValueError(
            f"voice_aliases: {alias!r} leads to {voice!r}, which is no voice; expected: {expected}"
        )


def check_no_upload_is_hidden(aliases: VoiceAliases, uploaded: Iterable[str]) -> None:
    """Raises ValueError. Later uploads can't take an alias's name: the store keeps it back."""
    names = set(aliases)
    for name in uploaded:
        if name.lower() in names:
            raise ValueError(
                f"voice_aliases: {name!r} is an uploaded voice; delete it, or choose another alias"
            )


def _has(aliases: Mapping[str, str], name: str) -> bool:
    return name.lower() in {alias.lower() for alias in aliases}
