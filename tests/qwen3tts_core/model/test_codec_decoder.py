"""The codec decoder against the reference's arrays, and against itself cut into pieces."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.errors import CheckpointMismatch
from qwen3tts_core.model.codec_decoder import CodecDecoder, open_codec_decoder
from qwen3tts_core.model.codec_state import NoPast
from qwen3tts_core.streaming.codec_window import exact_left_context, window_at
from tests.qwen3tts_core.codec_kit import (
    MINI,
    PUBLISHED,
    RandomWeights,
    mini_decoder,
    random_codes,
    whole_pcm,
)

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/parity/golden/seed0"
CHECKPOINTS = {"custom_voice": ROOT / "checkpoints/tiny", "custom_voice_large": GOLDEN / "custom_voice_large"}
PIECES = 2e-5  # float32 sums of another order through 30 layers; the reference's own spread is 2e-5
CLOSE = 1e-4  # golden/seed0/README.md, Tolerances


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=CHECKPOINTS)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def decoder(variant):
    folder = CHECKPOINTS[variant]
    return open_codec_decoder(folder, CheckpointConfig.from_checkpoint(folder).codec)


@pytest.fixture(scope="module")
def tiny():
    folder = CHECKPOINTS["custom_voice"]
    return open_codec_decoder(folder, CheckpointConfig.from_checkpoint(folder).codec)


@pytest.fixture(scope="module")
def golden(variant):
    with np.load(GOLDEN / f"{variant}.npz") as arrays:
        return {name: arrays[name] for name in arrays.files if name.startswith("codec/")}


@pytest.fixture(scope="module")
def mini():
    return mini_decoder()


def stream(decoder, codes, cuts, state=None, row=0, pad_to=None):
    """Decode [F, G] codes in pieces of these sizes, in one row; the joined samples."""
    state = state or decoder.new_state(row + 1)
    codes = torch.from_numpy(codes).long()
    parts, first = [], 0
    for num_frames in cuts:
        piece = codes[first : first + num_frames]
        padded = torch.zeros(1, pad_to or len(piece), codes.shape[1], dtype=torch.long)
        padded[0, : len(piece)] = piece
        pcm = decoder.decode_step(padded, state, torch.tensor([row]), torch.tensor([len(piece)]))
        parts.append(pcm[0, : len(piece) * decoder.config.samples_per_frame])
        first += num_frames
    return torch.cat(parts).numpy()


def cuts_of(num_frames):
    """Every way to cut that many frames, as a strategy."""
    joints = st.sets(st.integers(1, num_frames - 1))
    return joints.map(lambda at: np.diff([0, *sorted(at), num_frames]).tolist())


# ---------------------------------------------------------------- the reference
def test_every_stage_is_the_reference_s(decoder, golden):
    codes = torch.from_numpy(golden["codec/codes"])[None]
    seen = []
    for name, value in decoder.stages(codes, NoPast(1, decoder.device)):
        value = value[0].numpy()
        seen.append(name)
        if name == "wav":
            assert np.abs(value).max() == pytest.approx(golden["codec/wav_unclamped_peak"], abs=CLOSE)
        elif f"codec/{name}" in golden:
            expected = golden[f"codec/{name}"]
            value = value.T if name == "transformer" else value[:, : expected.shape[1]]
            np.testing.assert_allclose(value, expected, atol=CLOSE, err_msg=name)
    assert seen[:6] == ["quantized", "pre_conv", "transformer", "upsampled", "decoder_0", "decoder_1"]
    assert seen[-1] == "wav"


def test_whole_decode_is_the_reference_s_and_clamped(decoder, golden):
    assert golden["codec/wav_clipped_fraction"] > 0, "nothing to clamp would prove nothing"
    pcm = whole_pcm(decoder, golden["codec/codes"])
    np.testing.assert_allclose(pcm, golden["codec/wav_full"], atol=CLOSE)
    assert pcm.dtype == np.float32
    assert np.abs(pcm).max() == 1.0


def test_rows_padded_on_the_right_are_the_reference_s(decoder, golden):
    codes = golden["codec/codes"]
    batch = np.zeros((2, 17, codes.shape[1]), np.int64)
    batch[0, :9], batch[1] = codes[:9], codes[15:32]
    pcm = decoder.decode(torch.from_numpy(batch)).numpy()
    np.testing.assert_allclose(pcm[0, : 9 * 1920], golden["codec/wav_batch_0"], atol=CLOSE)
    np.testing.assert_allclose(pcm[1], golden["codec/wav_batch_1"], atol=CLOSE)


def test_a_long_stream_has_no_seam_where_the_reference_cuts(decoder, golden):
    """340 frames in steady chunks equal the reference's one-pass decode around frame 300."""
    codes = golden["codec/long_codes"]
    pcm = stream(decoder, codes, [25] * 13 + [15])
    assert len(pcm) == golden["codec/long_samples"]
    here = slice(299 * 1920, 304 * 1920)
    np.testing.assert_allclose(pcm[here], golden["codec/long_seam300_full"], atol=PIECES)
    seam = np.abs(golden["codec/long_seam300_full"] - golden["codec/long_seam300_chunked"]).max()
    assert seam > 5 * PIECES, "the reference's seam is too small to tell the two apart"


def test_windows_equal_the_reference_at_the_same_cuts(decoder, golden):
    """Chunks of 12 frames with 5 of left context, all windows padded to one width in one batch."""
    codes, parts = golden["codec/codes"], []
    windows = [(first, window_at(first, min(12, 32 - first), 5)) for first in range(0, 32, 12)]
    batch = np.zeros((len(windows), 20, codes.shape[1]), np.int64)
    for row, (first, window) in zip(batch, windows, strict=True):
        row[: window.num_frames] = codes[first - window.num_context : first + window.num_new]
    pcm = decoder.decode(torch.from_numpy(batch)).numpy()
    parts = [row[window.kept_samples(1920)] for row, (_, window) in zip(pcm, windows, strict=True)]
    np.testing.assert_allclose(np.concatenate(parts), golden["codec/wav_chunked_12_5"], atol=CLOSE)


# ---------------------------------------------------------------- whole equals pieces
@settings(max_examples=8, deadline=None)
@given(cuts=cuts_of(60))
@example(cuts=[1] * 60)
@example(cuts=[1, 3, 8, 16, 25, 7])
def test_pieces_equal_the_whole_for_every_cut(tiny, cuts):
    """known_faults row 7: nothing is heard of a chunk's edge."""
    codes = random_codes(60, seed=1, config=tiny.config)
    np.testing.assert_allclose(stream(tiny, codes, cuts), whole_pcm(tiny, codes), atol=PIECES)


@settings(max_examples=40, deadline=None)
@given(cuts=cuts_of(40), pad=st.integers(0, 9))
def test_pieces_equal_the_whole_for_other_sizes_and_padding(mini, cuts, pad):
    codes = random_codes(40, seed=2)
    pcm = stream(mini, codes, cuts, pad_to=max(cuts) + pad)
    np.testing.assert_allclose(pcm, whole_pcm(mini, codes), atol=PIECES)


@pytest.mark.parametrize("window", [1, 2, 7])
def test_pieces_equal_the_whole_for_every_attention_window(window):
    decoder = mini_decoder(sliding_window=window)
    codes = random_codes(30, seed=3)
    np.testing.assert_allclose(stream(decoder, codes, [1, 2, 10, 17]), whole_pcm(decoder, codes), atol=PIECES)


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=2, max_size=6))
def test_rows_of_different_length_share_a_batch(mini, lengths):
    """lengths[step][row], 0 included. Padding frames hold other codes: none may reach the state."""
    streams = [random_codes(40, seed=10 + row) for row in range(3)]
    state, done, parts = mini.new_state(5), [0, 0, 0], [[], [], []]
    rows = torch.tensor([3, 0, 2])
    for step, num_valid in enumerate(lengths):
        codes = np.stack([random_codes(7, seed=99 + step + row) for row in range(3)]).astype(np.int64)
        for row in range(3):
            codes[row, : num_valid[row]] = streams[row][done[row] : done[row] + num_valid[row]]
            done[row] += num_valid[row]
        pcm = mini.decode_step(torch.from_numpy(codes), state, rows, torch.tensor(num_valid)).numpy()
        for row in range(3):
            parts[row].append(pcm[row, : num_valid[row] * MINI.samples_per_frame])
    assert state.positions[rows].tolist() == done
    for row in range(3):
        if done[row]:
            expected = whole_pcm(mini, streams[row][: done[row]])
            np.testing.assert_allclose(np.concatenate(parts[row]), expected, atol=PIECES)


def test_earlier_audio_never_changes_when_more_arrives(mini):
    codes = random_codes(20, seed=4)
    np.testing.assert_allclose(whole_pcm(mini, codes)[: 12 * 36], whole_pcm(mini, codes[:12]), atol=PIECES)


# ---------------------------------------------------------------- rows
@pytest.mark.parametrize("stale", [float("nan"), float("inf"), 1e30])
def test_what_a_former_stream_left_in_a_row_is_never_heard(mini, stale):
    """known_faults row 10: nor by who gets its row."""
    codes, state = random_codes(12, seed=5), mini.new_state(4)
    clean = stream(mini, codes, [1, 3, 8], row=2)
    state.values.fill_(stale)
    np.testing.assert_array_equal(stream(mini, codes, [1, 3, 8], state, row=2), clean)
    state.values[2] = stale
    state.reset(2)
    np.testing.assert_array_equal(stream(mini, codes, [1, 3, 8], state, row=2), clean)


def test_a_step_touches_its_own_rows_only(mini):
    state = mini.new_state(4)
    state.values.fill_(float("nan"))
    state.positions.fill_(3)
    state.reset(1)
    stream(mini, random_codes(5), [5], state, row=1)
    assert state.values[1].isfinite().all()
    assert state.values[[0, 2, 3]].isnan().all()
    assert state.positions.tolist() == [3, 5, 3, 3]


def test_a_broken_neighbour_is_not_heard(mini):
    """A row that went to NaN shares a batch with a healthy one."""
    codes, state = random_codes(6, seed=6), mini.new_state(2)
    state.values[0], state.positions[0] = float("nan"), 9
    batch = torch.from_numpy(np.stack([codes, codes])).long()
    pcm = mini.decode_step(batch, state, torch.tensor([0, 1]), torch.tensor([6, 6])).numpy()
    assert np.isnan(pcm[0]).any()
    np.testing.assert_allclose(pcm[1], whole_pcm(mini, codes), atol=PIECES)


def test_padding_rows_may_share_the_spare_row(mini):
    codes, state = random_codes(6, seed=6), mini.new_state(3)
    state.values[2] = float("nan")
    batch = torch.zeros(4, 6, 3, dtype=torch.long)
    batch[0] = torch.from_numpy(codes)
    for _ in range(2):
        state.reset(0)
        pcm = mini.decode_step(batch, state, torch.tensor([0, 2, 2, 2]), torch.tensor([6, 0, 0, 0])).numpy()
        np.testing.assert_allclose(pcm[0], whole_pcm(mini, codes), atol=PIECES)
        assert state.positions.tolist() == [6, 0, 0]


def test_a_saved_row_goes_on_in_another_row(mini):
    codes, state = random_codes(20, seed=7), mini.new_state(3)
    whole = stream(mini, codes, [8, 12])
    stream(mini, codes[:8], [8], state, row=0)
    saved = state.save(0)
    stream(mini, codes[8:], [12], state, row=0)
    state.values[2] = float("nan")
    state.restore(2, saved)
    np.testing.assert_array_equal(stream(mini, codes[8:], [12], state, row=2), whole[8 * 36 :])


def test_a_stream_weighs_what_the_spec_says():
    decoder = CodecDecoder.load(RandomWeights("meta"), PUBLISHED)
    keys_and_values = 8 * 71 * 2 * 16 * 64
    assert decoder.new_state(1).row_bytes == 4 * (135_232 + keys_and_values)


def test_a_step_reads_nothing_on_the_host():
    """Meta tensors have no values: a host read or a shape that depends on one raises."""
    decoder = mini_decoder("meta")
    arguments = [torch.zeros(2, dtype=torch.long, device="meta") for _ in range(2)]
    codes = torch.zeros(2, 4, 3, dtype=torch.long, device="meta")
    assert decoder.decode_step(codes, decoder.new_state(3), *arguments).shape == (2, 4 * 36)
    with pytest.raises(RuntimeError):
        codes.sum().item()


# ---------------------------------------------------------------- windows
def test_windows_with_the_exact_context_equal_the_whole(tiny):
    """known_faults row 7: also by windows, and less context is heard."""
    codes = random_codes(60, seed=8, config=tiny.config)
    context = exact_left_context(tiny.config)
    assert context == 28
    whole = whole_pcm(tiny, codes)
    np.testing.assert_allclose(
        whole_pcm(tiny, codes[31 - context :])[context * 1920 :], whole[31 * 1920 :], atol=PIECES
    )
    short = whole_pcm(tiny, codes[31 - 12 :])[12 * 1920 :]
    assert np.abs(short - whole[31 * 1920 :]).max() > 10 * PIECES, "context makes no difference here"


# ---------------------------------------------------------------- precision
def test_bfloat16_stays_near_float32(mini):
    """known_faults row 7: in half precision, within a bound.

    The fast setting: over 20 dB of signal to noise on a random model.
    """
    codes = random_codes(40, seed=9)
    exact, fast = whole_pcm(mini, codes), stream(mini_decoder(dtype=torch.bfloat16), codes, [1, 3, 8, 28])
    noise_db = 10 * np.log10(np.square(exact).mean() / np.square(exact - fast).mean())
    assert fast.dtype == np.float32
    assert noise_db > 20


@pytest.mark.parametrize("batch", [4, 8])
def test_in_one_bucket_a_row_s_bytes_depend_on_nothing_else(tiny, batch):
    """What `deterministic` rests on: any place in the batch, any neighbours, the same bits."""
    size, frames = tiny.config.codebook_size, 5
    mine = random_codes(2 * frames, seed=11, config=tiny.config).astype(np.int64)
    alone, results = None, []
    for place in range(batch):
        state, parts = tiny.new_state(batch + 1), []
        rng = np.random.default_rng(place)
        for step in range(2):
            codes = (
                rng.integers(0, size, (batch, frames, 16))
                if place
                else np.zeros((batch, frames, 16), np.int64)
            )
            codes[place] = mine[step * frames : (step + 1) * frames]
            num_valid = torch.tensor(
                rng.integers(0, frames + 1, batch) if place else np.zeros(batch, np.int64)
            )
            num_valid[place] = frames
            parts.append(
                tiny.decode_step(torch.from_numpy(codes), state, torch.arange(batch), num_valid)[place]
            )
        results.append(torch.cat(parts).numpy())
        alone = results[0]
    for result in results:
        np.testing.assert_array_equal(result, alone)


# ---------------------------------------------------------------- loading
def test_a_damaged_checkpoint_lists_everything_that_is_wrong(tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINTS["custom_voice"] / "speech_tokenizer", folder / "speech_tokenizer")
    file = folder / "speech_tokenizer/model.safetensors"
    file.chmod(0o644)
    tensors = load_file(file)
    del tensors["decoder.pre_conv.conv.bias"]
    tensors["decoder.decoder.5.alpha"] = torch.zeros(3)
    tensors["decoder.decoder.9.conv.weight"] = torch.zeros(1)
    save_file(tensors, file)
    config = CheckpointConfig.from_checkpoint(CHECKPOINTS["custom_voice"]).codec
    with pytest.raises(CheckpointMismatch) as caught:
        open_codec_decoder(folder, config)
    for name in ("pre_conv.conv.bias", "decoder.5.alpha", "decoder.9.conv.weight"):
        assert any(f"decoder.{name}" in problem for problem in caught.value.problems)
    assert len(caught.value.problems) == 3
