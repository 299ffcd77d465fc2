"""The models of this app by name, each with its road: text side, codec, and whose voices it clones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deployments.clone import VoiceCloner
from deployments.frontend import Frontend
from deployments.utterance import Chains
from qwen3tts_core.errors import UnknownModel

_LONGEST_ECHO = 256
"""Of a name that a client sent; a path can hold far more."""


class ServedModel(NamedTuple):
    """aliases: other names of the same published checkpoint. cloner: on Base checkpoints.
    sleepers: names of its deployments that may have no replica. wakes: those of them that every request needs."""

    frontend: Frontend
    chains: Chains
    cloner: VoiceCloner | None = None
    aliases: tuple[str, ...] = ()
    sleepers: tuple[str, ...] = ()
    wakes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.frontend.model_name


class ServedModels:
    """In the order of the args; a request that names no model gets the first."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._by_name = {model.name: model for model in models}
        self._by_alias: dict[str, ServedModel] = {}
        for model in models:
            for alias in model.aliases:
                self._by_alias.setdefault(alias, model)
        self.default = models[0]

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._by_name.values())

    def find(self, name: str | None) -> ServedModel:
        """A model's own name goes before anyone's alias. Raises UnknownModel."""
        if name is None:
            return self.default
        found = self._by_name.get(name) or self._by_alias.get(name)
        if found is None:
            raise UnknownModel(
                name[:_LONGEST_ECHO], (*self._by_name, *(a for a in self._by_alias if a not in self._by_name))
            )
        return found
