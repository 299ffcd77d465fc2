"""Tables and plots of what `python -m load_tests` and `bench_serve` have left in a folder.

python -m load_tests.report DIR [--no-plots]        prints DIR/report.md, and writes it with its plots
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_tests.aims import AIMS, READY_AIM_S
from load_tests.bottleneck import resource_table
from load_tests.measurement import odd_durations

Run = dict[str, Any]
Level = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="load_tests.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-plots", action="store_true", help="the tables alone: needs no matplotlib")
    arguments = parser.parse_args(argv)
    try:
        text = write_report(arguments.folder, plots=not arguments.no_plots)
    except (OSError, ValueError, ImportError) as error:
        print(f"==> {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


def write_report(folder: Path, *, plots: bool) -> str:
    """The report of every run in the folder. Raises ValueError when there is none, ImportError without matplotlib."""
    runs = read_runs(folder)
    text = report(runs)
    if plots:
        from load_tests.plots import draw_plots  # matplotlib, slow and not everywhere

        text += "".join(f"\n![{file.stem}]({file.name})\n" for file in draw_plots(folder, runs))
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text


def read_runs(folder: Path) -> dict[str, Run]:
    """By the name of its files. Raises ValueError, OSError."""
    runs = {}
    for file in sorted(folder.glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(run, dict) and "levels" in run and "environment" in run:
            runs[file.stem] = run | {"wer": read_wer(folder / f"{file.stem}_wer.json")}
    if not runs:
        raise ValueError(f"{folder} holds no results")
    return runs


def read_wer(file: Path) -> dict[str, float]:
    """Percent by level, as `load_tests.wer` has left them; none where it did not run."""
    if not file.exists():
        return {}
    levels = json.loads(file.read_text(encoding="utf-8"))
    return {name: level["wer_percent"] for name, level in levels.items()}


def report(runs: dict[str, Run]) -> str:
    """Markdown."""
    parts = [target_table(runs)]
    levels_by_kind: dict[str, list[tuple[str, Level]]] = {}
    for name, run in runs.items():
        for level in run["levels"]:
            levels_by_kind.setdefault(level["scenario"], []).append((run["label"] or name, level))
    parts += [f"### {kind}\n\n{level_table(levels)}" for kind, levels in levels_by_kind.items()]
    for name, run in runs.items():
        parts += resource_parts(name, run)
    notes = [line for name, run in runs.items() for line in notes_of(name, run)]
    parts.append("\n".join(f"- {line}" for line in [*notes, *completeness(runs)]))
    parts += [environment_line(name, run) for name, run in runs.items()]
    return "\n\n".join(part for part in parts if part) + "\n"


def notes_of(name: str, run: Run) -> list[str]:
    """Word error rates, and what a storm left behind."""
    lines = [f"{name}, {level}: WER {percent:.2f} %" for level, percent in run.get("wer", {}).items()]
    for level in run["levels"]:
        if level["scenario"] == "storm":
            after = level["recovered_s"]
            whole = "never whole again" if after is None else f"whole again {after:.2f} s after it"
            lines.append(f"{name}, {level['name']}: {level['num_left']} left, the server was {whole}")
    return lines


def resource_parts(name: str, run: Run) -> list[str]:
    """Of a run on a machine that we watched: what each level needed, and what stopped it."""
    if not any("resources" in level for level in run["levels"]):
        return []
    lines = [
        f"- {level['name']}: {level['bottleneck']}" for level in run["levels"] if level.get("bottleneck")
    ]
    return [f"### {name}: CPU and GPU\n\n" + resource_table(run["levels"]), start_line(run), "\n".join(lines)]


def start_line(run: Run) -> str:
    """How long the start took; nothing where it was not ours."""
    if not run.get("ready_s"):
        return ""
    ray_s = run.get("ray_s")
    own = (
        "Ray's own start included" if ray_s is None else f"of them {ray_s:.1f} s for Ray and Serve themselves"
    )
    return f"From start to ready: {run['ready_s']:.1f} s, {own} (aim: {READY_AIM_S:.0f} s beyond those)."


# ---------------------------------------------------------------- tables
def target_table(runs: dict[str, Run]) -> str:
    """Closed loops beside the published numbers and the aims; a column for each run that has such levels."""
    columns = {name: run for name, run in runs.items() if any(is_aimed_at(level) for level in run["levels"])}
    if not columns:
        return ""
    head = [
        "",
        "best published (H100)",
        "aim (H200)",
        *(run["label"] or name for name, run in columns.items()),
    ]
    rows = []
    for streams, aim in AIMS.items():
        cells = []
        for run in columns.values():
            found = [
                level for level in run["levels"] if is_aimed_at(level) and level["concurrency"] == streams
            ]
            cells.append(measured_cell(streams, found[-1]) if found else "-")
        if any(cell != "-" for cell in cells):
            rows.append([f"{streams} stream{'s' * (streams > 1)}", aim.published, aim.text, *cells])
    return markdown(head, rows) if rows else ""


def is_aimed_at(level: Level) -> bool:
    """Plain closed loops: no clones, no long texts."""
    return bool(level["scenario"] == "closed" and level["name"] == str(level["concurrency"]))


def measured_cell(streams: int, level: Level) -> str:
    if not level["num_ok"]:
        return "no answer"
    missed = AIMS[streams].missed(level)
    return (
        f"TTFA p50 {ms(level['ttfa_s_p50'])}, p95 {ms(level['ttfa_s_p95'])} ms; RTF {level['rtf_mean']:.3f}; "
        f"{level['audio_per_s']:.0f} audio-s/s; {level['num_underruns']} underruns: "
        + ("reached" if not missed else f"missed {', '.join(missed)}")
    )


def level_table(levels: Sequence[tuple[str, Level]]) -> str:
    head = [
        "", "row", "TTFA p50 / p95 / p99 ms", "audible p50 / p95 ms", "server's own first audio p50 / p95 ms", "RTF", "audio-s/s (all busy)", "requests/s",
        "underruns (worst s)", "audio s", "ok / refused / failed", "503 p50 / p99 ms", "client: busiest, late p99",
    ]  # fmt: skip
    rows = []
    for label, level in levels:
        rows.append(
            [
                label,
                level["name"],
                " / ".join(ms(level[f"ttfa_s_p{rank}"]) for rank in (50, 95, 99)),
                " / ".join(ms(level[f"audible_s_p{rank}"]) for rank in (50, 95)),
                " / ".join(ms(level[f"server_first_audio_s_p{rank}"]) for rank in (50, 95)),
                number(level["rtf_mean"], 3),
                f"{number(level['audio_per_s'], 1)} ({number(level['audio_per_s_busy'], 1)})",
                number(level["requests_per_s"], 2),
                f"{level['num_underruns']} ({number(level['worst_underrun_s'], 2)})",
                number(level["mean_audio_s"], 2),
                f"{level['num_ok']} / {level['num_refused']} / {level['num_failed']}",
                " / ".join(ms(level[f"refused_s_p{rank}"]) for rank in (50, 99))
                if level["num_refused"]
                else "-",
                f"{level['client_busiest']:.0%}, {ms(level['client_late_p99_s'])} ms",
            ]
        )
    return markdown(head, rows)


def completeness(runs: dict[str, Run]) -> list[str]:
    """What is missing, or that nothing is; rows that last unlike the others, over all closed loops."""
    lines = []
    for name, run in runs.items():
        for level in run["levels"]:
            where = f"{name}, {level['name']}"
            lines += [f"{where}: {problem}" for problem in level["missing"]]
            lines += [f"{where}: {count} x {error}" for error, count in level["errors"].items()]
    closed = [
        {**level, "name": f"{name}, {level['name']}"}
        for name, run in runs.items()
        for level in run["levels"]
        if is_aimed_at(level)
    ]
    lines += odd_durations(closed)
    return lines or ["Every answer was whole, and rows last alike."]


def environment_line(name: str, run: Run) -> str:
    about = run["environment"]
    versions = ", ".join(f"{package} {version}" for package, version in about["packages"].items())
    gpus = "; ".join(about["gpus"]) or "no GPU"
    return (
        f"{name}: {about['at']}, commit {about['commit']}, Python {about['python']}, {versions}; "
        f"{about['cpus']} CPUs, {gpus}; `{about['command']}`"
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}" if seconds < 0.1 else f"{seconds * 1000:.0f}"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
