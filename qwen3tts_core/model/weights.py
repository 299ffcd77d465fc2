"""Reads a checkpoint's safetensors and checks coverage in both directions.

A loader takes every tensor it needs by name and shape; `finish` then raises CheckpointMismatch
that lists *all* that was missing, wrongly shaped, or left over. Single files and sharded ones
(`*.index.json`) look the same from here. Knows nothing of any model's layers.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qwen3tts_core.errors import CheckpointMismatch

logger = logging.getLogger(__name__)


class TensorSource(Protocol):
    """Named tensors somewhere: a file, several files, or bare shapes."""

    where: str

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, device: torch.device) -> Tensor: ...


class SafetensorsFolder:
    """`model.safetensors`, or the shards that `model.safetensors.index.json` names. Memory-mapped."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                files = sorted({folder / name for name in weight_map.values()})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointMismatch(str(index), [f"not a shard index: {error!r}"]) from error
        elif single.is_file():
            weight_map, files = None, [single]
        else:
            raise CheckpointMismatch(str(folder), ["neither model.safetensors nor its index is here"])
        missing = [f"shard {file.name} is missing" for file in files if not file.is_file()]
        if missing:
            raise CheckpointMismatch(str(folder), missing)
        self._home: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            try:
                with safe_open(file, framework="pt") as handle:
                    for name in handle.keys():  # noqa: SIM118 - not a dict
                        self._home[name] = file
                        self._shapes[name] = tuple(handle.get_slice(name).get_shape())
            except (SafetensorError, OSError) as error:
                raise CheckpointMismatch(str(file), [f"not a safetensors file: {error}"]) from error
        if weight_map is not None:
            problems = [f"{name} is in no shard" for name in sorted(set(weight_map) - set(self._home))]
            extra = sorted(set(self._home) - set(weight_map))
            problems += [f"{name} is in a shard, but not in the index" for name in extra]
            if problems:
                raise CheckpointMismatch(str(index), problems)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, device: torch.device) -> Tensor:
        with safe_open(self._home[name], framework="pt", device=str(device)) as handle:
            tensor: Tensor = handle.get_tensor(name)
            return tensor


class ShapesOnly:
    """Bare names and shapes as meta tensors: checks coverage without a byte of weights."""

    def __init__(self, where: str, shapes: Mapping[str, Sequence[int]]) -> None:
        self.where = where
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, device: torch.device) -> Tensor:
        return torch.empty(self._shapes[name], device="meta")


class WeightReader:
    """Hands out one component's tensors and remembers what was asked for.

    owned: name prefix of the component, e.g. "talker.". elsewhere: prefixes that other components
    own. known_unused: glob patterns of tensors that nobody uses in the reference either.
    """

    def __init__(
        self,
        source: TensorSource,
        *,
        owned: str,
        elsewhere: Sequence[str] = (),
        known_unused: Sequence[str] = (),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._source = source
        self._owned = owned
        self._elsewhere = tuple(elsewhere)
        self._known_unused = tuple(known_unused)
        self._taken: set[str] = set()
        self._problems: list[str] = []
        self.device = torch.device(device)
        self.dtype = dtype

    def within(self, prefix: str) -> WeightReader:
        """A reader of the tensors under a longer prefix; what it takes counts here too."""
        inner = copy.copy(self)
        inner._owned = self._owned + prefix
        return inner

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `owned + name`, on the reader's device, as `dtype` (default: the reader's).

        A missing or wrongly shaped tensor is remembered for `finish` and comes back as zeros, so
        that one start reports everything that is wrong.
        """
        full = self._owned + name
        dtype = dtype or self.dtype
        found = self._source.shapes().get(full)
        self._taken.add(full)
        if found != tuple(shape):
            got = "missing" if found is None else f"shape {list(found)}"
            self._problems.append(f"{full}: expected shape {list(shape)}, got {got}")
            return torch.zeros(shape, dtype=dtype, device=self.device)
        tensor = self._source.read(full, self.device)
        if not tensor.is_floating_point():
            self._problems.append(f"{full}: expected floating point, got {tensor.dtype}")
        return tensor.to(dtype)

    def stack(self, names: Iterable[str], *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Equal-shaped tensors stacked in front: [len(names), *shape]."""
        return torch.stack([self.take(name, *shape, dtype=dtype) for name in names])

    def concat(self, parts: Mapping[str, int], width: int) -> Tensor:
        """Matrices of one input width joined along their rows: {name: rows} -> [sum(rows), width]."""
        return torch.cat([self.take(name, rows, width) for name, rows in parts.items()])

    def finish(self) -> None:
        """Raise CheckpointMismatch unless everything asked for was there and everything there was asked for."""
        unused = []
        known: set[str] = set()
        for name in sorted(set(self._source.shapes()) - self._taken):
            pattern = next((p for p in self._known_unused if fnmatch.fnmatchcase(name, p)), None)
            if pattern is not None:
                known.add(pattern)
            elif not name.startswith(self._elsewhere):
                unused.append(f"{name}: in the file, but nothing uses it")
        problems = self._problems + unused
        if problems:
            raise CheckpointMismatch(self._source.where, problems)
        if known:
            logger.info("%s: known to be unused: %s", self._source.where, ", ".join(sorted(known)))
