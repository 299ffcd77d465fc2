"""PNG plots of measured levels. matplotlib draws into files alone: no display is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from load_tests.aims import AIMS
from load_tests.playback import UNDERRUN_S, seconds_of

mpl.use("Agg")

_MOST_LINES = 60
"""Requests in a plot of playback; more can't be told apart."""


def draw_plots(folder: Path, runs: dict[str, dict[str, Any]]) -> list[Path]:
    """Write what can be drawn of these runs; the files."""
    requests = {name: read_requests(folder / f"{name}.jsonl") for name in runs}
    files = [draw_ttfa(folder, requests)]
    if any(level["scenario"] == "closed" for run in runs.values() for level in run["levels"]):
        files.append(draw_throughput(folder, runs))
    return files + [draw_playback(folder, name, levels) for name, levels in requests.items() if levels]


def read_requests(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Answers that came whole, by level."""
    levels: dict[str, list[dict[str, Any]]] = {}
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            if request["outcome"] == "ok":
                levels.setdefault(request["level"], []).append(request)
    return levels


def draw_ttfa(folder: Path, requests: dict[str, dict[str, list[dict[str, Any]]]]) -> Path:
    """The share of answers whose first audio had come by then; dotted: was heard."""
    figure, axes = new_plot("time to first audio, ms", "share of requests")
    curves = [
        (f"{name}, {level}", answers)
        for name, levels in requests.items()
        for level, answers in levels.items()
    ]
    for number, (label, answers) in enumerate(curves):
        for field, style in (("ttfa_s", "-"), ("audible_s", ":")):
            values = sorted(1000 * answer[field] for answer in answers if answer[field] is not None)
            shares = [(rank + 1) / len(values) for rank in range(len(values))]
            axes.step(
                values, shares, style, where="post", color=f"C{number % 10}", label=label * (style == "-")
            )
    axes.set_xscale("log")
    axes.set_title("solid: first byte; dotted: first audible sample", fontsize="small")
    return save(figure, axes, folder / "ttfa_cdf.png")


def draw_throughput(folder: Path, runs: dict[str, dict[str, Any]]) -> Path:
    """Seconds of audio per second over concurrent streams, with what is published and what we aim at."""
    figure, axes = new_plot("streams at once", "seconds of audio per second")
    for name, run in runs.items():
        points = sorted(
            (level["concurrency"], level["audio_per_s"])
            for level in run["levels"]
            if level["scenario"] == "closed" and level["name"] == str(level["concurrency"])
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-", label=run["label"] or name)
    published = [
        (streams, aim.published_audio_per_s) for streams, aim in AIMS.items() if aim.published_audio_per_s
    ]
    aims = [(streams, aim.audio_per_s) for streams, aim in AIMS.items() if aim.audio_per_s]
    axes.plot(*zip(*published, strict=True), "x", color="grey", label="best published (H100)")
    axes.plot(*zip(*aims, strict=True), "^", color="black", label="aim (H200)")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    return save(figure, axes, folder / "audio_per_s.png")


def draw_playback(folder: Path, name: str, levels: dict[str, list[dict[str, Any]]]) -> Path:
    """Of the last level: when each chunk came, against when a player needed it."""
    level, answers = list(levels.items())[-1]
    figure, axes = new_plot("needed by, s after the first audio", "came, s after the first audio")
    for answer in answers[:_MOST_LINES]:
        points = list(needed_and_came(answer["arrivals"]))
        axes.plot(*zip(*points, strict=True), ".-", color="C0", alpha=0.3, linewidth=0.5, markersize=3)
    end = max(seconds_of(answer["arrivals"][-1][1]) for answer in answers)
    axes.plot([0, end], [0, end], "k-", linewidth=1, label="in time")
    axes.plot([0, end], [UNDERRUN_S, end + UNDERRUN_S], "k:", linewidth=1, label="an underrun")
    axes.set_title(f"{name}, {level}: {min(len(answers), _MOST_LINES)} requests", fontsize="small")
    return save(figure, axes, folder / f"playback_{name}.png")


def needed_and_came(arrivals: list[tuple[float, int]]) -> Iterator[tuple[float, float]]:
    """For each arrival after the first: the seconds of audio before it, and when it came."""
    heard = 0
    for at_s, num_bytes in arrivals:
        yield seconds_of(heard), at_s - arrivals[0][0]
        heard = num_bytes


def new_plot(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    return figure, axes


def save(figure: Figure, axes: Axes, file: Path) -> Path:
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=120)
    return file
