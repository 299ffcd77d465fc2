"""`codec/`: the decoder's stages, and its waveform whole, in windows, in a batch and step by step."""

import numpy as np
import torch

from qwen3tts_core.model.codec_state import NoPast
from tests.parity.registry import CLOSE, EXACT, INPUT, Computed, array

# How the reference decodes by default: chunks of 300 frames with 25 of left context (spec 4.2).
_DEFAULT_CHUNK, _DEFAULT_CONTEXT = 300, 25
_STRIDE = 479  # of the kit's `long_strided`


@array(r"codec/codes", r"codec/long_codes")
def codes(pair):
    return INPUT


@array(r"codec/(?P<stage>quantized|pre_conv|transformer|upsampled|decoder_\d+)")
def stage_output(pair, stage):
    expected = pair.golden[f"codec/{stage}"]
    output = _stages(pair)[stage]
    if stage == "transformer":  # frame-major in the reference
        output = output.T
    return Computed(output[:, : expected.shape[1]], tolerance=CLOSE)


@array(r"codec/wav_full")
def whole_wave(pair):
    golden_codes = pair.golden["codec/codes"]
    return Computed(
        pair.decode_whole(golden_codes),
        *pair.decode_in_steps(golden_codes),
        tolerance=CLOSE,
        note="in one pass and step by step",
    )


@array(r"codec/wav_chunked_(?P<chunk>\d+)_(?P<context>\d+)")
def windowed_wave(pair, chunk, context):
    return Computed(
        pair.decode_in_windows(pair.golden["codec/codes"], int(chunk), int(context)), tolerance=CLOSE
    )


@array(r"codec/wav_batch_(?P<row>[01])")
def batched_wave(pair, row):
    """Two streams of different length, padded, and again in one state arena."""
    golden_codes = pair.golden["codec/codes"]
    first, second = golden_codes[:9], golden_codes[15:32]
    padded = np.zeros((2, len(second), first.shape[1]), np.int64)
    padded[0, : len(first)], padded[1] = first, second
    waves = pair.codec.decode(torch.from_numpy(padded).to(pair.device)).cpu().numpy()
    num_samples = (len(first), len(second))[int(row)] * pair.config.codec.samples_per_frame
    return Computed(
        waves[int(row), :num_samples],
        pair.decode_in_steps(first, second)[int(row)],
        tolerance=CLOSE,
        note="in one pass and step by step",
    )


@array(r"codec/wav_unclamped_peak")
def peak(pair):
    return Computed(_stages(pair)["wav"].abs().max(), tolerance=CLOSE)


@array(r"codec/wav_clipped_fraction")
def clipped_fraction(pair):
    return Computed((_stages(pair)["wav"].abs() > 1).double().mean(), tolerance=CLOSE)


@array(r"codec/long_samples")
def long_length(pair):
    return Computed(len(_long_default(pair)), tolerance=EXACT)


@array(r"codec/long_strided")
def long_strided(pair):
    return Computed(_long_default(pair)[::_STRIDE], tolerance=CLOSE)


@array(r"codec/long_seam(?P<frame>\d+)_chunked")
def seam_of_the_default(pair, frame):
    return Computed(_around(pair, _long_default(pair), int(frame)), tolerance=CLOSE)


@array(r"codec/long_seam(?P<frame>\d+)_full")
def no_seam(pair, frame):
    golden_codes = pair.golden["codec/long_codes"]
    whole, (stepwise,) = pair.decode_whole(golden_codes), pair.decode_in_steps(golden_codes)
    return Computed(
        _around(pair, whole, int(frame)),
        _around(pair, stepwise, int(frame)),
        tolerance=CLOSE,
        note="in one pass and step by step",
    )


def _around(pair, wave, frame):
    """Frames frame - 1 to frame + 3, as the kit cuts them."""
    samples = pair.config.codec.samples_per_frame
    return wave[(frame - 1) * samples : (frame + 4) * samples]


def _long_default(pair):
    return pair.decode_in_windows(pair.golden["codec/long_codes"], _DEFAULT_CHUNK, _DEFAULT_CONTEXT)


@torch.inference_mode()
def _stages(pair):
    """By the plain decoder: kernels keep no intermediate results, and their sums show in the waves."""
    codes_bfg = torch.from_numpy(pair.golden["codec/codes"]).to(pair.device)[None]
    stages = pair.plain_codec.stages(codes_bfg, NoPast(1, codes_bfg.device))
    return {name: output[0] for name, output in stages}
