"""The device side: buckets, padding, and samples as numbers of PCM16."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3tts_core.config import CodecEngineConfig
from qwen3tts_core.engine.codec_rows import IncrementalRows, Seams, WindowRows
from qwen3tts_core.ops.reference import HostTransfer, run_eagerly
from qwen3tts_core.streaming.pcm import NOT_A_NUMBER, pcm16_from_float, quantize
from tests.qwen3tts_core.codec_kit import MINI, mini_decoder, random_codes

DECODER = mini_decoder()
SPF = MINI.samples_per_frame


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_the_device_s_samples_are_those_of_the_host():
    values = np.concatenate([np.linspace(-1.2, 1.2, 9999), np.arange(-7, 8) / 2 / 32767]).astype(np.float32)
    on_device = quantize(torch.from_numpy(values))
    assert on_device.dtype == torch.int16
    assert on_device.numpy().tobytes() == pcm16_from_float(values)
    assert quantize(torch.tensor([0.5, float("nan"), -1.0])).tolist() == [16384, NOT_A_NUMBER, -32767]


class CountingCapture:
    """Runs eagerly, and remembers which steps were made and launched."""

    def __init__(self):
        self.made, self.launched = [], []

    def __call__(self, fn, name):
        self.made.append(name)

        def launch():
            self.launched.append(name)
            fn()

        return launch


def make_rows(kind=IncrementalRows, capture=run_eagerly, **config):
    config = CodecEngineConfig(
        **{"num_rows": 5, "frame_buckets": (1, 4, 9), "left_context_frames": 3} | config
    )
    return kind(DECODER, config, Seams(capture, HostTransfer()))


@pytest.mark.parametrize(
    ("kind", "num_steps"),
    [(IncrementalRows, 3 * 4), (WindowRows, 5 * 4)],  # windows of 1, 4, 7, 9, 12 frames; rows 1, 2, 4, 5
)
def test_every_step_is_captured_before_the_first_decode(kind, num_steps):
    """known_faults row 35: the codec's."""
    capture = CountingCapture()
    rows = make_rows(kind, capture)
    rows.warm_up()
    made = list(capture.made)
    assert len(set(made)) == len(made) == num_steps
    for row in range(5):
        rows.start(row, "", random_codes(0))
    for num_frames in range(1, 10):
        rows.decode([(row, random_codes(num_frames)) for row in range(1 + num_frames % 5)])
    assert capture.made == made


def test_a_failure_to_capture_names_the_step():
    """known_faults row 36: the codec's."""

    def refuse(fn, name):
        raise RuntimeError(name)

    with pytest.raises(RuntimeError, match="codec step of 5 rows x 9 frames"):
        make_rows(capture=refuse)


@pytest.mark.parametrize(
    ("num_rows", "num_frames", "step"), [(1, 1, "1 rows x 1"), (3, 4, "4 rows x 4"), (2, 5, "2 rows x 9")]
)
def test_a_batch_takes_the_smallest_bucket_that_holds_it(num_rows, num_frames, step):
    capture = CountingCapture()
    rows = make_rows(capture=capture)
    for row in range(num_rows):
        rows.start(row, "", random_codes(0))
    samples = rows.decode([(row, random_codes(num_frames)) for row in range(num_rows)])
    assert capture.launched == [f"codec step of {step} frames"]
    assert [len(row) for row in samples] == [num_frames * SPF] * num_rows
    assert rows.counters.batches == 1


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    kind=st.sampled_from([IncrementalRows, WindowRows]),
)
def test_what_an_earlier_batch_left_in_the_buffers_is_never_heard(lengths, kind):
    """A large batch first, then a smaller one over the same memory."""
    used, fresh = make_rows(kind), make_rows(kind)
    for row in range(5):
        used.start(row, "", random_codes(0))
    used.decode([(row, random_codes(9, seed=row)) for row in range(5)])
    pieces = [(row, random_codes(n, seed=20 + row)) for row, n in enumerate(lengths)]
    for rows in (used, fresh):
        for row, _ in pieces:
            rows.start(row, "", random_codes(0))
    for after, alone in zip(used.decode(pieces), fresh.decode(pieces), strict=True):
        np.testing.assert_array_equal(after, alone)
