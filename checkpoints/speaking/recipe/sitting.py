"""One stretch of training: its time budget, its checkpoints, its journal.

GPU time comes in pieces of minutes. A `Sitting` gives a training loop its steps until the plan is
done or the budget over, saves every minute and at the end, and goes on where the last one stopped.
Progress, not the step, drives the schedules: it is the share of the planned *training time* (or
steps) that is done, over all sittings together. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

SAVE_EVERY_S = 60.0


class Stateful(Protocol):
    """A module, an optimizer, an average: anything that can be put away and taken up again."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Step(NamedTuple):
    """number: from 0, over all sittings. progress: in [0, 1)."""

    number: int
    progress: float


class Journal:
    """Lines of numbers: to a JSONL file for the curves, and to the screen."""

    def __init__(self, file: Path, echo: Callable[[str], object] = print) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._echo = file, echo

    def write(self, **values: object) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        self._echo("  ".join(f"{name} {_short(value)}" for name, value in values.items()))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Sitting:
    """Steps until `planned_s` of training are done (or `num_steps`, for rehearsals), or `budget_s` is over.

    file: the checkpoint. parts: what is saved in it and taken from it, by name.
    """

    def __init__(
        self,
        file: Path,
        parts: Mapping[str, Stateful],
        *,
        budget_s: float,
        planned_s: float,
        num_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file, self._parts, self._clock = file, parts, clock
        self._budget_s, self._planned_s, self._num_steps = budget_s, planned_s, num_steps
        self.step, self.trained_s = 0, 0.0

    @property
    def progress(self) -> float:
        done = self.trained_s / self._planned_s if self._num_steps is None else self.step / self._num_steps
        return min(1.0, done)

    @property
    def is_finished(self) -> bool:
        return self.progress >= 1.0

    def resume(self, device: torch.device | str = "cpu") -> bool:
        """Take up the last checkpoint; False where there is none.

        Raises ValueError when it holds other parts than these.
        """
        if not self._file.exists():
            return False
        saved = torch.load(self._file, map_location=device, weights_only=True)
        if set(saved["parts"]) != set(self._parts):
            raise ValueError(f"{self._file} holds {sorted(saved['parts'])}, expected {sorted(self._parts)}")
        for name, part in self._parts.items():
            part.load_state_dict(saved["parts"][name])
        self.step, self.trained_s = saved["step"], saved["trained_s"]
        return True

    def save(self) -> None:
        """Replaces the last checkpoint only when the new one is whole."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".partial")
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        torch.save({"step": self.step, "trained_s": self.trained_s, "parts": parts}, partial)
        partial.replace(self._file)

    def steps(self) -> Iterator[Step]:
        """The steps of this sitting. A body that raises leaves the last checkpoint as it was."""
        started = last = last_save = self._clock()
        while not self.is_finished and last - started < self._budget_s:
            yield Step(self.step, self.progress)
            self.step += 1
            now = self._clock()
            self.trained_s, last = self.trained_s + now - last, now
            if now - last_save >= SAVE_EVERY_S:
                self.save()
                last_save = last = self._clock()  # saving is no training
        self.save()


def seed_step(seed: int, step: int) -> None:
    """All draws of a step follow from (seed, step), so a resumed run goes on as the whole one would."""
    torch.manual_seed((seed * 1_000_003 + step) % 2**32)  # the CPU's generator takes no more bits


def warm_cosine(step: int, progress: float, *, warmup_steps: int, floor: float) -> float:
    """The learning rate's factor: a linear rise, then half a cosine down to `floor`."""
    rise = min(1.0, (step + 1) / warmup_steps)
    return rise * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
