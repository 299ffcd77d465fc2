"""Which arrays a golden file may hold, and what each is compared with.

A family is a function behind a pattern of array names. It gets the pair (checkpoint and golden
arrays) and the named parts of the pattern, and answers with what our code computes, or with the
reason why that array can't be compared by its nature. An array that no pattern knows is a failure.
"""

import re
from dataclasses import dataclass, field

import numpy as np

EXACT = 0.0
"""Ids and codes equal; floats bit for bit."""
CLOSE = 1e-4
"""Hidden states, logits, waveforms and features, all float32 (golden/seed0/README.md, Tolerances)."""


class Computed:
    """What we compute for an array. Several values are several ways to it; the worst one counts.

    expected: the part of the array that is compared, if not the whole; then `note` says which.
    """

    def __init__(self, *values, tolerance, expected=None, note=""):
        self.values = [_on_host(value) for value in values]
        self.tolerance = tolerance
        self.expected = expected
        self.note = note


def _on_host(value):
    """A tensor may be on a GPU."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


@dataclass(frozen=True)
class NotCompared:
    reason: str


INPUT = NotCompared("an input of other arrays")


@dataclass(frozen=True)
class Result:
    """One line of the report. status: "ok", "FAIL" or "-" (not compared)."""

    name: str
    status: str
    error: float = 0.0
    tolerance: float = EXACT
    note: str = ""

    def __str__(self):
        if self.status == "-":
            return f"-     {self.name:<52} not compared: {self.note}"
        numbers = f"max error {self.error:.2e}  tolerance {self.tolerance:.0e}"
        return f"{self.status:<5} {self.name:<52} {numbers}{'  ' if self.note else ''}{self.note}"


@dataclass
class Registry:
    families: list = field(default_factory=list)

    def array(self, *patterns):
        """Register the decorated function for every array whose whole name fits one of `patterns`."""

        def register(function):
            self.families.extend((re.compile(pattern), function) for pattern in patterns)
            return function

        return register

    def find(self, name):
        """The function and arguments for an array; None when it is unknown."""
        found = [
            (match, function) for pattern, function in self.families if (match := pattern.fullmatch(name))
        ]
        assert len(found) <= 1, f"{name} belongs to {len(found)} families"
        return (found[0][1], found[0][0].groupdict()) if found else None


REGISTRY = Registry()
array = REGISTRY.array


def compare(name, golden, answer):
    """The Result for one array of the golden file and its family's answer."""
    if isinstance(answer, NotCompared):
        return Result(name, "-", note=answer.reason)
    expected = golden if answer.expected is None else answer.expected
    if not expected.size and golden.size:
        return Result(name, "FAIL", np.inf, answer.tolerance, "nothing of it was compared")
    worst = Result(name, "ok", 0.0, answer.tolerance, answer.note)
    for value in answer.values:
        if value.shape != expected.shape:
            note = f"shape {list(value.shape)}, expected {list(expected.shape)}"
            return Result(name, "FAIL", np.inf, answer.tolerance, note)
        error = _max_error(value, expected)
        if not error <= answer.tolerance:
            return Result(name, "FAIL", error, answer.tolerance, answer.note)
        if answer.tolerance == EXACT and expected.dtype.kind == "f" and value.tobytes() != expected.tobytes():
            return Result(name, "FAIL", error, answer.tolerance, "equal numbers, but not the same bits")
        if error > worst.error:
            worst = Result(name, "ok", error, answer.tolerance, answer.note)
    return worst


def _max_error(value, expected):
    """Largest absolute difference; equal infinities differ by 0, a NaN by infinity."""
    if not expected.size:
        return 0.0
    value, expected = value.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where(value == expected, 0.0, np.abs(value - expected))
    return float(np.nan_to_num(difference, nan=np.inf).max())
