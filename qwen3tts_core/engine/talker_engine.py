"""The Talker engine: requests in, ramp-sized batches of frames out, one thread between.

Each turn of the loop: take what arrived, admit, prefill within the token budget, launch the next
decode step, then read the step before it. So the device always has a step queued while the host
looks at the last one. A row that finished in the step just read rides along inert in the one
already launched.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from qwen3tts_core.config import CheckpointConfig, TalkerEngineConfig, WeightDtype
from qwen3tts_core.engine.cohort import Cohort, FrameStream
from qwen3tts_core.engine.frame_step import FRAME, FRAME_AND_LIMIT, STOP
from qwen3tts_core.engine.outbox import Outbox
from qwen3tts_core.engine.scheduler import Placed, Scheduler
from qwen3tts_core.engine.stats import TalkerStats
from qwen3tts_core.engine.talker_runner import MEMORY_KNOBS, PendingStep, TalkerRunner
from qwen3tts_core.engine.tally import STEP_SECONDS, Tally
from qwen3tts_core.engine.threads import join_or_leave
from qwen3tts_core.errors import EngineDown, EngineFault, TTSError
from qwen3tts_core.model.talker import open_talker
from qwen3tts_core.ops.select import select_backend
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.types import FinishReason, FrameBatch, SpeechRequest

logger = logging.getLogger(__name__)

_MAX_STEPS_AHEAD = 1
_STUCK_AFTER_S = 60.0  # a turn takes milliseconds; the first ones may compile kernels
_MADE_A_FRAME = (FRAME, FRAME_AND_LIMIT)
_FINISHES: dict[int, FinishReason | None] = {FRAME: None, STOP: "stop", FRAME_AND_LIMIT: "length"}


class TalkerEngine:
    """Thread-safe front; the loop and everything it touches live on one thread.

    Every submitted request gets FrameBatch items in the outbox until one carries a finish reason,
    or an exception. `cancel` ends that at once and frees the id: what the old request still owns is
    told from a new one's by its `Placed`, never by the id.
    """

    def __init__(
        self,
        runner: TalkerRunner,
        ramp: ChunkRamp,
        outbox: Outbox[FrameBatch],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._ramp = ramp
        self._outbox = outbox
        self._scheduler = Scheduler(runner.config)
        self._streams: dict[str, FrameStream] = {}
        self._cancelled: list[str] = []
        self._pending: deque[PendingStep] = deque()
        self._cohort = Cohort(runner.config.num_slots)
        self._wake = threading.Condition()
        self._stopping = False
        self._fault: BaseException | None = None
        self._num_requests = 0
        self._num_frames = 0
        self._num_cancelled = 0
        self._step_seconds = Tally(STEP_SECONDS)
        self._clock = clock
        self._last_turn = clock()
        self._is_turning = False
        self._thread = threading.Thread(target=self._run, name="talker-engine", daemon=True)

    # ------------------------------------------------------------ any thread
    def start(self) -> None:
        """Warm up every step, then serve."""
        self._runner.warm_up()
        self._thread.start()

    def stop(self) -> None:
        """End the loop; streams still open get an EngineDown. A loop that hangs is left behind after some seconds."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is None:  # never started: nobody else will tell them
            self._fail_all(EngineDown("the talker is stopped"))
        else:
            join_or_leave(self._thread)

    def submit(self, request: SpeechRequest) -> None:
        """Queue a request. Raises Overloaded, InvalidRequest, InvalidCodes, or EngineDown when the loop is dead."""
        self._scheduler.check(request)
        with self._wake:
            self._raise_if_dead()
            if request.request_id in self._streams:
                raise EngineFault(f"request id {request.request_id!r} is already running")
            self._scheduler.enqueue(request)
            self._streams[request.request_id] = self._new_stream(request)
            self._num_requests += 1
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """The consumer left: free slot and pages before the next step. Unknown ids are fine."""
        with self._wake:
            if self._streams.pop(request_id, None) is not None:
                self._cancelled.append(request_id)
                self._num_cancelled += 1
                self._wake.notify()

    def check_health(self) -> None:
        """Raises EngineFault when the loop has died, was stopped, or is stuck in one turn."""
        with self._wake:
            self._raise_if_dead()
            silent_s = self._clock() - self._last_turn
            if silent_s > _STUCK_AFTER_S and self._is_turning:
                raise EngineFault(f"the talker's loop has been in one turn for {silent_s:.0f} s")

    def stats(self) -> TalkerStats:
        with self._wake:
            scheduler, counters = self._scheduler, self._runner.counters
            return TalkerStats(
                num_running=scheduler.num_placed,
                num_waiting=scheduler.num_waiting,
                num_free_slots=scheduler.config.num_slots - scheduler.num_placed,
                num_free_pages=scheduler.pages.num_free,
                requests=self._num_requests,
                frames=self._num_frames,
                steps=counters.steps,
                padded_rows=counters.padded_rows,
                prefill_rows=counters.prefill_rows,
                num_slots=scheduler.config.num_slots,
                num_pages=scheduler.pages.num_pages,
                num_used_pages=scheduler.pages.num_pages - scheduler.pages.num_free,
                cancelled=self._num_cancelled,
                rows=counters.rows,
                graph_replays=counters.graph_replays,
                eager_steps=counters.eager_steps,
                steps_by_bucket=dict(counters.steps_by_bucket),
                step_seconds=self._step_seconds.counts(),
            )

    def _new_stream(self, request: SpeechRequest) -> FrameStream:
        """One that was begun elsewhere goes on at its frame, and at its place in the ramp."""
        if request.resume is None:
            sizes = self._ramp.sizes()
            return FrameStream(sizes, next(sizes))
        sizes, num_frames = self._ramp.sizes(len(request.resume.cuts)), request.resume.num_frames
        stream = FrameStream(sizes, next(sizes), first_frame=num_frames)
        if self._scheduler.config.deterministic:
            stream.num_replayed = num_frames
        return stream

    def _raise_if_dead(self) -> None:
        if self._fault is not None:
            raise EngineDown(f"the talker's loop died: {self._fault!r}")
        if self._stopping:
            raise EngineDown("the talker is stopped")

    # ------------------------------------------------------------ the engine's thread
    def _run(self) -> None:
        try:
            self._runner.enter_thread()
            while self._turn():
                pass
            self._fail_all(EngineDown("the talker is stopped"))
        except BaseException as error:
            logger.exception("the talker's loop died")
            with self._wake:
                self._fault = error
            self._fail_all(EngineDown(f"the talker's loop died: {error!r}"))

    def _turn(self) -> bool:
        """One round of the loop; False once it should end."""
        with self._wake:
            self._is_turning = False
            while not (self._scheduler.has_work or self._pending or self._stopping):
                self._wake.wait()
            self._is_turning, self._last_turn = True, self._clock()
            if self._stopping:
                return False
            self._drop_cancelled()
            admitted = self._scheduler.admit()
            for placed in admitted:
                self._streams[placed.request.request_id].placed = placed
        # From here on the lock is free: a submit never waits for the device.
        self._place(admitted)
        pieces = self._scheduler.next_prefill()
        running = self._scheduler.running()
        if pieces:
            self._runner.prefill(pieces)
        if running:
            self._pending.append(self._runner.launch(running))
        ahead = _MAX_STEPS_AHEAD if running else 0
        while self._pending and (len(self._pending) > ahead or self._pending[0].is_ready()):
            self._read(self._pending.popleft())
        self._outbox.flush()
        if running:
            self._step_seconds.add(self._clock() - self._last_turn)
        return True

    def _drop_cancelled(self) -> None:
        for request_id in self._cancelled:
            self._release(request_id)
        self._cancelled.clear()

    def _place(self, admitted: list[Placed]) -> None:
        """Put admitted requests on the device; one that can't be is told so and leaves."""
        for placed in admitted:
            try:
                self._runner.admit(placed)
            except TTSError as error:
                self._refuse(placed, error)

    def _refuse(self, placed: Placed, error: TTSError) -> None:
        request_id = placed.request.request_id
        with self._wake:
            if self._live_stream(placed) is not None:
                self._outbox.put(request_id, error)
                del self._streams[request_id]
            else:
                self._cancelled.remove(request_id)  # its consumer left since it was admitted
            self._release(request_id)

    def _read(self, step: PendingStep) -> None:
        """Hand out what a finished step made."""
        results = step.wait()
        if step.placed is not self._cohort.members:
            with self._wake:
                self._cohort.change(step.placed, self._num_missing)
        touched = self._cohort.add(results).tolist()
        outcomes = results[touched, -1].tolist() if touched else []
        self._num_frames += len(results) - sum(outcome not in _MADE_A_FRAME for outcome in outcomes)
        if touched:
            with self._wake:
                for row, outcome in zip(touched, outcomes, strict=True):
                    self._look_at(row, outcome)

    def _look_at(self, row: int, outcome: int) -> None:
        """A row whose chunk is full, or that has ended, or that nobody waits for any more."""
        placed = self._cohort.members[row]
        stream = self._live_stream(placed)
        if stream is None:  # finished before this step, or cancelled meanwhile
            self._cohort.forget(row)
            return
        finish = _FINISHES[outcome]
        stream.add(self._cohort.take(row, outcome))
        batch = stream.take(finish)
        if batch is not None:
            self._outbox.put(placed.request.request_id, batch)
        self._cohort.expect(row, stream.num_missing)
        if finish is not None:
            del self._streams[placed.request.request_id]
            self._release(placed.request.request_id)

    def _num_missing(self, placed: Placed) -> int:
        """Of one that joined; who has left since is looked at with the first step."""
        stream = self._live_stream(placed)
        return 1 if stream is None else stream.num_missing

    def _live_stream(self, placed: Placed) -> FrameStream | None:
        """Whoever waits for this very request's frames: not the next one of the same id."""
        stream = self._streams.get(placed.request.request_id)
        return stream if stream is not None and stream.placed is placed else None

    def _release(self, request_id: str) -> None:
        """Give slot and pages back. Steps in flight finish before a later prefill reuses the pages.

        Of two requests with this id, one cancelled and one waiting, it is always the older's turn.
        """
        placed = self._scheduler.placed(request_id)
        if placed is not None:
            self._runner.forget(placed.slot)
        self._scheduler.release(request_id)

    def _fail_all(self, error: EngineDown) -> None:
        with self._wake:
            for request_id in self._streams:
                self._outbox.put(request_id, error)
            self._streams.clear()
            self._cancelled.clear()
            for request_id in self._scheduler.request_ids():
                self._release(request_id)
        self._outbox.flush()


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def open_talker_engine(
    checkpoint: Path,
    *,
    config: TalkerEngineConfig,
    ramp: ChunkRamp,
    outbox: Outbox[FrameBatch],
    device: str = "auto",
    dtype: str = "auto",
    weight_dtype: WeightDtype = "auto",
) -> TalkerEngine:
    """Load a checkpoint folder and build its engine, not yet started.

    dtype: "float32", "bfloat16", or "auto" (bfloat16 on a GPU, float32 on CPU). weight_dtype: "auto", the
    same, or "float8_e4m3": one byte a weight, half the memory to read for each frame.
    Raises CheckpointMismatch, ValueError for a device or dtype that isn't there, or EngineFault for a memory
    that is too small.
    """
    checkpoint_config = CheckpointConfig.from_checkpoint(checkpoint)
    backend = select_backend(
        device,
        deterministic=config.deterministic,
        memory_gib=config.memory_gib,
        prefill_attention=config.prefill_attention,
        decode_attention=config.decode_attention,
    )
    if dtype == "auto":
        dtype = "float32" if backend.device.type == "cpu" else "bfloat16"
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be auto, {' or '.join(_DTYPES)}, got {dtype!r}")
    try:
        talker = open_talker(
            checkpoint,
            checkpoint_config,
            num_positions=config.max_positions,
            ops=backend.ops,
            device=backend.device,
            dtype=_DTYPES[dtype],
            weight_dtype=weight_dtype,
        )
        return TalkerEngine(TalkerRunner(talker, config, backend), ramp, outbox)
    except torch.OutOfMemoryError as error:
        raise EngineFault(f"the talker doesn't fit the GPU's memory: {error}; {MEMORY_KNOBS}") from error
