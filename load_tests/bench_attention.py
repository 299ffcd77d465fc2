"""The talker's attention alone on one GPU, inside CUDA graphs: our kernels beside FlashInfer's.

    python -m load_tests.bench_attention --checkpoint DIR [--steps 50]

Question: which attends faster in a captured step, prefill and decode? One graph holds the attention of
all layers, each with a cache of its own, so that nothing stays in L2 from one replay to the next: q/k
norm, rotary positions, the cache write and attending, as `Ops.attention` does it. Only the checkpoint's
config is read. A plan, which FlashInfer needs before every launch, is host time and is measured apart.
`error`: the largest difference to our result, relative to its largest value.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qwen3tts_core.config import CheckpointConfig, TransformerConfig
from qwen3tts_core.model.layers import rope_table
from qwen3tts_core.ops.attention_plan import AttentionPlanner, PlannedSequence
from qwen3tts_core.ops.cuda.backend import CudaOps, GraphCapture
from qwen3tts_core.ops.cuda.flashinfer_attention import FlashInferAttention
from qwen3tts_core.ops.interface import (
    Capture,
    DecodeLayout,
    LayerKV,
    Ops,
    PrefillLayout,
    PrefillSequence,
)

PAGE_SIZE = 16
MAX_POSITIONS = 1024
PREFILLS = ((64, 1, 40), (256, 1, 256), (256, 6, 40), (1024, 1, 1000), (1024, 25, 40))
"""Bucket, sequences in the pack, rows of each."""
DECODES = tuple((rows, context) for context in (128, 700) for rows in (1, 8, 32, 64, 128))


@dataclass(frozen=True)
class Heads:
    """A talker's attention: heads, KV heads, head size, layers."""

    num: int
    num_kv: int
    dim: int
    layers: int

    @classmethod
    def of(cls, config: TransformerConfig) -> Heads:
        return cls(config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers)


class Case:
    """Inputs of one step over all layers. rows: packed, padding behind; contexts end at each stream's last row."""

    def __init__(self, heads: Heads, caches: Sequence[LayerKV], rope, bucket: int, streams, seed: int = 0):
        """streams: [(new rows, context)]; a context of one row each makes a decode step, else a prefill."""
        device, dtype = caches[0].key.device, caches[0].key.dtype
        generator = torch.Generator(device).manual_seed(seed)
        width = (heads.num + 2 * heads.num_kv) * heads.dim
        self.caches, self.rope, self.bucket = caches, rope, bucket
        self.qkv = torch.randn(
            heads.layers, bucket, width, generator=generator, device=device, dtype=torch.float32
        ).to(dtype)
        self.norms = [torch.ones(heads.dim, device=device, dtype=dtype) for _ in range(2)]
        num_table_pages, trash = MAX_POSITIONS // PAGE_SIZE, len(caches[0].key) - 1
        order = torch.randperm(trash, generator=torch.Generator().manual_seed(seed)).tolist()
        self.planned, positions, places, owner, table = [], [], [], [], []
        for i, (rows, context) in enumerate(streams):
            pages = [order.pop() for _ in range(-(-context // PAGE_SIZE))]
            self.planned.append(PlannedSequence(rows, context, pages))
            span = range(context - rows, context)
            positions += span
            places += [pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in span]
            owner += [i] * rows
            table.append(pages + [trash] * (num_table_pages - len(pages)))
        self.num_rows, padding = len(owner), bucket - len(owner)
        table += [[trash] * num_table_pages] * (len(table) == 0)
        ints = [
            torch.tensor(values + fill * padding, device=device)
            for values, fill in ((positions, [0]), (places, [trash * PAGE_SIZE]), (owner, [-1]))
        ]
        self.layout: DecodeLayout | PrefillLayout
        if all(rows == 1 for rows, _ in streams):
            assert not padding
            self.layout = DecodeLayout(ints[0], ints[1], torch.tensor(table, device=device))
        else:
            table += [[trash] * num_table_pages] * (32 - len(table))  # as many slots as an engine would have
            first, sequences = 0, []
            for rows, context in streams:
                sequences.append(PrefillSequence(first, rows, context - rows))
                first += rows
            self.layout = PrefillLayout(
                ints[0], ints[1], torch.tensor(table, device=device), ints[2], tuple(sequences)
            )

    def plan(self, planner: AttentionPlanner | None) -> None:
        if isinstance(self.layout, PrefillLayout):
            if planner is not None and planner.plans_prefill:
                planner.plan_prefill(self.bucket, self.planned)
        elif planner is not None and planner.plans_decode:
            planner.plan_decode(self.bucket, self.planned)

    def run(self, ops: Ops, results: list[Tensor]) -> None:
        results[:] = [
            ops.attention(qkv, *self.norms, 1e-6, self.rope, self.layout, kv)
            for qkv, kv in zip(self.qkv, self.caches, strict=True)
        ]


@dataclass(frozen=True)
class Timing:
    """ms of the captured step over all layers, host ms of its plan, and its result."""

    step_ms: float
    plan_ms: float
    result: Tensor


def measure(
    case: Case, ops: Ops, capture: Capture, milliseconds: Callable[[Callable[[], None]], float]
) -> Timing:
    results: list[Tensor] = []
    launch = capture(lambda: case.run(ops, results), "attention")
    case.plan(ops.planner)
    launch()
    result = torch.stack(results)[:, : case.num_rows].float().clone()
    step_ms = milliseconds(launch)
    plans = []
    for _ in range(21):
        start = time.perf_counter()
        case.plan(ops.planner)
        plans.append((time.perf_counter() - start) * 1e3)
    return Timing(step_ms, statistics.median(plans) if ops.planner is not None else 0.0, result)


def on_device(steps: int) -> Callable[[Callable[[], None]], float]:
    """ms per run, by the device's clock; the median of five rounds."""

    def milliseconds(run: Callable[[], None]) -> float:
        run()
        rounds = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(steps):
                run()
            end.record()
            torch.cuda.synchronize()
            rounds.append(start.elapsed_time(end) / steps)
        return statistics.median(rounds)

    return milliseconds


def caches_for(heads: Heads, num_pages: int, device: torch.device, dtype: torch.dtype) -> list[LayerKV]:
    shape = (num_pages + 1, PAGE_SIZE, heads.num_kv, heads.dim)
    return [
        LayerKV(*(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)))
        for _ in range(heads.layers)
    ]


def compare(kind: str, name: str, case: Case, contenders: dict[str, Ops], capture, milliseconds) -> dict:
    """One line of the table."""
    timings = {who: measure(case, ops, capture, milliseconds) for who, ops in contenders.items()}
    own = timings["own"]
    scale = float(own.result.abs().max())
    line = {"kind": kind, "case": name, "bucket": case.bucket, "num_rows": case.num_rows}
    parts = []
    for who, timing in timings.items():
        error = float((timing.result - own.result).abs().max()) / scale
        line[who] = {"step_ms": timing.step_ms, "plan_ms": timing.plan_ms, "error": error}
        plan = f", plan {timing.plan_ms:5.3f} ms, error {error:.1e}" if who != "own" else ""
        parts.append(f"{who} {timing.step_ms:7.3f} ms{plan}")
    print(f"{kind:8s}{name:24s}{'  |  '.join(parts)}", flush=True)
    return line


def bench(
    heads: Heads, contenders_for, capture, milliseconds, device, dtype, prefills, decodes
) -> list[dict]:
    """contenders_for(kind): {name: Ops}, "own" among them."""
    most = max(
        [count * -(-rows // PAGE_SIZE) for _, count, rows in prefills]
        + [rows * -(-context // PAGE_SIZE) for rows, context in decodes]
    )
    caches = caches_for(heads, most, device, dtype)
    rope = rope_table(
        TransformerConfig(heads.num * heads.dim, 1, heads.layers, heads.num, heads.num_kv, heads.dim, 1e-6, 1e6),
        MAX_POSITIONS, device, dtype,
    )  # fmt: skip
    lines = []
    for bucket, count, rows in prefills:
        case = Case(heads, caches, rope, bucket, [(rows, rows)] * count)
        name = f"{count} x {rows} rows in {bucket}"
        lines.append(compare("prefill", name, case, contenders_for("prefill"), capture, milliseconds))
    for rows, context in decodes:
        case = Case(heads, caches, rope, rows, [(1, context)] * rows)
        name = f"{rows} rows, context {context}"
        lines.append(compare("decode", name, case, contenders_for("decode"), capture, milliseconds))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_attention needs a GPU, none is visible")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    heads = Heads.of(CheckpointConfig.from_checkpoint(args.checkpoint).talker.transformer)

    def ops_with(**planner) -> CudaOps:
        attention = FlashInferAttention(device, **planner) if planner else None
        return CudaOps(device, num_processors=processors, planner=attention)

    own = ops_with()
    prefill = {"own": own, "flashinfer": ops_with(prefill=True, decode=False)}
    decode = {
        "own": own,
        "flashinfer": ops_with(prefill=False, decode=True),
        "flashinfer, tensor cores": ops_with(prefill=False, decode=True, tensor_core_decode=True),
    }
    import flashinfer

    print(
        f"{heads}, bfloat16; ms of all layers; {torch.cuda.get_device_name()}, flashinfer {flashinfer.__version__}"
    )
    with torch.inference_mode():
        lines = bench(
            heads,
            {"prefill": prefill, "decode": decode}.__getitem__,
            GraphCapture(device),
            on_device(args.steps),
            device,
            torch.bfloat16,
            PREFILLS,
            DECODES,
        )
    result = {
        "bench": "attention", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "flashinfer": flashinfer.__version__, "python": sys.version.split()[0], "layers": heads.layers, "rows": lines,
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
