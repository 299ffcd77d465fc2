"""Draw the Grafana dashboard without Grafana: the same panels and PromQL, asked of a Prometheus.

    python -m load_tests.render_dashboard --prometheus http://127.0.0.1:9090 --minutes 10 --out dashboard.png

For a look at what the dashboard shows of a run, in a report or where there is no Grafana. `--rows` picks rows
by their titles.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import matplotlib as mpl
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.dates import DateFormatter
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import FuncFormatter

DASHBOARD = Path(__file__).parents[1] / "serve_configs" / "grafana" / "qwen3tts.json"
_GRID_COLUMNS = 24
_INCHES_A_CELL = (0.5, 0.34)
_UNITS = {
    "s": lambda x: f"{1000 * x:.0f} ms" if x < 1 else f"{x:.3g} s",
    "ms": lambda x: f"{x:.3g} ms" if x < 1000 else f"{x / 1000:.3g} s",
    "percent": lambda x: f"{x:.3g} %",
    "percentunit": lambda x: f"{100 * x:.3g} %",
}

Series = tuple[Mapping[str, str], list[tuple[float, float]]]
"""Labels, and (unix time, value) of each step."""


class Prometheus:
    """Range queries over the minutes before `end`, unix time, with Grafana's variables filled in."""

    def __init__(self, url: str, job: str, minutes: float, step_s: float, end: float) -> None:
        self._client = httpx.Client(base_url=url, timeout=30, trust_env=False)
        self.start, self.end = end - 60 * minutes, end
        self._step_s = step_s
        self._variables = {"$__rate_interval": f"{max(15, round(4 * step_s))}s", "$job": job}

    def ask(self, expression: str) -> list[Series]:
        for name, value in self._variables.items():
            expression = expression.replace(name, value)
        query: dict[str, str | float] = {
            "query": expression,
            "start": self.start,
            "end": self.end,
            "step": self._step_s,
        }
        answer = self._client.get("/api/v1/query_range", params=query).raise_for_status().json()
        return [
            (result["metric"], [(at, float(value)) for at, value in result["values"]])
            for result in answer["data"]["result"]
        ]


def rows_of(dashboard: Mapping[str, Any], titles: Sequence[str]) -> list[dict[str, Any]]:
    """The panels of these rows (all, if none is named), moved up to follow one another."""
    kept, wanted, top, shift = [], not titles, 0, 0
    for panel in dashboard["panels"]:
        place = dict(panel["gridPos"])
        if panel["type"] == "row":
            wanted = not titles or panel["title"] in titles
            shift = place["y"] - top
        if wanted:
            place["y"] -= shift
            kept.append({**panel, "gridPos": place})
            top = max(top, place["y"] + place["h"])
    return kept


def draw(panels: Sequence[Mapping[str, Any]], prometheus: Prometheus, out: Path) -> int:
    """Returns how many panels had no data."""
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = Figure(figsize=(_GRID_COLUMNS * _INCHES_A_CELL[0], height * _INCHES_A_CELL[1]))
    grid = GridSpec(height, _GRID_COLUMNS, figure, left=0.03, right=0.99, top=0.995, bottom=0.02)
    num_empty = 0
    for panel in panels:
        place = panel["gridPos"]
        rows = slice(place["y"], place["y"] + place["h"])
        columns = slice(place["x"], place["x"] + place["w"])
        if panel["type"] == "row":
            axes = figure.add_subplot(grid[rows, columns])
            axes.axis("off")
            axes.text(0, 0.2, panel["title"], fontsize=10, weight="bold")
            continue
        inner = grid[rows, columns].subgridspec(12, 20)
        num_empty += not _draw_panel(figure.add_subplot(inner[1:9, 1:19]), panel, prometheus)
    figure.savefig(out, dpi=80, pil_kwargs={"optimize": True})
    return num_empty


def _draw_panel(axes: Axes, panel: Mapping[str, Any], prometheus: Prometheus) -> bool:
    defaults = panel["fieldConfig"]["defaults"]
    lines = [
        (_legend(target["legendFormat"], labels), points)
        for target in panel["targets"]
        for labels, points in prometheus.ask(target["expr"])
    ]
    for label, points in sorted(lines):
        times = [at / 86_400 for at, _ in points]
        axes.plot(times, [value for _, value in points], linewidth=1, label=label)
    axes.set_title(panel["title"], loc="left", fontsize=8)
    axes.set_xlim(prometheus.start / 86_400, prometheus.end / 86_400)
    axes.set_ylim(bottom=0, top=defaults.get("max"))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M"))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda x, _: _UNITS.get(defaults["unit"], "{:.4g}".format)(x))
    )
    axes.grid(alpha=0.15)
    for edge in axes.spines.values():
        edge.set_visible(False)
    if lines:
        axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.12), ncols=4, frameon=False, fontsize=6.5)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", alpha=0.5)
    return bool(lines)


def _legend(template: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), template)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--job", default="qwen3tts", help="the scrape job")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--end", type=float, default=time.time(), help="unix time; now by default")
    parser.add_argument("--step", type=float, default=5.0, help="seconds between points")
    parser.add_argument("--rows", nargs="*", default=[], help="titles; all by default")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    prometheus = Prometheus(
        arguments.prometheus, arguments.job, arguments.minutes, arguments.step, arguments.end
    )
    with mpl.rc_context():
        style.use("dark_background")
        mpl.rcParams.update({"font.size": 8, "axes.facecolor": "#181b1f", "figure.facecolor": "#111217"})
        num_empty = draw(rows_of(dashboard, arguments.rows), prometheus, arguments.out)
    print(json.dumps({"out": str(arguments.out), "panels_without_data": num_empty}))


if __name__ == "__main__":
    main()
