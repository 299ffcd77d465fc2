"""The Codec engine: frames of many streams in, PCM out, one thread between.

Each turn of the loop: make new streams' rows ready, hand out what needs no decoding, then decode
one batch of what is due. What a stream gets out is in the order in which it was submitted, an
error included. A fault in a batch ends the streams in it and no others.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from qwen3tts_core.config import CheckpointConfig, CodecDecoderConfig, CodecEngineConfig
from qwen3tts_core.engine.codec_batching import BatchShapes
from qwen3tts_core.engine.codec_rows import CodecModel, IncrementalRows, RowDecoder, Seams, WindowRows
from qwen3tts_core.engine.codec_scheduler import CodecScheduler, CodecStream, Piece, Work
from qwen3tts_core.engine.frame_checks import FrameChecks
from qwen3tts_core.engine.outbox import Outbox
from qwen3tts_core.engine.stats import CodecStats
from qwen3tts_core.engine.tally import BATCH_ROWS, STEP_SECONDS, Tally
from qwen3tts_core.engine.threads import join_or_leave
from qwen3tts_core.errors import EngineDown, EngineFault, InvalidCodes, TTSError
from qwen3tts_core.model.codec_decoder import open_codec_decoder
from qwen3tts_core.model.codec_fused import PRECISIONS, FusedCodecDecoder
from qwen3tts_core.ops.select import Backend, select_backend
from qwen3tts_core.streaming.pcm import samples_to_bytes
from qwen3tts_core.types import AudioChunk, FrameBatch, ReferenceVoice

logger = logging.getLogger(__name__)

_MAX_FAULTS_IN_A_ROW = 3  # a broken device fails every batch: let the replica be replaced
_STUCK_AFTER_S = 120.0


class CodecEngine:
    """Thread-safe front; the loop and everything on the device live on one thread.

    An open stream gets one AudioChunk in the outbox for every FrameBatch submitted, until one
    carries a finish, or an exception; after `close` it may get nothing more. Ids must be new: what
    was still on its way when an id was closed goes to whoever reads that id.
    """

    def __init__(
        self,
        decoder: CodecModel,
        config: CodecEngineConfig,
        outbox: Outbox[AudioChunk],
        seams: Seams,
        *,
        clock: Callable[[], float] = time.monotonic,
        enter_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self._outbox, self._clock, self._enter_thread = outbox, clock, enter_thread
        self._checks = FrameChecks(decoder.config.num_quantizers, decoder.config.codebook_size)
        self._no_codes = self._checks.codes(b"")
        make_rows = IncrementalRows if config.mode == "incremental" else WindowRows
        self._rows: RowDecoder = make_rows(decoder, config, seams)
        self._scheduler = CodecScheduler(
            num_rows=config.num_rows,
            shapes=BatchShapes(self._rows.max_rows, config.batch_buckets),
            seconds_per_frame=1.0 / decoder.config.frame_rate_hz,
            batch_wait_s=config.batch_wait_s,
        )
        self._num_rows = config.num_rows
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="codec-engine", daemon=True)
        self._stopping = False
        self._death: BaseException | None = None
        self._turn_began_at: float | None = None
        self._batch_rows, self._batch_seconds = Tally(BATCH_ROWS), Tally(STEP_SECONDS)
        self._chunks = self._frames = self._faults = self._faults_in_a_row = 0

    @property
    def max_rows(self) -> Mapping[int, int]:
        """For each frame bucket, the rows that a batch of it may have."""
        return self._rows.max_rows

    # ------------------------------------------------------------ any thread
    def start(self) -> None:
        """Warm up, then serve."""
        self._rows.warm_up()
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the batch in flight; streams still open get an EngineDown. A loop that hangs is left
        behind after some seconds."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            join_or_leave(self._thread)

    def open(self, request_id: str, reference: ReferenceVoice | None = None) -> None:
        """Take a row. The stream sounds as the continuation of the reference's frames, if it has any.

        Raises Overloaded when every row is taken, InvalidCodes for reference frames that can't be
        decoded, EngineFault for an id that is open or an engine that isn't running.
        """
        if reference is not None:
            self._checks.codes(reference.codes)
        with self._wake:
            self._raise_if_down()
            self._scheduler.open(request_id, reference)
            self._wake.notify()

    def submit(self, request_id: str, frames: FrameBatch) -> None:
        """Queue the stream's next frames.

        Frames that can't be decoded come out as InvalidCodes after the audio before them, and end
        the stream. A stream that has failed takes anything and gives nothing more. Raises
        EngineFault for an id that isn't open or an engine that isn't running, InvalidCodes after
        the finish.
        """
        with self._wake:
            self._raise_if_down()
            stream = self._scheduler.find(request_id)
            if stream.has_failed:
                return
            if stream.has_last:
                raise InvalidCodes(f"request {request_id!r}: frames after the finish")
            stream.work.append(self._work(stream, frames))
            self._wake.notify()

    def replay(self, request_id: str, codes: bytes, cuts: Sequence[int] = ()) -> None:
        """Rebuild a stream that has just been opened from the frames another engine sent audio for.

        codes: [F, G] int16, as in FrameBatch, from frame 0. They are decoded and their audio is
        dropped; the next frame to submit is F. cuts: the frames of each chunk as it was first
        decoded; a deterministic engine given these goes on with the same bytes.
        Raises InvalidCodes, or EngineFault for a stream that has had frames.
        """
        array = self._checks.codes(codes)
        if cuts and (min(cuts) < 1 or sum(cuts) != len(array)):
            raise InvalidCodes(f"cuts of {sum(cuts)} frames, {list(cuts)}, don't fit {len(array)} frames")
        with self._wake:
            self._raise_if_down()
            stream = self._scheduler.find(request_id)
            if stream.has_failed:
                return
            if stream.next_frame or stream.has_last:
                raise EngineFault(f"request {request_id!r}: replay must come before any frames")
            stream.next_frame = len(array)
            if self._rows.look_back is not None:
                array, cuts = array[max(0, len(array) - self._rows.look_back) :], ()
            now, first = self._clock(), 0
            for num_frames in cuts or ([len(array)] if len(array) else []):
                stream.work.append(Work(array[first : first + num_frames], now))
                first += num_frames
            self._wake.notify()

    def close(self, request_id: str) -> None:
        """Give the row back: now, or after the batch that holds it. Unknown ids are fine."""
        with self._wake:
            self._scheduler.close(request_id)
            self._wake.notify()  # where fewer are open, those that wait for others wait less

    def check_health(self) -> None:
        """Raises EngineFault when the loop is dead, stopped or stuck, or fails every batch."""
        with self._wake:
            self._raise_if_down()
            if self._faults_in_a_row >= _MAX_FAULTS_IN_A_ROW:
                raise EngineFault(f"the codec's last {self._faults_in_a_row} batches failed")
            began_at = self._turn_began_at
            if began_at is not None and self._clock() - began_at > _STUCK_AFTER_S:
                raise EngineFault(
                    f"the codec's loop has been in one turn for {self._clock() - began_at:.0f} s"
                )

    def stats(self) -> CodecStats:
        with self._wake:
            counters, num_free = self._rows.counters, self._scheduler.num_free_rows
            return CodecStats(
                num_rows_in_use=self._num_rows - num_free,
                num_free_rows=num_free,
                num_waiting=self._scheduler.num_waiting,
                chunks=self._chunks,
                frames=self._frames,
                batches=counters.batches,
                padded_rows=counters.padded_rows,
                padded_frames=counters.padded_frames,
                faults=self._faults,
                num_rows=self._num_rows,
                rows=counters.rows,
                graph_replays=counters.graph_replays,
                eager_steps=counters.eager_steps,
                primed_hits=counters.primed_hits,
                primed_misses=counters.primed_misses,
                batch_rows=self._batch_rows.counts(),
                batch_seconds=self._batch_seconds.counts(),
            )

    def _raise_if_down(self) -> None:
        if self._death is not None:
            raise EngineDown(f"the codec's loop died: {self._death!r}")
        if self._stopping:
            raise EngineDown("the codec is stopped")

    def _work(self, stream: CodecStream, frames: FrameBatch) -> Work:
        """What these frames are to the loop: codes to decode, or an error to hand out in their place."""
        now = self._clock()
        try:
            codes = self._checks.batch(frames, stream.next_frame)
        except InvalidCodes as error:
            stream.has_failed = True
            said = InvalidCodes(f"request {stream.request_id!r}: {error}")
            return Work(self._no_codes, now, error=said)
        stream.next_frame += frames.num_frames
        stream.has_last = frames.finish is not None
        return Work(codes, now, batch=frames)

    # ------------------------------------------------------------ the engine's thread
    def _run(self) -> None:
        last_words = EngineDown("the codec is stopped")
        try:
            self._enter_thread()
            while self._wait_for_work():
                self.step()
        except BaseException as error:
            logger.exception("the codec's loop died")
            with self._wake:
                self._death = error
            last_words = EngineDown(f"the codec's loop died: {error!r}")
        with self._wake:
            for stream in self._scheduler.streams():
                stream.is_in_flight = False
                if not stream.is_over:
                    self._fail(stream, last_words)
        self._outbox.flush()

    def _wait_for_work(self) -> bool:
        """False once the loop should end."""
        with self._wake:
            while not self._stopping:
                now = self._clock()
                ready_at = self._scheduler.ready_at(now)
                if ready_at <= now:
                    break
                self._wake.wait(None if math.isinf(ready_at) else ready_at - now)
            return not self._stopping

    def step(self) -> None:
        """One turn of the loop. The engine's thread calls it; without `start`, the caller may."""
        self._turn_began_at = self._clock()
        try:
            self._turn()
        finally:
            self._turn_began_at = None

    def _turn(self) -> None:
        with self._wake:
            new = self._scheduler.take_new()
        for stream in new:
            self._start_row(stream)
        with self._wake:
            self._hand_out_undecodable()
            began_at = self._clock()
            batch = self._scheduler.take_batch(began_at)
        self._outbox.flush()
        if not batch:
            return
        results = self._decode(batch)
        self._batch_rows.add(len(batch))
        self._batch_seconds.add(self._clock() - began_at)
        with self._wake:
            for piece, result in zip(batch, results, strict=True):
                self._land(piece, result)
            self._hand_out_undecodable()
        self._outbox.flush()

    def _start_row(self, stream: CodecStream) -> None:
        """Reset the row, or put it where the reference's frames end."""
        voice = stream.reference
        key, reference = ("", b"") if voice is None else (voice.key, voice.codes)
        fault, rest = None, self._no_codes
        try:
            rest = self._rows.start(stream.row, key, self._checks.codes(reference))
        except Exception as error:  # noqa: BLE001 - whatever broke, only this stream is told
            fault = self._logged_fault(f"making a codec row ready for {stream.request_id}", error)
        with self._wake:
            if not self._scheduler.landed(stream):
                return
            if fault is not None:
                self._fail(stream, fault)
            elif len(rest):
                stream.work.appendleft(Work(rest, self._clock(), primes=key))

    def _decode(self, batch: Sequence[Piece]) -> list[bytes | EngineFault]:
        """Each piece's PCM, or why there is none."""
        try:
            samples = self._rows.decode([(piece.stream.row, piece.codes) for piece in batch])
            for piece in batch:
                if piece.work.primes is not None and piece.ends_work:
                    self._rows.keep(piece.stream.row, piece.work.primes)
        except Exception as error:  # noqa: BLE001 - whatever broke, the loop must outlive it
            ids = ", ".join(piece.stream.request_id for piece in batch)
            fault = self._logged_fault(f"decoding a codec batch of {ids}", error)
            return [EngineFault(*fault.args) for _ in batch]  # each is raised, and keeps its own traceback
        self._faults_in_a_row = 0
        results: list[bytes | EngineFault] = []
        for piece, row in zip(batch, samples, strict=True):
            try:
                results.append(samples_to_bytes(row))
            except EngineFault as fault:
                logger.error("request %s: %s", piece.stream.request_id, fault)
                results.append(fault)
        return results

    def _logged_fault(self, doing: str, error: Exception) -> EngineFault:
        logger.error("%s failed", doing, exc_info=error)
        with self._wake:
            self._faults_in_a_row += 1
        return EngineFault(f"{doing} failed: {error!r}")

    def _land(self, piece: Piece, result: bytes | EngineFault) -> None:
        stream, work = piece.stream, piece.work
        if not self._scheduler.landed(stream):
            return
        if isinstance(result, EngineFault):
            self._fail(stream, result)
            return
        work.parts.append(result)
        work.num_decoded += len(piece.codes)
        if not work.num_left:
            self._hand_out(stream)

    def _hand_out_undecodable(self) -> None:
        for stream in self._scheduler.undecodable():
            self._hand_out(stream)

    def _hand_out(self, stream: CodecStream) -> None:
        """A stream's first work is done: out with its audio, or its error."""
        work = stream.work.popleft()
        if work.error is not None:
            self._fail(stream, work.error)
        if work.batch is None:
            return
        first, num_frames, num_groups, codes, finish = work.batch
        pcm = b"".join(work.parts)
        self._outbox.put(stream.request_id, AudioChunk(first, num_frames, num_groups, pcm, codes, finish))
        self._chunks += 1
        self._frames += num_frames
        if num_frames:
            self._scheduler.heard(stream, first, self._clock())
        if finish is not None:
            self._scheduler.end(stream)

    def _fail(self, stream: CodecStream, error: TTSError) -> None:
        self._faults += 1
        stream.has_failed = True
        self._outbox.put(stream.request_id, error)
        self._scheduler.end(stream)


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def open_codec_engine(
    checkpoint: Path,
    *,
    config: CodecEngineConfig,
    outbox: Outbox[AudioChunk],
    device: str = "auto",
    dtype: str = "auto",
) -> CodecEngine:
    """Load a checkpoint folder's codec and build its engine, not yet started.

    dtype: one of DTYPES, or "auto", which is float32: PCM as the reference's, and fast enough that
    nothing else need be the default (load_tests/LOG.md). On a GPU float16 is twice as fast for about
    50 dB of signal to noise; bfloat16 is as fast, worse, and can't overflow.
    Raises CheckpointMismatch, or ValueError for a device or dtype that isn't there.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype must be auto or one of {', '.join(DTYPES)}, got {dtype!r}")
    chosen = torch.float32 if dtype == "auto" else DTYPES[dtype]
    codec = CheckpointConfig.from_checkpoint(checkpoint).codec
    backend = select_backend(
        device,
        deterministic=config.deterministic,
        memory_gib=config.memory_gib,
        high_priority=config.high_priority,
    )
    decoder = open_codec_model(checkpoint, codec, backend, chosen)
    engine = CodecEngine(
        decoder,
        config,
        outbox,
        Seams(backend.capture, backend.transfer, backend.free_bytes),
        enter_thread=backend.enter_thread,
    )
    logger.info(
        "codec: %s, %d rows, %s on %s, rows per frame bucket %s",
        config.mode, config.num_rows, chosen, backend.device, dict(engine.max_rows),
    )  # fmt: skip
    return engine


def open_codec_model(
    checkpoint: Path, config: CodecDecoderConfig, backend: Backend, dtype: torch.dtype
) -> CodecModel:
    """The decoder that is fastest on this backend: fused kernels where there are any."""
    if backend.codec_kernels is None:
        return open_codec_decoder(checkpoint, config, backend.device, dtype)
    plain = open_codec_decoder(checkpoint, config, backend.device, torch.float32)
    return FusedCodecDecoder(plain, backend.codec_kernels, PRECISIONS[dtype])
