"""Which frames a window holds and which of its samples are kept."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.config import CodecDecoderConfig, TransformerConfig
from qwen3tts_core.streaming.codec_window import Window, exact_left_context, window_at, window_buckets

PUBLISHED = CodecDecoderConfig(
    transformer=TransformerConfig(512, 1024, 8, 16, 16, 64, 1e-5, 10000.0),
    codebook_dim=512, codebook_size=2048, latent_dim=1024, num_quantizers=16, sliding_window=72,
    decoder_dim=1536, upsample_rates=(8, 5, 4, 3), upsampling_ratios=(2, 2), sample_rate_hz=24000,
)  # fmt: skip


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20), context=st.integers(0, 40))
def test_windows_keep_every_sample_once_and_in_order(sizes, context):
    """Decoding is played by the identity: sample i of the stream is i."""
    samples_per_frame, kept, first = 3, [], 0
    for num_new in sizes:
        window = window_at(first, num_new, context)
        start = (first - window.num_context) * samples_per_frame
        decoded = range(start, start + 100 * samples_per_frame)  # padded far beyond its frames
        kept += decoded[window.kept_samples(samples_per_frame)]
        assert window.num_context == context or window.num_context == first < context
        first += num_new
    assert kept == list(range(first * samples_per_frame))


def test_the_reference_s_rule_for_the_first_chunks():
    """Chunks of 12 with 5 of context: none, then 5, then 5."""
    assert [window_at(first, 12, 5) for first in (0, 12, 24)] == [Window(0, 12), Window(5, 12), Window(5, 12)]
    assert [window_at(first, 3, 25).num_frames for first in (0, 1, 4, 12, 28)] == [3, 4, 7, 15, 28]


@given(
    buckets=st.sets(st.integers(1, 40), min_size=1).map(sorted),
    context=st.integers(0, 80),
    first=st.integers(0, 200),
)
def test_every_window_fits_a_bucket_and_full_ones_exactly(buckets, context, first):
    widths = window_buckets(buckets, context)
    assert list(widths) == sorted(set(widths))
    for num_new in buckets:
        window = window_at(first, num_new, context)
        assert window.num_frames <= widths[-1]
        if window.num_context in (0, context):
            assert window.num_frames in widths


def test_exact_context_of_the_published_sizes_is_580_frames():
    assert exact_left_context(PUBLISHED) == 10 + 71 * 8 + 2


@pytest.mark.parametrize(("layers", "window", "frames"), [(2, 9, 28), (3, 7, 30), (1, 1, 12)])
def test_exact_context_follows_layers_and_window(layers, window, frames):
    transformer = dataclasses.replace(PUBLISHED.transformer, num_layers=layers)
    config = dataclasses.replace(PUBLISHED, transformer=transformer, sliding_window=window)
    assert exact_left_context(config) == frames
