"""Args that mean what they say: `num_slots: true` is no number, and "yes" no boolean.

Pydantic's own strict mode would refuse what YAML can't write, too: a list where a tuple is meant, a string
for a path, a mapping for a dataclass. So args are converted as usual, and then compared with what was given:
text stays text, numbers stay numbers, true and false stay that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

_Path = tuple[str | int, ...]


class StrictArgs(BaseModel):
    """Base of everything under `args:`. Unknown keys are refused, and values that had to be reinterpreted."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_lookalikes(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(data)
        if problems := list(_lookalikes(data, made, ())):
            raise ValidationError.from_exception_data(cls.__name__, problems)
        return made


def _lookalikes(given: Any, made: Any, path: _Path) -> Iterator[InitErrorDetails]:
    """Values of `given` that became another kind of thing in `made`, with their place."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            own = made.get(key) if isinstance(made, Mapping) else getattr(made, str(key), None)
            yield from _lookalikes(value, own, (*path, str(key)))
    elif isinstance(given, list | tuple):
        if isinstance(made, Sequence):
            for number, pair in enumerate(zip(given, made, strict=False)):
                yield from _lookalikes(*pair, (*path, number))
    elif given is not None and made is not None and not _is_same_kind(given, made):
        kind = _kind(made)
        problem = PydanticCustomError("strict", "must be {kind}", {"kind": kind})
        yield InitErrorDetails(type=problem, loc=path, input=given)


def _is_same_kind(given: Any, made: Any) -> bool:
    """A dataclass that was given ready-made is itself; an integer is a number."""
    return given is made or _kind(given) == _kind(made) or (type(given) is int and type(made) is float)


def _kind(value: Any) -> str:
    """Of a scalar; whatever YAML has no scalar for (a path, a network) is written as text."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int):
        return "an integer"
    return "a number" if isinstance(value, float) else "text"
