"""What a drill found, the table of all of them, and the verdict: zeros where zero is promised."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from load_tests.drills.listening import Difference, Heard
from load_tests.drills.server import Held


@dataclass(slots=True)
class DrillResult:
    """failed: requests that did not end as promised. *_samples: of streams that should have been whole.
    leaked_*: still held when all clients were gone. problems: every other promise that was broken."""

    drill: str
    requests: int = 0
    failed: int = 0
    lost_samples: int = 0
    repeated_samples: int = 0
    leaked_slots: int = 0
    leaked_pages: int = 0
    leaked_rows: int = 0
    seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def leaks(self, held: Held) -> None:
        self.leaked_slots, self.leaked_pages, self.leaked_rows = held.slots, held.pages, held.rows

    def add(self, difference: Difference, heard: Heard) -> None:
        """A stream that should have been whole and clean."""
        self.lost_samples += difference.lost
        self.repeated_samples += difference.repeated
        if any(difference) or heard.status != 200 or not heard.is_whole:
            self.fail(f"lost {difference.lost}, repeated {difference.repeated} samples: {heard}")

    def fail(self, why: str) -> None:
        self.failed += 1
        self.problem(why)

    def problem(self, why: str) -> None:
        """The first few are kept: a thousand times the same tells no more."""
        if len(self.problems) < 10:
            self.problems.append(why)

    @property
    def promised_zeros(self) -> dict[str, int]:
        names = ("failed", "lost_samples", "repeated_samples", "leaked_slots", "leaked_pages", "leaked_rows")
        return {name: getattr(self, name) for name in names}

    @property
    def is_good(self) -> bool:
        return not any(self.promised_zeros.values()) and not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_good": self.is_good}


BEGUN: list[DrillResult] = []
"""Every drill of this process, in order: also those that a Ctrl-C cut short have something to tell."""


@contextmanager
def drilling(name: str) -> Iterator[DrillResult]:
    """A drill's result, which says how long it took, and how it went; its own crash is a problem, not an end."""
    result, began = DrillResult(name), time.monotonic()
    BEGUN.append(result)
    say(f"{name}: begins")
    try:
        yield result
    except Exception as error:  # noqa: BLE001 - the other drills should run; this one is not good
        result.problem(f"the drill itself broke: {error!r}")
    except BaseException:
        result.problem("interrupted before its end")
        raise
    finally:
        result.seconds = round(time.monotonic() - began, 1)
        verdict = "as promised" if result.is_good else "BROKEN"
        say(f"{name}: {verdict}, {result.requests} requests, {result.seconds} s")
        for problem in result.problems:
            say(f"{name}: {problem}")


def say(line: str) -> None:
    print(f"==> {line}", flush=True)


_COLUMNS = (
    "drill", "requests", "failed", "lost samples", "repeated samples", "leaked slots", "pages", "rows", "s", "notes"
)  # fmt: skip


def table(results: Sequence[DrillResult]) -> str:
    """One line a drill."""
    return aligned([_COLUMNS, *(_row(result) for result in results)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown. rows: the first has the columns' names."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    rule = "|".join(["", *("-" * (width + 2) for width in widths), ""])
    return "\n".join([lines[0], rule, *lines[1:]])


def _row(result: DrillResult) -> tuple[str, ...]:
    counts = (result.requests, *result.promised_zeros.values())
    notes = ", ".join(f"{name} {value}" for name, value in result.notes.items())
    return (result.drill, *map(str, counts), f"{result.seconds:.0f}", notes)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.ljust(width) if column in (0, len(row) - 1) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "| " + " | ".join(cells) + " |"
