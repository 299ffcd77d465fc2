"""The Talker engine alone on one GPU: ms per frame, host time, prefill, start.

    python -m load_tests.bench_talker --checkpoint DIR [--batches 1,8,32,64,128] [--no-plain]
        [--weight-dtype float8_e4m3] [--prefill-attention flashinfer] [--decode-attention flashinfer]

Question: how near is a captured frame to reading the weights once, and does the host keep out of the
way? Per batch size: the captured step replayed back to back (events on the device), the whole engine
loop on its thread (wall and CPU time a step), the same while requests come and go, alone and beside a thread
that wants the interpreter as a server's event loop does, and, in the same run, the same model in plain PyTorch
modules inside a graph. The memory floor is the bytes a frame must read over the copy bandwidth measured
here. With --weight-dtype also what it does to the logits: frames forced on the model, in that dtype and in
bfloat16, beside float32; and no plain modules, which read no float8. Random weights do: the EOS row never wins, so the frame limit sets the lengths.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import queue
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deployments.threads import let_the_engine_in
from load_tests.logit_error import errors, forced_logits
from qwen3tts_core.config import CheckpointConfig, TalkerEngineConfig
from qwen3tts_core.engine.scheduler import Scheduler
from qwen3tts_core.engine.talker_engine import TalkerEngine
from qwen3tts_core.engine.talker_runner import TalkerRunner
from qwen3tts_core.model.talker import Talker, open_talker
from qwen3tts_core.ops.interface import Ops, PendingTransfer
from qwen3tts_core.ops.reference import ReferenceOps
from qwen3tts_core.ops.select import Backend, select_backend
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.types import FrameBatch, PrefillPlan, Sampling, SpeechRequest

PROMPT_ROWS = 41  # 40 of them prefilled; the last is the first step's input
CHURNS = {"coming and going": 0.0, "beside a thread that is busy 80 %": 0.8}
PLAIN_POSITIONS = 256  # plain attention reads every page of the table: keep it small, to be fair


def make_request(name: str, frames: int, seed: int) -> SpeechRequest:
    plan = PrefillPlan((100,) * PROMPT_ROWS, (-1,) * PROMPT_ROWS, (5,) * 10)
    return SpeechRequest(name, plan, Sampling(), seed, frames)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large device copy."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ms = time_on_device(lambda: target.copy_(source), 10)
    return 2 * source.numel() / ms * 1e3


def time_on_device(run, count: int) -> float:
    """ms per run."""
    run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def frame_bytes(talker: Talker) -> int:
    """Weights that one frame must read: every layer once, the predictor's once per group."""

    def size(module: nn.Module) -> int:
        return sum(p.nbytes for p in module.parameters())

    predictor = talker.code_predictor
    groups = predictor.config.num_code_groups - 1
    return (
        size(talker.layers)
        + talker.codec_head.nbytes
        + groups * size(predictor.layers)
        + predictor.heads.nbytes
    )


def running(runner: TalkerRunner, batch: int, frames: int):
    """`batch` requests, prefilled; returns (placed, ms of the prefills)."""
    scheduler = Scheduler(runner.config)
    for i in range(batch):
        scheduler.enqueue(make_request(f"r{i}", frames, i))
    for placed in scheduler.admit():
        runner.admit(placed)
    torch.cuda.synchronize()
    start = time.perf_counter()
    while pieces := scheduler.next_prefill():
        runner.prefill(pieces)
    torch.cuda.synchronize()
    return scheduler.running(), (time.perf_counter() - start) * 1e3


def replay_ms(runner: TalkerRunner, batch: int, steps: int) -> float:
    """The captured step alone, back to back."""
    placed, _ = running(runner, batch, steps + 10)
    assert len(placed) == batch
    last = runner.launch(placed)
    last.wait()
    decode = next(step for step in runner._decode_steps if step.size >= batch)
    return time_on_device(decode.launch, steps)


class Sink:
    """An outbox that only counts; `flush` runs on the engine's thread, once a turn."""

    def __init__(self, num_requests: int) -> None:
        self._left = num_requests
        self.done = threading.Event()
        self.turns: list[tuple[float, float]] = []

    def put(self, request_id: str, item: FrameBatch | Exception) -> None:
        if isinstance(item, Exception):
            raise item
        self._left -= item.finish is not None

    def flush(self) -> None:
        self.turns.append((time.perf_counter(), time.thread_time()))
        if self._left == 0:
            self.done.set()


class HostParts:
    """CPU time of the engine's thread in the calls that leave Python: where the host's share of a step goes."""

    def __init__(self, runner: TalkerRunner) -> None:
        self._runner, self._backend = runner, runner.backend
        self._launches = [decode.launch for decode in runner._decode_steps]
        self.seconds = {"launch": 0.0, "start copy": 0.0, "wait": 0.0}

    def __enter__(self) -> dict[str, float]:
        for decode in self._runner._decode_steps:
            decode.launch = self._timed("launch", decode.launch)
        self._runner.backend = replace(self._backend, transfer=self)
        return self.seconds

    def __exit__(self, *_: object) -> None:
        for decode, launch in zip(self._runner._decode_steps, self._launches, strict=True):
            decode.launch = launch
        self._runner.backend = self._backend

    def start(self, result: Tensor) -> PendingTransfer:
        pending = self._timed("start copy", self._backend.transfer.start)(result)
        return TimedWait(pending.is_ready, self._timed("wait", pending.wait))

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            result = call(*arguments)
            self.seconds[part] += time.thread_time() - began
            return result

        return timed


class TimedWait(NamedTuple):
    is_ready: Callable[[], bool]
    wait: Callable[[], NDArray[Any]]


def engine_loop(runner: TalkerRunner, batch: int, frames: int) -> tuple[float, float, dict[str, float]]:
    """(wall ms, host CPU ms, its parts) per step of the whole engine, prefill and warm-up left out."""
    with HostParts(runner) as parts:
        turns = engine_turns(runner, batch, frames)
    steady = turns[20:-5]
    steps = len(steady) - 1
    wall, cpu = ((steady[-1][i] - steady[0][i]) / steps * 1e3 for i in (0, 1))
    return wall, cpu, {part: seconds / len(turns) * 1e3 for part, seconds in parts.items()}


def engine_turns(runner: TalkerRunner, batch: int, frames: int) -> list[tuple[float, float]]:
    sink = Sink(batch)
    engine = TalkerEngine(runner, ChunkRamp(), sink)
    for i in range(batch):
        engine.submit(make_request(f"e{i}", frames, i))
    engine.start()
    if not sink.done.wait(120):
        raise SystemExit(f"batch {batch}: not finished after 120 s")
    engine.stop()
    return sink.turns


class Followed:
    """An outbox in which each request that ends is followed by a new one, from a thread of its own, as a server's."""

    def __init__(self, batch: int, seed: int) -> None:
        self._rng, self._numbers = random.Random(seed), itertools.count()
        self._ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_over = False
        self.turns: list[tuple[float, float]] = []
        for _ in range(batch):
            self._ended.put(True)
        self._batch = batch

    def put(self, request_id: str, item: FrameBatch | Exception) -> None:
        if isinstance(item, Exception):
            if not self._is_over:
                raise item
        elif item.finish is not None:
            self._ended.put(True)

    def flush(self) -> None:
        self.turns.append((time.perf_counter(), time.thread_time()))

    def keep_full(self, engine: TalkerEngine) -> None:
        """Until `end`. The first ones are cut short, so that they don't end together."""
        while self._ended.get():
            number, frames = next(self._numbers), self._rng.randint(60, 112)
            if number < self._batch:
                frames = self._rng.randint(1, frames)
            engine.submit(make_request(f"f{number}", frames, number))

    def end(self) -> None:
        self._is_over = True
        self._ended.put(False)


def churn(runner: TalkerRunner, batch: int, seconds: float, busy: float) -> dict[str, float]:
    """The engine with `batch` streams at any time, requests of 60 to 112 frames coming and going.

    busy: the share of its time for which another thread of the process wants the interpreter, as an event loop does.
    """
    sink = Followed(batch, seed=batch)
    engine = TalkerEngine(runner, ChunkRamp(), sink)
    is_over = threading.Event()
    threads = [
        threading.Thread(target=sink.keep_full, args=(engine,)),
        threading.Thread(target=burn, args=(busy, is_over)),
    ]
    engine.start()
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    before, first = engine.stats(), len(sink.turns)
    time.sleep(seconds)
    after, last = engine.stats(), len(sink.turns) - 1
    sink.end()
    is_over.set()
    for thread in threads:
        thread.join()
    engine.stop()
    (wall_0, cpu_0), (wall_1, cpu_1) = sink.turns[first], sink.turns[last]
    frames_per_s = (after.frames - before.frames) / (wall_1 - wall_0)
    return {
        "audio_per_s": frames_per_s / 12.5,
        "ms_per_step": (wall_1 - wall_0) / (after.steps - before.steps) * 1e3,
        "host_cpu_ms": (cpu_1 - cpu_0) / (last - first) * 1e3,
        "rows_per_step": (after.rows - before.rows) / (after.steps - before.steps),
    }


def burn(share: float, is_over: threading.Event, period_s: float = 0.002) -> None:
    while share and not is_over.is_set():
        end = time.thread_time() + share * period_s
        while time.thread_time() < end:
            pass
        time.sleep((1 - share) * period_s)


def prefill_ms(runner: TalkerRunner) -> float:
    return statistics.median(running(runner, 1, 8)[1] for _ in range(9))


def plain_runner(talker: Talker, config: TalkerEngineConfig, backend: Backend) -> TalkerRunner:
    """The same weights through plain PyTorch modules, in the same kind of graph."""
    plain = copy.copy(talker)
    plain.ops = ReferenceOps(trim_context=False)
    small = replace(config, max_positions=PLAIN_POSITIONS, num_pages=0, prefill_buckets=(64,))
    return TalkerRunner(plain, small, replace(backend, ops=plain.ops))


def logit_errors(folder: Path, checkpoint: CheckpointConfig, talker: Talker, name: str) -> dict:
    """Of `talker` and of the same checkpoint in bfloat16, against plain modules in float32 on this GPU."""
    plan = make_request("forced", 1, 0).plan
    vocab = checkpoint.code_predictor.codebook_size
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, vocab, (24, checkpoint.talker.num_code_groups), generator=generator)

    def logits(model: Talker):
        on_device = codes.to(model.device)
        rows = torch.cat([model.prompt_rows(plan), model.frame_rows(plan, on_device)])
        return forced_logits(model, rows, on_device)

    def opened(ops: Ops, dtype: torch.dtype) -> Talker:
        return open_talker(folder, checkpoint, num_positions=256, ops=ops, device=talker.device, dtype=dtype)

    with torch.inference_mode():
        ours = {name: logits(talker), "bfloat16": logits(opened(talker.ops, torch.bfloat16))}
        exact = logits(opened(ReferenceOps(), torch.float32))
    found = {dtype: errors(made, exact) for dtype, made in ours.items()}
    for dtype, groups in found.items():
        for group, error in groups.items():
            print(
                f"logits of {group:5s} in {dtype:12s} rms {error['rms']:.2%}, worst {error['worst']:.2%} of the scale"
                f", same code where float32 is sure: {error['agreement']:.2%}"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--batches", default="1,8,32,64,128")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--weight-dtype", default="auto", choices=["auto", "float8_e4m3"])
    parser.add_argument("--prefill-attention", default="own", choices=["own", "flashinfer"])
    parser.add_argument("--decode-attention", default="own", choices=["own", "flashinfer"])
    parser.add_argument(
        "--churn-s", type=float, default=3.0, help="seconds for each figure of coming and going"
    )
    parser.add_argument("--no-plain", action="store_true", help="skip the plain-modules baseline")
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    if not torch.cuda.is_available():
        raise SystemExit("bench_talker needs a GPU, none is visible")

    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    start = time.perf_counter()
    checkpoint = CheckpointConfig.from_checkpoint(args.checkpoint)
    attention = {"prefill_attention": args.prefill_attention, "decode_attention": args.decode_attention}
    backend = select_backend("cuda", **attention)
    talker = open_talker(
        args.checkpoint, checkpoint, num_positions=1024, ops=backend.ops, device=backend.device,
        dtype=getattr(torch, args.dtype), weight_dtype=args.weight_dtype,
    )  # fmt: skip
    torch.cuda.synchronize()
    load_s = time.perf_counter() - start
    config = TalkerEngineConfig(
        num_slots=max(batches),
        max_positions=1024,
        prefill_buckets=(32, 64, 128, 256, 512, 1024),
        **attention,
    )
    runner = TalkerRunner(talker, config, backend)
    runner.warm_up()
    torch.cuda.synchronize()
    ready_s = time.perf_counter() - start
    floor_ms = frame_bytes(talker) / bandwidth * 1e3
    print(
        f"copy {bandwidth / 1e12:.2f} TB/s, floor {floor_ms:.2f} ms a frame, load {load_s:.1f} s, ready {ready_s:.1f} s"
    )

    rows = []
    for batch in batches:
        ms = replay_ms(runner, batch, args.steps)
        wall, cpu, parts = engine_loop(runner, batch, args.steps + 40)
        rows.append(
            {
                "batch": batch,
                "ms_per_frame": ms,
                "engine_wall_ms": wall,
                "host_cpu_ms": cpu,
                "host_parts_ms": parts,
                "gpu_busy": ms / wall,
            }
        )
    prefill = prefill_ms(runner)
    let_the_engine_in()
    for row in rows:
        for name, busy in CHURNS.items():
            row[name] = churn(runner, row["batch"], args.churn_s, busy)
    del runner
    torch.cuda.empty_cache()
    if not args.no_plain and args.weight_dtype == "auto":
        plain = plain_runner(talker, replace(config, decode_buckets=tuple(batches)), backend)
        for row in rows:
            row["plain_ms"] = replay_ms(plain, row["batch"], 20)
    for row in rows:
        plain_ms = row.get("plain_ms", float("nan"))
        print(
            f"batch {row['batch']:4d}  {row['ms_per_frame']:6.3f} ms/frame  {row['ms_per_frame'] / floor_ms:5.2f} x floor"
            f"  engine {row['engine_wall_ms']:6.3f} ms, busy {row['gpu_busy']:4.0%}, host {row['host_cpu_ms']:5.3f} ms"
            f" ({', '.join(f'{part} {ms:.3f}' for part, ms in row['host_parts_ms'].items())})"
            f"  plain {plain_ms:6.2f} ms = {plain_ms / row['ms_per_frame']:4.2f} x"
        )
        for name in CHURNS:
            print(
                f"            {name}: {row[name]['audio_per_s']:6.0f} audio-s/s, {row[name]['rows_per_step']:5.1f} rows in"
                f" {row[name]['ms_per_step']:6.3f} ms a step, host {row[name]['host_cpu_ms']:5.3f} ms"
            )
    print(f"prefill of {PROMPT_ROWS - 1} rows: {prefill:.2f} ms")
    result = {
        "bench": "talker", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "python": sys.version.split()[0], "dtype": args.dtype, "weight_dtype": args.weight_dtype, **attention, "copy_tb_s": bandwidth / 1e12, "floor_ms": floor_ms,
        "load_s": load_s, "ready_s": ready_s, "prefill_40_ms": prefill, "rows": rows,
    }  # fmt: skip
    if args.weight_dtype != "auto":
        result["logit_error"] = logit_errors(args.checkpoint, checkpoint, talker, args.weight_dtype)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
