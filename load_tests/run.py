"""One run: levels of load one after another, what is shown meanwhile, and the files that are left.

DIR/NAME.json      environment, arguments, one entry for each level: what `load_tests.report` reads
DIR/NAME.jsonl     one line for each request: level, repeat, and `SpeechRecord.as_json`
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from load_tests.measurement import odd_durations, over_repeats, span_s, summarise
from load_tests.playback import UNDERRUN_S
from load_tests.records import SpeechRecord
from load_tests.scenarios import Scenario
from load_tests.workers import Pass, PassResult, Workers

NUMBERS_PER_REPEAT = 1_000_000
"""Repeat r takes its requests from r times this on: other seeds, the same at every concurrency."""
WARM_UP = 900 * NUMBERS_PER_REPEAT


class Run:
    """Where levels are measured and written down.

    around: called before and after each measured pass, say to read counters; see `bench_serve`.
    """

    def __init__(
        self, folder: Path, name: str, about: dict[str, Any], workers: Workers, *, ends_by_limit: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._name, self._about, self._workers = folder, name, about, workers
        self._ends_by_limit = ends_by_limit
        self.levels: list[dict[str, Any]] = []
        self._requests = (folder / f"{name}.jsonl").open("w", encoding="utf-8")

    def close(self) -> None:
        self._requests.close()

    def warm_up(self, one_pass: Pass, label: str) -> PassResult:
        return self._send(replace(one_pass, first_number=WARM_UP, wav_folder=None), f"{label}, warm-up")

    def measure(
        self,
        level: dict[str, Any],
        one_pass: Pass,
        repeats: int = 1,
        around: Callable[[PassResult | None], dict[str, Any]] = lambda _: {},
        keep: Callable[[SpeechRecord], bool] = lambda _: True,
    ) -> dict[str, Any]:
        """Repeat the pass, and note the level. level: its `name` and whatever tells it from others.

        around: called with None before each repeat and with the result after it; what it then returns joins
        that repeat's numbers, and the last one's the level's. keep: which records count.
        """
        summaries: list[dict[str, Any]] = []
        watched: list[dict[str, Any]] = []
        for repeat in range(repeats):
            around(None)
            label = f"{level['name']}, {repeat + 1}/{repeats}" if repeats > 1 else str(level["name"])
            result = self._send(replace(one_pass, first_number=repeat * NUMBERS_PER_REPEAT), label)
            self._write(str(level["name"]), repeat, result)
            records = [record for record in result.records if keep(record)]
            summary = summarise(records, result.clients, span_s(records), ends_by_limit=self._ends_by_limit)
            summaries.append(summary)
            watched.append(around(result))
            say(f"{label}: {describe(summary)}")
        repeated = [{**summary, **more} for summary, more in zip(summaries, watched, strict=True)]
        noted = {**level, **over_repeats(summaries), **watched[-1], "repeats": repeated}
        self.levels.append(noted)
        self.save()
        return noted

    def wav_folder(self, level: str) -> Path:
        """Where a level's audio goes; made here."""
        folder = wav_folder_of(self.folder, self._name, level)
        folder.mkdir(exist_ok=True)
        return folder

    def save(self) -> None:
        """Also while it runs, so that what was measured survives an interruption."""
        about = {**self._about, "odd_durations": odd_durations(self.levels), "levels": self.levels}
        (self.folder / f"{self._name}.json").write_text(json.dumps(about, indent=1), encoding="utf-8")

    def _send(self, one_pass: Pass, label: str) -> PassResult:
        line = ProgressLine(label, one_pass.scenario)
        try:
            return self._workers.run(one_pass, line.show)
        finally:
            line.clear()

    def _write(self, level: str, repeat: int, result: PassResult) -> None:
        for record in result.records:
            fields = {"level": level, "repeat": repeat, **record.as_json(result.began)}
            self._requests.write(json.dumps(fields, ensure_ascii=False) + "\n")
        self._requests.flush()


def wav_folder_of(folder: Path, name: str, level: str) -> Path:
    return folder / f"{name}_wavs_{level.replace(' ', '_')}"


class ProgressLine:
    """One line that is written over on a terminal, and every ten seconds elsewhere."""

    _SELDOM_S = 10.0

    def __init__(self, label: str, scenario: Scenario) -> None:
        self._label, self._scenario = label, scenario
        self._is_terminal = sys.stderr.isatty()
        self._began = self._said = time.monotonic()

    def show(self, counts: dict[str, int]) -> None:
        now = time.monotonic()
        if not self._is_terminal and now - self._said < self._SELDOM_S:
            return
        self._said = now
        total = self._scenario.num_requests
        done = sum(counts.values())
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
        of = f"{done}/{total}" if total else str(done)
        line = f"    {self._label}: {now - self._began:.0f} s, {of} answers ({told or 'none yet'})"
        sys.stderr.write(f"\r\x1b[K{line}" if self._is_terminal else f"{line}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        if self._is_terminal:
            sys.stderr.write("\r\x1b[K")


def say(line: str) -> None:
    print(f"==> {line}", flush=True)


def describe(summary: dict[str, Any]) -> str:
    """One line on a pass."""
    parts = [f"{summary['num_ok']} ok"]
    parts += [
        f"{summary[f'num_{name}']} {name}" for name in ("refused", "failed", "left") if summary[f"num_{name}"]
    ]
    if summary["num_ok"]:
        parts.append("TTFA p50/p95/p99 " + milliseconds(summary, "ttfa_s"))
        parts.append(f"RTF {summary['rtf_mean']:.3f}, {summary['audio_per_s']:.1f} audio-s/s")
        parts.append(f"{summary['num_underruns']} underruns over {UNDERRUN_S * 1000:.0f} ms")
    if summary["num_refused"]:
        parts.append("503 in p50/p95/p99 " + milliseconds(summary, "refused_s"))
    parts += summary["missing"][:1] + [f"{count} x {error}" for error, count in summary["errors"].items()][:2]
    return "; ".join(parts)


def milliseconds(summary: dict[str, Any], name: str) -> str:
    values = [summary[f"{name}_p{rank}"] for rank in (50, 95, 99)]
    return " / ".join("-" if value is None else f"{value * 1000:.0f}" for value in values) + " ms"
