"""Reads a checkpoint's JSON key by key: a missing, mistyped or impossible value names itself.

Nothing is coerced: "false" is no boolean, true is no number. Knows nothing of what the keys mean.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qwen3tts_core.errors import CheckpointMismatch

_NO_DEFAULT = object()


class JsonSection:
    """One JSON object of a file. Every read raises CheckpointMismatch with file, full key and value.

    `default` is for keys that published files may leave out or hold as null.
    """

    def __init__(self, path: Path, data: Mapping[str, Any], prefix: str = "") -> None:
        self._path, self._data, self._prefix = path, data, prefix

    @classmethod
    def from_file(cls, path: Path) -> JsonSection:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointMismatch(str(path), ["file is missing"]) from None
        except ValueError as error:
            raise CheckpointMismatch(str(path), [f"not JSON: {error}"]) from error
        if not isinstance(data, dict):
            raise CheckpointMismatch(str(path), [f"expected a JSON object, got {type(data).__name__}"])
        return cls(path, data)

    def failure(self, key: str, problem: str) -> CheckpointMismatch:
        """For the caller to raise."""
        return CheckpointMismatch(str(self._path), [f"{self._prefix}{key}: {problem}"])

    def _get(self, key: str, expected: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self._data.get(key)
        if value is None and default is not _NO_DEFAULT:
            return default
        if key not in self._data:
            raise self.failure(key, "key is missing")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.failure(key, f"expected {expected}, got {value!r}")
        return value

    def integer(self, key: str, lowest: int, limit: int | None = None, default: Any = _NO_DEFAULT) -> int:
        """In [lowest, limit)."""
        value: int = self._get(key, "an integer", (int,), default)
        if value < lowest or (limit is not None and value >= limit):
            most = "" if limit is None else f" and below {limit:,}"
            raise self.failure(key, f"expected at least {lowest}{most}, got {value:,}")
        return value

    def size(self, key: str, default: Any = _NO_DEFAULT) -> int:
        return self.integer(key, 1, default=default)

    def positive(self, key: str, most: float = math.inf, default: Any = _NO_DEFAULT) -> float:
        """A finite number in (0, most]."""
        value = float(self._get(key, "a number", (int, float), default))
        if not 0 < value <= most or not math.isfinite(value):
            upto = "" if most == math.inf else f" and at most {most:g}"
            raise self.failure(key, f"expected a number above 0{upto}, got {value}")
        return value

    def flag(self, key: str, default: Any = _NO_DEFAULT) -> bool:
        return bool(self._get(key, "true or false", (bool,), default))

    def text(self, key: str) -> str:
        return str(self._get(key, "a string", (str,), _NO_DEFAULT))

    def choice(self, key: str, accepted: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in accepted:
            raise self.failure(key, f"expected one of {', '.join(accepted)}, got {value!r}")
        return value

    def mapping(self, key: str, default: Any = _NO_DEFAULT) -> Mapping[str, Any]:
        value: Mapping[str, Any] = self._get(key, "a JSON object", (dict,), default)
        return MappingProxyType(dict(value))

    def ids(self, key: str, limit: int) -> Mapping[str, int]:
        """Lower-case names, each with an id in [0, limit)."""
        section = self.section(key)
        return MappingProxyType({name.lower(): section.integer(name, 0, limit) for name in section._data})

    def sizes(self, key: str, default: Any = _NO_DEFAULT) -> tuple[int, ...]:
        raw = self._get(key, "a list of sizes", (list, tuple), default)
        if not raw or any(not isinstance(v, int) or isinstance(v, bool) or v < 1 for v in raw):
            raise self.failure(key, f"expected a list of sizes, got {raw!r}")
        return tuple(raw)

    def section(self, key: str) -> JsonSection:
        return JsonSection(self._path, self.mapping(key), f"{self._prefix}{key}.")

    def require(self, key: str, expected: Any) -> None:
        """An absent key is fine; the code computes this and nothing else, another value would be wrong."""
        value = self._data.get(key, expected)
        if type(value) is not type(expected) or value != expected:
            raise self.failure(key, f"only {expected!r} is implemented, got {value!r}")

    def require_plain_rope(self) -> None:
        """No scaling of rotary positions. MRoPE is plain while its streams are equal, as they always are."""
        scaling = self._get("rope_scaling", "a JSON object", (dict,), None)
        for key in ("rope_type", "type"):
            if scaling is not None and scaling.get(key, "default") != "default":
                raise self.failure(
                    f"rope_scaling.{key}", f"only 'default' is implemented, got {scaling[key]!r}"
                )
