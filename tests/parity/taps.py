"""The real Talker engine with measuring points: what every step saw, and codes forced on it.

Nothing of the engine is replaced. `TappedOps` hands every operation on to the backend's and notes
the logits that are drawn from; to force a code it hands on logits that leave no choice. Hooks on
the talker note what goes through its layers; `TappedRunner` says whose rows those were.
"""

import queue
from dataclasses import dataclass, field, fields, replace
from functools import partial

import numpy as np
import torch

from qwen3tts_core.config import TalkerEngineConfig
from qwen3tts_core.engine.talker_engine import TalkerEngine
from qwen3tts_core.engine.talker_runner import TalkerRunner
from qwen3tts_core.model.talker import open_talker
from qwen3tts_core.ops.interface import DrawRows
from qwen3tts_core.ops.reference import run_eagerly
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp

_TIMEOUT_S = 240


@dataclass
class Trace:
    """What happened to one request. Layer rows: [layers + 1, n, D], the last before the final norm.

    forced: [n, G] codes of the first frames, -1 where the draw is free, or None. first_logits: [V]
    per step; next_logits: [G - 1, C] per step. first_draws: per step how group 0 was drawn.
    """

    forced: np.ndarray | None = None
    layer_rows: list = field(default_factory=list)
    first_logits: list = field(default_factory=list)
    first_draws: list = field(default_factory=list)
    next_logits: list = field(default_factory=list)
    frames: list = field(default_factory=list)
    finish: str | None = None

    def forced_code(self, group):
        """The code of the step that is running now, or None if it is free."""
        step = len(self.first_logits) - 1
        if self.forced is None or step >= len(self.forced) or self.forced[step, group] < 0:
            return None
        return int(self.forced[step, group])


@dataclass(frozen=True)
class FirstDraw:
    """What the engine hands to `Ops.draw_first` beside the logits, for one row of one step."""

    seen: torch.Tensor
    penalty: torch.Tensor
    forbid_eos: torch.Tensor
    draw: DrawRows

    @classmethod
    def of_row(cls, row, seen, penalty, forbid_eos, draw):
        one = slice(row, row + 1)
        settings = {f.name: getattr(draw, f.name)[one].clone() for f in fields(draw)}
        return cls(seen[one].clone(), penalty[one].clone(), forbid_eos[one].clone(), DrawRows(**settings))

    @classmethod
    def stack(cls, draws):
        """Steps as rows."""
        settings = {f.name: torch.cat([getattr(d.draw, f.name) for d in draws]) for f in fields(DrawRows)}
        tensors = (torch.cat([getattr(d, name) for d in draws]) for name in ("seen", "penalty", "forbid_eos"))
        return cls(*tensors, DrawRows(**settings))


class Taps:
    """Where the measuring points write. traces: of the rows in the step that is running."""

    def __init__(self):
        self.traces = []
        self._layer_inputs = []
        self.layer_rows = None

    def watch(self, talker):
        talker.register_forward_pre_hook(lambda module, args: self._layer_inputs.clear())
        for layer in talker.layers:
            layer.register_forward_pre_hook(lambda module, args: self._layer_inputs.append(args[0].clone()))
        talker.register_forward_hook(self._note_layers)

    def _note_layers(self, module, args, output):
        self.layer_rows = torch.stack([*self._layer_inputs, output])


class TappedOps:
    """`Ops` that notes the logits of every draw. Everything else is the backend's own."""

    def __init__(self, ops, taps):
        self._ops, self._taps = ops, taps

    def __getattr__(self, name):
        return getattr(self._ops, name)

    def draw_first(self, logits, seen, penalty, forbid_eos, allowed, eos_id, draw, noise):
        for row, trace in enumerate(self._taps.traces):
            trace.first_logits.append(logits[row].clone())
            trace.first_draws.append(FirstDraw.of_row(row, seen, penalty, forbid_eos, draw))
            trace.next_logits.append([])
        logits = self._leave_no_choice(logits, 0)
        return self._ops.draw_first(logits, seen, penalty, forbid_eos, allowed, eos_id, draw, noise)

    def draw_next(self, logits, draw, noise, group, inputs):
        for row, trace in enumerate(self._taps.traces):
            trace.next_logits[-1].append(logits[row].clone())
        return self._ops.draw_next(self._leave_no_choice(logits, group), draw, noise, group, inputs)

    def _leave_no_choice(self, logits, group):
        logits = logits.clone()
        for row, trace in enumerate(self._taps.traces):
            code = trace.forced_code(group)
            if code is not None:
                logits[row] = -1e4
                logits[row, code] = 1e4
        return logits


class TappedRunner(TalkerRunner):
    def __init__(self, talker, config, backend, taps):
        super().__init__(talker, config, backend)
        self._taps = taps
        self.traces = {}
        for kv in self.cache:  # so that a read past what was written is heard at once
            kv.key.fill_(float("nan"))
            kv.value.fill_(float("nan"))

    def prefill(self, pieces):
        super().prefill(pieces)
        first = 0
        for piece in pieces:
            rows = self._taps.layer_rows[:, first : first + piece.num_rows]
            self.traces[piece.placed.request.request_id].layer_rows.append(rows)
            first += piece.num_rows

    def launch(self, placed):
        self._taps.traces = [self.traces[one.request.request_id] for one in placed]
        pending = super().launch(placed)
        for row, trace in enumerate(self._taps.traces):
            trace.layer_rows.append(self._taps.layer_rows[:, row : row + 1])
        return pending


class _Mailbox:
    """An Outbox that any thread can read."""

    def __init__(self):
        self.items = queue.Queue()

    def put(self, request_id, item):
        self.items.put((request_id, item))

    def flush(self):
        pass


class TappedEngine:
    """Opens a checkpoint's talker and runs requests through its engine, in float32.

    is_tapped: without the measuring points, which a captured step can't have, only codes come out.
    """

    def __init__(self, checkpoint, config, backend, *, num_slots, max_positions, is_tapped=True):
        # Small pages and prefills: prompts lie on many pages and are cached in several passes.
        engine_config = TalkerEngineConfig(
            num_slots=num_slots,
            max_queued=64,
            page_size=8,
            max_positions=max_positions,
            # Kernels are compiled for every size: few of them.
            prefill_buckets=(16, 32) if backend.device.type == "cpu" else (16,),
            decode_buckets=() if backend.device.type == "cpu" else (num_slots,),
        )
        taps = Taps()
        if is_tapped:
            backend = replace(backend, ops=TappedOps(backend.ops, taps), capture=run_eagerly)
        self.talker = open_talker(
            checkpoint, config, num_positions=max_positions, ops=backend.ops, device=backend.device
        )
        if is_tapped:
            taps.watch(self.talker)
        make_runner = partial(TappedRunner, taps=taps) if is_tapped else TalkerRunner
        self._runner = make_runner(self.talker, engine_config, backend)
        self._is_tapped = is_tapped
        self._mailbox = _Mailbox()
        self._engine = TalkerEngine(self._runner, ChunkRamp(), self._mailbox)
        self._engine.start()

    def run(self, requests, forced=None):
        """Run all requests at once; {request id: Trace}. forced: {request id: codes [n, G]}."""
        traces = {r.request_id: Trace((forced or {}).get(r.request_id)) for r in requests}
        if self._is_tapped:
            self._runner.traces.update(traces)
        for request in requests:
            self._engine.submit(request)
        open_ids = set(traces)
        while open_ids:
            request_id, item = self._mailbox.items.get(timeout=_TIMEOUT_S)
            if isinstance(item, Exception):
                raise item
            trace = traces[request_id]
            if item.num_frames:
                trace.frames.extend(
                    np.frombuffer(item.codes, "<i2").reshape(item.num_frames, item.num_groups)
                )
            trace.finish = item.finish
            if item.finish is not None:
                open_ids.remove(request_id)
        return traces

    def close(self):
        self._engine.stop()
