"""When the networks run, and when they needn't. Their numbers are compared in tests/parity."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from qwen3tts_core.audio.clip import ReferenceClip
from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.engine.reference_encoder import open_reference_encoder
from qwen3tts_core.errors import CheckpointMismatch

SEED0 = Path(__file__).parents[2] / "parity" / "golden" / "seed0"


@pytest.fixture(scope="module")
def config():
    return CheckpointConfig.from_checkpoint(SEED0 / "base")


@pytest.fixture
def encoder(config):
    return open_reference_encoder(SEED0 / "base", config)


def make_clip(seed, num_samples=24_000):
    return ReferenceClip(np.random.default_rng(seed).uniform(-0.5, 0.5, num_samples).astype(np.float32))


def test_twenty_requests_with_one_clip_run_the_networks_once(encoder):
    voices = {encoder.encode(make_clip(0), in_context=True) for _ in range(20)}
    assert len(voices) == 1
    assert encoder.stats().num_runs == 1


def test_alternating_modes_run_them_twice_and_never_mix(encoder):
    """known_faults row 14: the x-vector comes first here."""
    for _ in range(10):
        x_vector_only = encoder.encode(make_clip(0), in_context=False)
        in_context = encoder.encode(make_clip(0), in_context=True)
        assert x_vector_only.codes == b""
        assert len(in_context.codes) == 2 * 13 * 16  # ceil(24,000 / 1,920) frames of 16 int16 codes
        assert x_vector_only.key != in_context.key
        assert x_vector_only.x_vector == in_context.x_vector
    assert encoder.stats().num_runs == 2


def test_requests_that_arrive_together_share_one_run(encoder, config):
    barrier = threading.Barrier(8)

    def request(i):
        barrier.wait(60)
        return encoder.encode(make_clip(i % 2), in_context=True)

    with ThreadPoolExecutor(8) as pool:
        voices = list(pool.map(request, range(8)))
    assert encoder.stats().num_runs == 2
    assert set(voices[0::2]) == {voices[0]}
    assert set(voices[1::2]) == {voices[1]}
    alone = open_reference_encoder(SEED0 / "base", config).encode(make_clip(1), in_context=True)
    assert voices[1] == alone


def test_one_sample_makes_another_voice(encoder):
    clip = make_clip(0)
    samples = clip.samples.copy()
    samples[-1] += 0.25
    first, second = (encoder.encode(c, in_context=False) for c in (clip, ReferenceClip(samples)))
    assert first.key != second.key
    assert encoder.stats().num_runs == 2


def test_a_memo_without_room_still_serves(config):
    encoder = open_reference_encoder(SEED0 / "base", config, memo_bytes=0)
    assert encoder.encode(make_clip(0), True) == encoder.encode(make_clip(0), True)
    assert encoder.stats().num_runs == 2


def test_equal_weights_have_equal_fingerprints(config, encoder, tmp_path):
    again = open_reference_encoder(SEED0 / "base", config)
    assert again.fingerprint == encoder.fingerprint
    again._speaker.fc.bias.data[0] += 1
    assert type(encoder)(again._speaker, again._codec, again._device).fingerprint != encoder.fingerprint


def test_a_checkpoint_that_cannot_clone_says_so():
    folder = SEED0 / "voice_design"
    with pytest.raises(CheckpointMismatch, match="only 'base' clones voices, got 'voice_design'"):
        open_reference_encoder(folder, CheckpointConfig.from_checkpoint(folder))
