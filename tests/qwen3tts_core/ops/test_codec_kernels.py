"""What the codec's kernels rest on: planes, packed weights, tiles; and the kernels' own arithmetic."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.ops.codec_interface import Format, pack
from tests.qwen3tts_core.ops.test_triton_kernels import ROOT, interpreter_is_broken

EXACT = Format(torch.float16, 2)


# ---------------------------------------------------------------- planes
@pytest.mark.parametrize(
    ("form", "bits"),
    [
        (EXACT, 21),
        (Format(torch.float16, 1), 11),
        (Format(torch.bfloat16, 1), 8),
        (Format(torch.bfloat16, 2), 16),
    ],
)
def test_planes_carry_the_bits_they_promise(form, bits):
    x = torch.randn(9999, generator=torch.Generator().manual_seed(0)).clamp(0.125, 60000)
    planes = form.split(x)
    assert planes.shape == (form.planes, 9999)
    assert planes.dtype == form.dtype
    assert ((planes.double().sum(dim=0) - x) / x).abs().max() <= 2.0**-bits


@given(scale=st.floats(1e-30, 1e30), taps=st.integers(1, 7), num_in=st.integers(1, 9))
def test_packed_weights_are_the_weights_at_any_scale(scale, taps, num_in):
    weight = torch.randn(6, taps, num_in, generator=torch.Generator().manual_seed(1)) * scale
    packed = pack(weight, None, EXACT, num_out=3)
    assert (packed.stride, packed.taps, packed.num_in) == (2, taps, num_in)
    back = packed.planes.double().sum(dim=0) * packed.inv_scale
    peak = weight.abs().max()
    assert (back.view_as(weight) - weight).abs().max() <= peak * 2.0**-21
    assert packed.planes.isfinite().all()


def test_weights_of_zero_stay_zero():
    assert not pack(torch.zeros(2, 3), torch.zeros(2), EXACT).planes.any()


# ---------------------------------------------------------------- tiles
TRITON = pytest.mark.skipif(sys.platform != "linux", reason="no Triton wheels for this platform")


@TRITON
@given(
    num_rows=st.integers(1, 10**7),
    n=st.integers(1, 8192),
    num_in=st.sampled_from([3, 8, 16, 24, 96, 192, 384, 512, 1024, 4096]),
    planes=st.integers(1, 2),
    num_processors=st.sampled_from([8, 132]),
)
def test_every_tile_can_run(num_rows, n, num_in, planes, num_processors):
    """Powers of two from 16, within a Hopper processor's shared memory and registers."""
    from qwen3tts_core.ops.cuda.codec_tiles import choose_conv_tile, choose_unit_tile

    conv = choose_conv_tile(num_rows, n, num_in, planes, num_processors=num_processors)
    sides = [conv.block_m, conv.block_n, conv.block_k]
    assert (conv.block_m + conv.block_n) * conv.block_k * 2 * planes * conv.num_stages <= 227 * 1024
    assert conv.block_m * conv.block_n * planes <= 2 * 128 * 128
    unit = choose_unit_tile(num_rows, num_in, planes, num_processors=num_processors)
    if unit is not None:
        sides += [unit.block_m, unit.block_k, unit.n0] + ([unit.n1] if unit.n1 else [])
        assert unit.n0 + unit.n1 >= num_in
        assert (unit.block_m + unit.n0 + unit.n1) * unit.block_k * 2 * planes * unit.num_stages <= 227 * 1024
    for side in sides:
        assert side >= 16
        assert side & (side - 1) == 0


# ---------------------------------------------------------------- arithmetic
@pytest.mark.skipif(
    interpreter_is_broken(), reason="no working Triton interpreter for this platform and NumPy"
)
def test_interpreted_kernels_are_the_plain_decoder():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.qwen3tts_core.ops.interpreted_codec"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for name in ("float32: whole", "float32: row after 7", "float32: samples of NaN", "float16: whole"):
        assert name in done.stdout
