"""The fused codec decoder and the engine on a device's own backend.

Every body runs on the CPU too, where the kernels' meaning stands in for the kernels
(ops/codec_reference.py), a capture runs its step first, as a graph's warm-up does, and a transfer is
one step late. With TRITON_INTERPRET=1 the kernels themselves run there, slowly. The yardstick is
always the plain decoder on CPU in float32.
"""

import dataclasses
import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qwen3tts_core.config import CheckpointConfig, CodecEngineConfig
from qwen3tts_core.engine.codec_engine import CodecEngine, open_codec_engine
from qwen3tts_core.engine.codec_rows import IncrementalRows, Seams, WindowRows
from qwen3tts_core.errors import EngineFault
from qwen3tts_core.model.codec_decoder import CodecDecoder, open_codec_decoder
from qwen3tts_core.model.codec_fused import PRECISIONS, FusedCodecDecoder
from qwen3tts_core.ops.codec_reference import ReferenceCodecKernels
from qwen3tts_core.ops.reference import ReferenceOps, run_eagerly
from qwen3tts_core.ops.select import Backend, select_backend
from qwen3tts_core.streaming.codec_window import exact_left_context
from qwen3tts_core.streaming.pcm import FULL_SCALE, NOT_A_NUMBER
from tests.parity.check import without_tf32
from tests.qwen3tts_core.codec_kit import (
    MINI,
    PUBLISHED,
    ListOutbox,
    RandomWeights,
    batch_of,
    mini_decoder,
    random_codes,
    reference,
    whole_pcm,
)
from tests.qwen3tts_core.talker_kit import LateTransfer

ROOT = Path(__file__).parents[3]
TINY = ROOT / "checkpoints/tiny"
FOLDERS = {"custom_voice": TINY, "custom_voice_large": ROOT / "tests/parity/golden/seed0/custom_voice_large"}
SPF = MINI.samples_per_frame
PIECES = 2e-5  # float32 sums of another order through 30 layers
ONE_STEP = 1  # of PCM16
HALF_DB = {torch.float16: 60.0, torch.bfloat16: 44.0}  # of the small model; measured 72 and 56 on CPU


def capture_as_a_graph_does(fn, name):
    fn()
    fn()
    return fn


@dataclass(frozen=True)
class Machine:
    """A device under test."""

    device: str

    @functools.cached_property
    def backend(self):
        if self.device != "cpu":
            return select_backend(self.device, high_priority=True)
        kernels = ReferenceCodecKernels()
        if os.environ.get("TRITON_INTERPRET"):
            from qwen3tts_core.ops.cuda.codec_kernels import TritonCodecKernels

            kernels = TritonCodecKernels(torch.device("cpu"), num_processors=8, pdl=False)
        return Backend(torch.device("cpu"), ReferenceOps(), capture_as_a_graph_does, LateTransfer(), kernels)

    def fused(self, plain, dtype=torch.float32):
        plain.to(self.backend.device)
        plain.device = self.backend.device
        return FusedCodecDecoder(plain, self.backend.codec_kernels, PRECISIONS[dtype])

    def tensor(self, values):
        return torch.as_tensor(values, device=self.backend.device)

    def seams(self):
        transfer = LateTransfer() if self.device == "cpu" else select_backend(self.device).transfer
        return Seams(self.backend.capture, transfer, self.backend.free_bytes)


MACHINES = {name: Machine(name) for name in ("cpu", "cuda")}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def machine(request):
    return MACHINES[request.param]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@functools.cache
def mini(machine, dtype=torch.float32):
    return machine.fused(mini_decoder(), dtype)


PLAIN = mini_decoder()


def signal_to_noise_db(exact, actual):
    exact, error = exact.double(), actual.double() - exact.double()
    return 10 * float(torch.log10(exact.square().mean() / error.square().mean()))


def stream(machine, decoder, codes, cuts, state=None, row=0):
    """[F, G] codes in pieces of these sizes, in one row of a batch of two; the joined samples."""
    state = state or decoder.new_state(row + 2)
    codes, parts, first = torch.from_numpy(codes).long(), [], 0
    for num_frames in cuts:
        batch = torch.zeros(2, max(cuts), codes.shape[1], dtype=torch.long)
        batch[0, :num_frames] = codes[first : first + num_frames]
        pcm = decoder.decode_step(
            machine.tensor(batch), state, machine.tensor([row, row + 1]), machine.tensor([num_frames, 0])
        )
        parts.append(pcm[0, : num_frames * decoder.config.samples_per_frame].cpu())
        first += num_frames
    return torch.cat(parts)


# ---------------------------------------------------------------- the same model
@pytest.mark.parametrize("variant", FOLDERS)
def test_whole_decode_is_the_reference_s(machine, variant):
    folder = FOLDERS[variant]
    with np.load(ROOT / f"tests/parity/golden/seed0/{variant}.npz") as arrays:
        codes, expected = arrays["codec/codes"], arrays["codec/wav_full"]
    decoder = machine.fused(open_codec_decoder(folder, CheckpointConfig.from_checkpoint(folder).codec))
    pcm = decoder.decode(machine.tensor(codes).long()[None])[0].cpu().numpy()
    np.testing.assert_allclose(pcm, expected, atol=1e-4)  # golden/seed0/README.md, Tolerances


@settings(max_examples=15)
@given(lengths=st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=2, max_size=6))
@example(lengths=[[1, 1, 1]] * 9)
@example(lengths=[[6, 0, 1], [0, 6, 1], [1, 1, 6]])
def test_any_cut_in_any_company_equals_the_plain_decoder(machine, lengths):
    """lengths[step][row], 0 included. The rows are full of NaN before, padding frames of other codes."""
    decoder = mini(machine)
    streams = [random_codes(60, seed=10 + row) for row in range(3)]
    state, done, parts = decoder.new_state(5), [0, 0, 0], [[], [], []]
    state.values.fill_(torch.nan)
    rows = machine.tensor([3, 0, 2])
    for step, num_valid in enumerate(lengths):
        codes = np.stack([random_codes(7, seed=99 + step + row) for row in range(3)]).astype(np.int64)
        for row in range(3):
            codes[row, : num_valid[row]] = streams[row][done[row] : done[row] + num_valid[row]]
            done[row] += num_valid[row]
        pcm = decoder.decode_step(machine.tensor(codes), state, rows, machine.tensor(num_valid)).cpu()
        for row in range(3):
            parts[row].append(pcm[row, : num_valid[row] * SPF])
    assert state.positions[rows].tolist() == done
    assert state.values[[1, 4]].isnan().all(), "a step has touched rows that aren't its own"
    for row in range(3):
        if done[row]:
            expected = whole_pcm(PLAIN, streams[row][: done[row]])
            np.testing.assert_allclose(torch.cat(parts[row]), expected, atol=PIECES)


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 1}, {"sliding_window": 2}, {"upsampling_ratios": (3,)}]
)
def test_other_sizes_equal_the_plain_decoder(machine, changes):
    changed = dataclasses.replace(MINI, **changes)
    plain = CodecDecoder.load(RandomWeights(), changed)
    codes = random_codes(21, seed=3)
    expected = whole_pcm(plain, codes)
    np.testing.assert_allclose(
        stream(machine, machine.fused(plain), codes, [1, 2, 9, 9]), expected, atol=PIECES
    )


def test_a_saved_row_goes_on_in_another_row(machine):
    decoder, codes = mini(machine), random_codes(20, seed=7)
    state = decoder.new_state(4)
    first = stream(machine, decoder, codes[:8], [8], state, row=0)
    saved = state.save(0)
    stream(machine, decoder, codes[8:], [12], state, row=0)
    state.values[2] = torch.nan
    state.restore(2, saved)
    rest = stream(machine, decoder, codes[8:], [5, 7], state, row=2)
    np.testing.assert_allclose(torch.cat([first, rest]), whole_pcm(PLAIN, codes), atol=PIECES)


def test_a_broken_neighbour_is_not_heard_and_its_samples_say_so(machine):
    decoder, codes = mini(machine), random_codes(6, seed=6)
    state = decoder.new_state(2)
    state.values[0], state.positions[0] = torch.nan, 9
    batch = machine.tensor(np.stack([codes, codes])).long()
    rows, num_valid = machine.tensor([0, 1]), machine.tensor([6, 6])
    samples = decoder.decode_step_samples(batch, state, rows, num_valid).cpu()
    assert (samples[0] == NOT_A_NUMBER).any()
    expected = np.round(whole_pcm(PLAIN, codes) * FULL_SCALE)
    np.testing.assert_allclose(samples[1], expected, atol=ONE_STEP)


def test_a_stream_s_state_is_as_large_as_the_plain_decoder_s(machine):
    assert mini(machine).new_state(1).row_bytes == PLAIN.new_state(1).row_bytes


# ---------------------------------------------------------------- half precision
@pytest.mark.parametrize("dtype", HALF_DB)
def test_half_precision_costs_what_its_bits_cost(machine, dtype):
    codes = random_codes(40, seed=9)
    exact = torch.from_numpy(whole_pcm(PLAIN, codes))
    fast = stream(machine, mini(machine, dtype), codes, [1, 3, 8, 28])
    assert signal_to_noise_db(exact, fast) > HALF_DB[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (2, 25), (9, 25), (33, 4)])
def test_published_sizes_in_every_kind_of_tile(shape):
    """Against the plain decoder on the same GPU: float32 within rounding, half precision within its bits."""
    machine = MACHINES["cuda"]
    plain = CodecDecoder.load(RandomWeights(), PUBLISHED)
    fused = {dtype: machine.fused(plain, dtype) for dtype in (torch.float32, torch.float16)}
    codes = np.stack([random_codes(2 * shape[1], seed=row, config=PUBLISHED) for row in range(shape[0])])
    codes = machine.tensor(codes).long()
    with without_tf32():
        exact = plain.decode(codes)
    rows = torch.arange(shape[0], device=codes.device)
    for dtype, decoder in fused.items():
        state = decoder.new_state(shape[0])
        num_valid = torch.full_like(rows, shape[1])
        parts = [decoder.decode_step(part, state, rows, num_valid) for part in codes.split(shape[1], dim=1)]
        assert (
            signal_to_noise_db(exact, torch.cat(parts, dim=1)) > {torch.float32: 85, torch.float16: 45}[dtype]
        )


# ---------------------------------------------------------------- the engine
def make_engine(machine, dtype=torch.float32, decoder=None, **config):
    config = {
        "num_rows": 4,
        "frame_buckets": (1, 4, 9),
        "left_context_frames": exact_left_context(MINI),
    } | config
    decoder = decoder or mini(machine, dtype)
    return CodecEngine(decoder, CodecEngineConfig(**config), ListOutbox(), machine.seams())


def speak(engine, streams):
    """{id: (codes, cuts)} -> {id: samples}; all submitted at once."""
    for request_id, (codes, cuts) in streams.items():
        engine.open(request_id)
        first = 0
        for num_frames in cuts:
            first += num_frames
            last = "stop" if first == len(codes) else None
            engine.submit(request_id, batch_of(codes, first - num_frames, num_frames, last))
    engine.step()
    while engine.stats().num_waiting:
        engine.step()
    return {request_id: engine._outbox.pcm(request_id) for request_id in streams}


@pytest.mark.parametrize("mode", ["incremental", "window"])
def test_streams_at_every_point_of_the_ramp_share_captured_steps(machine, mode):
    cuts = [[1, 3, 9, 9], [9, 9, 1], [3, 1, 1, 1], [30]]
    streams = {f"r{i}": (random_codes(sum(each), seed=i), each) for i, each in enumerate(cuts)}
    engine = make_engine(machine, mode=mode, max_batch_frames=0)
    engine._rows.warm_up()
    for request_id, samples in speak(engine, streams).items():
        expected = np.round(whole_pcm(PLAIN, streams[request_id][0]) * FULL_SCALE)
        np.testing.assert_allclose(samples, expected, atol=ONE_STEP)
    stats = engine.stats()
    assert stats.batches <= 5
    replays = stats.batches if machine.device != "cpu" else 0
    assert (stats.graph_replays, stats.eager_steps) == (replays, stats.batches - replays)


def test_a_captured_step_makes_the_samples_of_an_eager_one(machine):
    codes = [random_codes(9, seed=i) for i in range(3)]
    made = []
    for capture in (machine.backend.capture, run_eagerly):
        seams = dataclasses.replace(machine.seams(), capture=capture)
        rows = IncrementalRows(mini(machine), CodecEngineConfig(num_rows=4, frame_buckets=(4, 9)), seams)
        for row in range(3):
            rows.start(row, "", codes[0][:0])
        pieces = [
            [(row, part[:4]) for row, part in enumerate(codes)],
            [(row, part[4:]) for row, part in enumerate(codes)],
        ]
        made.append([np.concatenate([row.copy() for row in rows.decode(piece)]) for piece in pieces])
    for graph, eager in zip(*made, strict=True):
        np.testing.assert_array_equal(graph, eager)


def test_clone_and_replay_go_on_sample_exactly(machine):
    """A primed voice, twice; and a row rebuilt from codes alone in the middle of a stream."""
    voice, codes = random_codes(23, seed=5), random_codes(12, seed=6)
    expected = np.round(whole_pcm(PLAIN, np.concatenate([voice, codes]))[23 * SPF :] * FULL_SCALE)
    engine = make_engine(machine)
    for request_id in ("first", "again"):
        engine.open(request_id, reference("voice", voice))
        engine.submit(request_id, batch_of(codes, 0, 12, "stop"))
        engine.step()
        while engine.stats().num_waiting:
            engine.step()
        np.testing.assert_allclose(engine._outbox.pcm(request_id), expected, atol=ONE_STEP)
    engine.open("rebuilt", reference("voice", voice))
    engine.replay("rebuilt", codes[:7].tobytes())
    engine.submit("rebuilt", batch_of(codes, 7, 5, "stop"))
    engine.step()
    while engine.stats().num_waiting:
        engine.step()
    np.testing.assert_allclose(engine._outbox.pcm("rebuilt"), expected[7 * SPF :], atol=ONE_STEP)


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_deterministic_bytes_are_the_same_alone_and_in_company(machine, dtype):
    mine, cuts = random_codes(20, seed=1), [1, 3, 9, 7]
    alone = speak(make_engine(machine, dtype, deterministic=True), {"mine": (mine, cuts)})["mine"]
    others = {f"o{i}": (random_codes(20, seed=50 + i), [i + 1, 9, 10 - i]) for i in range(3)}
    crowded = speak(make_engine(machine, dtype, deterministic=True), {**others, "mine": (mine, cuts)})["mine"]
    assert alone.tobytes() == crowded.tobytes()


def test_a_thread_of_its_own_serves(machine):
    engine, codes = make_engine(machine), random_codes(10, seed=2)
    engine.start()
    try:
        engine.open("r")
        engine.submit("r", batch_of(codes, 0, 10, "stop"))
        while not engine._outbox.items["r"]:
            engine.check_health()
    finally:
        engine.stop()
    expected = np.round(whole_pcm(PLAIN, codes) * FULL_SCALE)
    np.testing.assert_allclose(engine._outbox.pcm("r"), expected, atol=ONE_STEP)


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16"])
def test_a_checkpoint_opens_in_every_dtype(machine, dtype):
    codes = random_codes(4, config=CheckpointConfig.from_checkpoint(TINY).codec)
    config = CodecEngineConfig(num_rows=1, frame_buckets=(4,))
    engine = open_codec_engine(TINY, config=config, outbox=ListOutbox(), device=machine.device, dtype=dtype)
    plain = open_codec_decoder(TINY, CheckpointConfig.from_checkpoint(TINY).codec)
    exact = torch.from_numpy(whole_pcm(plain, codes) * FULL_SCALE)
    made = torch.from_numpy(speak(engine, {"r": (codes, [4])})["r"].copy())
    assert signal_to_noise_db(exact, made) > (60 if dtype in ("auto", "float32") else 12)


# ---------------------------------------------------------------- what fits
@pytest.mark.parametrize("kind", [IncrementalRows, WindowRows])
def test_no_batch_is_larger_than_the_limit(machine, kind):
    config = CodecEngineConfig(
        num_rows=8,
        frame_buckets=(1, 4, 9),
        left_context_frames=3,
        max_batch_frames=20,
        batch_buckets=(1, 2, 4, 8),
    )
    rows = kind(mini(machine), config, machine.seams())
    assert rows.max_rows == ({1: 8, 4: 4, 9: 2} if kind is IncrementalRows else {1: 4, 4: 2, 9: 1})
    assert max(frames * batch for frames, batch in rows.steps.buckets) <= 20


def test_steps_that_don_t_fit_the_memory_are_left_out_and_said_so(machine, caplog):
    """known_faults row 46: the codec's; the error names the knob."""
    decoder = mini(machine)
    seams = dataclasses.replace(machine.seams(), free_bytes=lambda: 10 * decoder.bytes_per_frame)
    config = CodecEngineConfig(num_rows=4, frame_buckets=(1, 4, 9), batch_buckets=(1, 2, 4))
    with caplog.at_level(logging.WARNING):
        rows = IncrementalRows(decoder, config, seams)
    assert rows.max_rows == {1: 4, 4: 2, 9: 1}
    assert "4 x 4, 2 x 9, 4 x 9" in caplog.text
    assert "memory_gib" in caplog.text
    with pytest.raises(EngineFault, match="memory_gib"):
        IncrementalRows(decoder, config, dataclasses.replace(seams, free_bytes=lambda: 0))


def test_a_step_whose_capture_runs_out_of_memory_is_left_out_and_said_so(machine, caplog):
    def capture(fn, name):
        if "4 rows" in name:
            raise torch.OutOfMemoryError("tried to allocate")
        return machine.backend.capture(fn, name)

    config = CodecEngineConfig(num_rows=4, frame_buckets=(1, 4), batch_buckets=(1, 2, 4))
    seams = dataclasses.replace(machine.seams(), capture=capture)
    with caplog.at_level(logging.WARNING):
        rows = IncrementalRows(mini(machine), config, seams)
    assert rows.max_rows == {1: 2, 4: 2}
    assert "no codec step of 4 rows x 1 frames: out of memory; raise the codec's memory_gib" in caplog.text
    engine = CodecEngine(mini(machine), config, ListOutbox(), seams)
    streams = {f"r{i}": (random_codes(5, seed=i), [1, 4]) for i in range(4)}
    for request_id, samples in speak(engine, streams).items():
        expected = np.round(whole_pcm(PLAIN, streams[request_id][0]) * FULL_SCALE)
        np.testing.assert_allclose(samples, expected, atol=ONE_STEP)


@pytest.mark.gpu
def test_a_replica_keeps_to_its_memory():
    """known_faults row 46: the cap itself."""
    backend = select_backend("cuda", memory_gib=2.0)
    try:
        assert backend.free_bytes() <= 2 * 2**30
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
