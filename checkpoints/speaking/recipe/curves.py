"""A picture of a training, from the lines that its stages wrote.

    python -m checkpoints.speaking.recipe.curves checkpoints/speaking/curves.jsonl checkpoints/speaking/curves.png

Needs the extra `load`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_CODEC = {
    "mel": "multi-scale log-mel L1",
    "bands": "log-mel L1 of the first half",
    "phones": "phones from book 1, nats",
    "judge": "discriminators, hinge",
}
_TALKER = {
    "first": "group 0, nats",
    "rest1": "group 1, nats",
    "rest_last": "group 15, nats",
    "phones": "phones, nats",
}
_SMOOTHED = 5  # lines: buckets of other lengths have other losses

Lines = Sequence[Mapping[str, float]]


def read(file: Path, stage: str) -> list[dict[str, float]]:
    """The lines of a stage. Raises ValueError when there is none."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    chosen = [line for line in lines if line["stage"] == stage and ("progress" in line or stage == "probe")]
    if not chosen:
        raise ValueError(f"{file} has no line of stage {stage!r}")
    return chosen


def draw(file: Path, png: Path) -> None:
    """Both trainings side by side, over their steps; the talker's probes as points."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_stage(left, read(file, "codec"), _CODEC, "codec")
    _draw_stage(right, read(file, "talker"), _TALKER, "talker")
    probes = read(file, "probe")
    heard = [probe for probe in probes if "phone_errors" in probe]
    right.plot(
        [probe["step"] for probe in heard],
        [probe["phone_errors"] for probe in heard],
        "ko",
        label="free runs, phone error rate",
    )
    right.legend(fontsize=7, loc="upper right")
    figure.savefig(png, dpi=90)


def _draw_stage(axes: Axes, lines: Lines, names: Mapping[str, str], title: str) -> None:
    for name, label in names.items():
        points = [(line["step"], line[name]) for line in lines if name in line]
        if not points:  # a training that was stopped before that stage
            continue
        steps, values = np.array(points).T
        width = min(_SMOOTHED, len(values))
        smooth = np.convolve(values, np.full(width, 1 / width), mode="valid")
        axes.plot(steps[len(steps) - len(smooth) :], smooth, label=label, linewidth=1)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_title(title)
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=7)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="recipe.curves", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("curves", type=Path)
    parser.add_argument("png", type=Path)
    arguments = parser.parse_args(argv)
    try:
        draw(arguments.curves, arguments.png)
    except (OSError, ValueError) as error:
        print(f"==> {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
