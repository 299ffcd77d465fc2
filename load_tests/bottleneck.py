"""What a level needed of the machine, and which part of it was the first to be full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

GPU_FULL = 0.9
CORE_FULL = 0.8
"""Of one core: a Python process that is there waits for its own lock; a thread is at its end."""
MACHINE_FULL = 0.85
PYTHON_PARTS = ("Ingress", "Codec", "Talker", "proxy", "driver", "controller", "client")


def name_bottleneck(resources: dict[str, Any]) -> str:
    """One line: what was full, else that nothing was."""
    found = []
    gpu = resources.get("gpu")
    if gpu is not None and gpu["busy"] >= GPU_FULL:
        found.append(f"the GPU, busy {gpu['busy']:.0%}")
    for part in resources["parts"]:
        name = part["part"]
        if part["busiest_thread"] >= CORE_FULL:
            found.append(f"a thread of {name}, {part['busiest_thread']:.2f} cores")
        elif part["busiest_process"] >= CORE_FULL and name.startswith(PYTHON_PARTS):
            found.append(f"{name}'s GIL, {part['busiest_process']:.2f} cores over its threads")
    if resources["machine_cores_used"] >= MACHINE_FULL * resources["cpus"]:
        ours = resources["cores_used"]
        found.append(f"all {resources['cpus']} CPUs, of which {ours:.1f} by the server and its client")
    if found:
        return "full: " + "; ".join(found)
    busiest = max(resources["parts"], key=lambda part: float(part["busiest_process"]), default=None)
    told = (
        f", the busiest process is {busiest['part']} with {busiest['busiest_process']:.2f} cores"
        if busiest
        else ""
    )
    return "nothing was full: time passes in waiting between processes" + told


def resource_table(levels: Sequence[dict[str, Any]]) -> str:
    """Markdown: CPU milliseconds per second of audio by part, cores of its busiest process (thread); GPU and engines."""
    watched = [level for level in levels if "resources" in level]
    names: list[str] = []
    for level in watched:
        names += [part["part"] for part in level["resources"]["parts"] if part["part"] not in names]
    shown = [name for name in names if any(_matters(level, name) for level in watched)]
    head = [
        "CPU ms per audio-s; cores of its busiest process (thread)",
        *(str(level["name"]) for level in watched),
    ]
    rows = [[name, *(_part_cell(level, name) for level in watched)] for name in shown]
    rows.append(["all", *(_total_cell(level["resources"]) for level in watched)])
    rows.append(["GPU busy", *(_gpu_cell(level["resources"]) for level in watched)])
    engine_rows: dict[str, None] = {}
    for level in watched:
        engine_rows |= dict.fromkeys(level["resources"].get("engines", {}))
    rows += [
        [name, *(str(level["resources"].get("engines", {}).get(name, "-")) for level in watched)]
        for name in engine_rows
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def engine_figures(growth: dict[str, dict[str, float]], wall_s: float) -> dict[str, float]:
    """What the engines' counters say of a span: how full steps were, and how long each took by the wall clock."""
    figures: dict[str, float] = {}
    for deployment, counters in growth.items():
        steps = counters.get("steps") or counters.get("batches")
        if not steps:
            continue
        unit = "step" if counters.get("steps") else "batch"
        figures[f"{deployment} ms per {unit}, wall"] = round(1000 * wall_s / steps, 2)
        figures[f"{deployment} frames per {unit}"] = round(counters.get("frames", 0) / steps, 2)
        if "chunks" in counters:
            figures[f"{deployment} chunks per {unit}"] = round(counters["chunks"] / steps, 2)
        for kind in ("rows", "frames"):
            if padded := counters.get(f"padded_{kind}"):
                figures[f"{deployment} padded {kind} per {unit}"] = round(padded / steps, 2)
    return figures


def _find(level: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((part for part in level["resources"]["parts"] if part["part"] == name), None)


def _matters(level: dict[str, Any], name: str) -> bool:
    part = _find(level, name)
    return part is not None and part["busiest_process"] >= 0.005


def _part_cell(level: dict[str, Any], name: str) -> str:
    part = _find(level, name)
    if part is None:
        return "-"
    per_audio_s = _per_audio_s(part["cpu_s"], level["resources"])
    several = f" x{part['num_processes']}" if part["num_processes"] > 1 else ""
    return f"{per_audio_s}; {part['busiest_process']:.2f} ({part['busiest_thread']:.2f}){several}"


def _total_cell(resources: dict[str, Any]) -> str:
    cpu_s = sum(part["cpu_s"] for part in resources["parts"])
    return f"{_per_audio_s(cpu_s, resources)}; {resources['cores_used']:.2f} of {resources['cpus']}"


def _per_audio_s(cpu_s: float, resources: dict[str, Any]) -> str:
    return f"{1000 * cpu_s / resources['audio_s']:.2f}" if resources["audio_s"] else "-"


def _gpu_cell(resources: dict[str, Any]) -> str:
    gpu = resources.get("gpu")
    if gpu is None:
        return "not known"
    return f"{gpu['busy']:.0%}, {gpu['memory_mib'] / 1024:.1f} GiB, {gpu['power_w']:.0f} W, {gpu['sm_mhz']:.0f} MHz"
