"""A real Talker, small or from a checkpoint, its engine, and what came out of it.

The doubles here go in through the engine's own seams: a `Capture` that calls back before each
step, a `Transfer` whose results come late, an `Ops` that writes down what it was asked.
"""

import functools
import json
import math
import queue
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from qwen3tts_core.config import CheckpointConfig, TalkerEngineConfig, TransformerConfig
from qwen3tts_core.engine.talker_engine import TalkerEngine
from qwen3tts_core.engine.talker_runner import TalkerRunner
from qwen3tts_core.errors import CheckpointMismatch
from qwen3tts_core.model.talker import Talker, open_talker
from qwen3tts_core.model.weights import ShapesOnly
from qwen3tts_core.ops.interface import DecodeLayout, LayerKV, PrefillLayout, PrefillSequence
from qwen3tts_core.ops.reference import HostTransfer, ReferenceOps, run_eagerly
from qwen3tts_core.ops.select import Backend
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.text.prompt import SpeechText, build_plan
from qwen3tts_core.text.tokenizer import TextTokenizer
from qwen3tts_core.types import Resume

if not torch.cuda.is_available():
    torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it brings

ROOT = Path(__file__).parents[2]
SEED0 = ROOT / "tests" / "parity" / "golden" / "seed0"
FOLDERS = {"custom_voice": ROOT / "checkpoints" / "tiny", "custom_voice_large": SEED0 / "custom_voice_large"}


# ---------------------------------------------------------------- checkpoints
@functools.cache
def checkpoint_config(variant):
    return CheckpointConfig.from_checkpoint(FOLDERS[variant])


def checkpoint_talker(
    variant, *, ops=None, num_positions=256, device="cpu", dtype=torch.float32, weight_dtype="auto"
):
    return open_talker(
        FOLDERS[variant],
        checkpoint_config(variant),
        num_positions=num_positions,
        ops=ops or ReferenceOps(),
        device=device,
        dtype=dtype,
        weight_dtype=weight_dtype,
    )


@dataclass(frozen=True)
class Case:
    """One golden prompt and what the reference said to it, greedily."""

    plan: object
    codes: np.ndarray
    is_stopped: bool


@functools.cache
def golden(variant):
    """{name: Case}."""
    arrays = np.load(SEED0 / f"{variant}.npz")
    config, tokenizer = checkpoint_config(variant), TextTokenizer.from_checkpoint(FOLDERS[variant])
    cases = {}
    for name in sorted({key.split("/")[1] for key in arrays if key.startswith("case/")}):
        spec = json.loads(str(arrays[f"case/{name}/spec_json"]))
        speech = SpeechText(
            spec["text"],
            voice=spec.get("speaker"),
            language=spec["language"],
            # The 0.6B checkpoints drop instructions in silence; here they are refused (quirk Q12).
            instructions=spec.get("instruct") if variant == "custom_voice_large" else None,
            layout="streaming" if spec["streaming"] else "full",
        )
        first = arrays[f"case/{name}/greedy_first"]
        is_stopped = bool(first[-1] == config.talker.codec_eos_id)
        cases[name] = Case(
            build_plan(config, tokenizer, speech), arrays[f"case/{name}/greedy_codes"], is_stopped
        )
    return cases


@dataclass(frozen=True)
class Forced:
    """One golden case's teacher forcing: eight given frames, and all numbers that the reference got."""

    plan: object
    arrays: dict

    @property
    def codes(self):
        """[8, G] int64."""
        return torch.from_numpy(self.arrays["forced_codes"].astype(np.int64))

    def input_rows(self, talker):
        """Prompt, then the input that follows each frame: [P + 8, D]."""
        trailing = [*self.plan.trailing_ids, *[talker.config.tts_pad_id] * 8][:8]
        frames = talker.frame_embeddings(self.codes.to(talker.device)) + talker.text_features(trailing)
        return torch.cat([talker.prompt_rows(self.plan), frames])


@functools.cache
def forced(variant, name):
    arrays = np.load(SEED0 / f"{variant}.npz")
    wanted = ("forced_codes", "forced_hidden", "forced_logits", "forced_cp_logits")
    return Forced(golden(variant)[name].plan, {key: arrays[f"case/{name}/{key}"] for key in wanted})


# ---------------------------------------------------------------- passes by hand
class OneStream:
    """A cache with one stream in it, NaN wherever it hasn't written, and the layouts of its next rows."""

    page_size = 4

    def __init__(self, stack, num_positions, *, device="cpu", dtype=torch.float32):
        num_pages, self.device = -(-num_positions // self.page_size), device
        shape = (2, num_pages + 1, self.page_size, stack.num_kv_heads, stack.head_dim)
        layers = [torch.full(shape, torch.nan, device=device, dtype=dtype) for _ in range(stack.num_layers)]
        self.cache = [LayerKV(*layer) for layer in layers]
        self.page_table = torch.arange(num_pages, device=device)[None]
        self.num_cached = 0

    def _next(self, num_rows):
        first, self.num_cached = self.num_cached, self.num_cached + num_rows
        return torch.arange(first, first + num_rows, device=self.device)

    def prefill_layout(self, num_rows):
        sequence = PrefillSequence(0, num_rows, self.num_cached)
        positions = self._next(num_rows)
        return PrefillLayout(
            positions, positions, self.page_table, row_sequence=0 * positions, sequences=(sequence,)
        )

    def decode_layout(self):
        position = self._next(1)
        return DecodeLayout(position, position, self.page_table)


def run_rows(talker, rows, cuts):
    """Hidden states of all rows; a cut of 1 goes in as a decode step, a longer one as a prefill."""
    stack, parts = talker.config.talker.transformer, []
    stream = OneStream(stack, len(rows), device=talker.device, dtype=talker.dtype)
    for part in rows.split(cuts):
        layout = stream.decode_layout() if len(part) == 1 else stream.prefill_layout(len(part))
        parts.append(talker.final_norm(talker(part, layout, stream.cache)))
    return torch.cat(parts)


def scripted(codes, log):
    """A code predictor's draw that takes the given frames' codes and keeps the logits it was shown."""

    def draw(logits, group, inputs):
        log.append((group, logits))
        drawn = codes[:, group]
        return drawn, None if inputs is None else inputs[drawn]

    return draw


# ---------------------------------------------------------------- a smaller one, in memory
def small_config(*, width=16, predictor_width=8, num_layers=2, num_groups=4, head_dim=8):
    """The tiny checkpoint's vocabulary and ids around the smallest model that has every part.

    Two layers: in one, no cached key depends on what a prompt's rows attended to.
    """
    base = checkpoint_config("custom_voice")
    stack = TransformerConfig(width, 24, num_layers, 2, 1, head_dim, 1e-6, 10_000.0)
    talker = replace(base.talker, transformer=stack, text_hidden_size=12, num_code_groups=num_groups)
    narrow = replace(stack, hidden_size=predictor_width, num_layers=1)
    predictor = replace(base.code_predictor, transformer=narrow, num_code_groups=num_groups)
    return replace(base, talker=talker, code_predictor=predictor)


class SeededWeights:
    """A TensorSource with every tensor that a talker of this config asks for, drawn from a seed."""

    where = "seeded weights"

    def __init__(self, config, seed=0):
        self._shapes = _asked_for(config)
        self._generator = torch.Generator().manual_seed(seed)
        self._tensors = {name: self._draw(name, shape) for name, shape in sorted(self._shapes.items())}

    def _draw(self, name, shape):
        values = torch.randn(shape, generator=self._generator)
        if "norm" in name:
            return 1 + 0.1 * values
        if "embedding" in name or len(shape) == 1:
            return values
        return 2.0 * values / math.sqrt(shape[-1])  # large enough that context decides the codes

    def shapes(self):
        return self._shapes

    def read(self, name, device):
        return self._tensors[name].to(device)


def _asked_for(config):
    """Load from nothing, and read in the error what was missing."""
    try:
        _build(ShapesOnly("nothing", {}), config)
    except CheckpointMismatch as error:
        lines = [problem.partition(": expected shape ") for problem in error.problems]
        return {name: tuple(json.loads(shape.partition(", got ")[0])) for name, _, shape in lines}
    raise AssertionError("a talker without weights was built")


def _build(source, config, *, ops=None, num_positions=8, device="cpu", dtype=torch.float32):
    return Talker(
        source,
        config,
        num_positions=num_positions,
        ops=ops or ReferenceOps(),
        device=torch.device(device),
        dtype=dtype,
    )


def small_talker(*, ops=None, num_positions=256, seed=0, device="cpu", dtype=torch.float32, **sizes):
    config = small_config(**sizes)
    source = SeededWeights(config, seed)
    return _build(source, config, ops=ops, num_positions=num_positions, device=device, dtype=dtype)


def always_eos(talker):
    """Its favourite code is the end, by far."""
    plain = talker.first_logits

    def first_logits(hidden):
        logits = plain(hidden).clone()
        logits[:, talker.config.talker.codec_eos_id] = 1e4
        return logits

    talker.first_logits = first_logits
    return talker


# ---------------------------------------------------------------- the engine
class Inbox:
    """An Outbox that a test reads with `wait_for`."""

    def __init__(self):
        self._queue = queue.Queue()
        self.items = {}

    def put(self, request_id, item):
        self._queue.put((request_id, item))

    def flush(self):
        pass

    def next(self, timeout_s=120):
        """(request id, item) in the order of arrival; the item is kept for `spoken` too."""
        request_id, item = self._queue.get(timeout=timeout_s)
        self.items.setdefault(request_id, []).append(item)
        return request_id, item

    def is_empty(self):
        return self._queue.empty()

    def wait_for(self, *request_ids, timeout_s=120):
        """{id: Spoken} once all of them have ended."""
        while not all(self.spoken(name).is_over for name in request_ids):
            self.next(timeout_s)
        return {name: self.spoken(name) for name in request_ids}

    def spoken(self, request_id):
        return Spoken(self.items.get(request_id, []))


@dataclass(frozen=True)
class Spoken:
    """One stream's items so far, or at its end."""

    items: list

    @property
    def error(self):
        return next((item for item in self.items if isinstance(item, Exception)), None)

    @property
    def batches(self):
        return [item for item in self.items if not isinstance(item, Exception)]

    @property
    def is_over(self):
        return self.error is not None or self.finish is not None

    @property
    def finish(self):
        return self.batches[-1].finish if self.batches else None

    @property
    def sizes(self):
        return [batch.num_frames for batch in self.batches]

    @property
    def codes(self):
        """[F, G]."""
        parts = [
            np.frombuffer(b.codes, "<i2").reshape(b.num_frames, -1) for b in self.batches if b.num_frames
        ]
        return np.concatenate(parts) if parts else np.empty((0, 0), "<i2")


def engine_config(**changes):
    sizes = {"num_slots": 8, "max_positions": 128, "page_size": 4, "prefill_buckets": (8, 32)}
    return TalkerEngineConfig(**{**sizes, **changes})


def backend_for(talker, *, capture=run_eagerly, transfer=None):
    return Backend(talker.device, talker.ops, capture, transfer or HostTransfer())


def build_engine(talker, config=None, *, backend=None, ramp=None, inbox=None, **parts):
    """An engine that isn't started, and its inbox: what is submitted now joins in this order."""
    inbox = inbox or Inbox()
    runner = TalkerRunner(talker, config or engine_config(), backend or backend_for(talker))
    return TalkerEngine(runner, ramp or ChunkRamp(), inbox, **parts), inbox


@contextmanager
def talking(talker, config=None, **parts):
    engine, inbox = build_engine(talker, config, **parts)
    engine.start()
    try:
        yield engine, inbox
    finally:
        engine.stop()


def speak(talker, requests, config=None, **parts):
    """All of these at once, in this order, to their ends: {id: Spoken}."""
    engine, inbox = build_engine(talker, config, **parts)
    for request in requests:
        engine.submit(request)
    engine.start()
    try:
        return inbox.wait_for(*(request.request_id for request in requests))
    finally:
        engine.stop()


def resumed(request, spoken, num_chunks):
    """The same request, after so many of the chunks that an engine made of it."""
    codes = b"".join(batch.codes for batch in spoken.batches[:num_chunks])
    return replace(request, resume=Resume(codes, tuple(spoken.sizes[:num_chunks])))


# ---------------------------------------------------------------- doubles at the seams
class StepHook:
    """A `Capture` that calls `before(step)` in the engine's thread ahead of each decode step.

    Steps count from 0 after the warm-up, which launches every bucket once. capture: what turns the
    step itself into a launch.
    """

    def __init__(self, before, num_buckets, capture=run_eagerly):
        self._before, self._step, self._capture = before, -num_buckets, capture

    def __call__(self, fn, name):
        launch = self._capture(fn, name)
        if not name.startswith("decode step"):
            return launch

        def hooked():
            step, self._step = self._step, self._step + 1
            if step >= 0:
                self._before(step)
            launch()

        return hooked


class LateTransfer:
    """A `Transfer` from a device that is never done when asked: whoever wants a result must wait for it.

    As on a busy GPU: the host reads a step while the next one runs. Two buffers take turns, so a result
    is gone once two more were started.
    """

    def __init__(self):
        self._buffers, self.num_started = {}, 0

    def start(self, result):
        number, self.num_started = self.num_started, self.num_started + 1
        buffer = self._buffers.setdefault((number % 2, result.shape), torch.empty_like(result))
        buffer.copy_(result)
        return _Late(self, number, buffer)


@dataclass(frozen=True)
class _Late:
    transfer: LateTransfer
    number: int
    buffer: torch.Tensor

    def is_ready(self):
        return False

    def wait(self):
        assert self.transfer.num_started <= self.number + 2, "the result was overwritten"
        return self.buffer.numpy()


@dataclass
class RecordingOps(ReferenceOps):
    """Keeps the logits of every draw by the row's seed: {seed: [tensors in order]}."""

    trim_context: bool = True
    logits: dict = field(default_factory=dict)

    def __post_init__(self):
        super().__init__(trim_context=self.trim_context)

    def frame_noise(self, key, *sizes):
        self._seeds = key.seed.tolist()
        return super().frame_noise(key, *sizes)

    def draw_first(self, logits, *others):
        self._keep(logits)
        return super().draw_first(logits, *others)

    def draw_next(self, logits, *others):
        self._keep(logits)
        return super().draw_next(logits, *others)

    def _keep(self, logits):
        for seed, row in zip(self._seeds, logits, strict=True):
            self.logits.setdefault(seed, []).append(row.clone())
