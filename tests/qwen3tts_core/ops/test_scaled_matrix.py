"""Eight bits and a scale a row: how near they come, and that their bits say what decode.cu reads in them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.ops.scaled_matrix import E4M3, ScaledMatrix


@given(seed=st.integers(0, 2**31), spread=st.floats(1e-3, 1e3))
def test_a_value_is_off_by_a_sixteenth_of_itself_or_by_a_step_of_the_smallest(seed, spread):
    generator = torch.Generator().manual_seed(seed)
    matrix = spread * torch.randn(5, 48, generator=generator)
    scaled = ScaledMatrix.quantized(matrix)
    error = (scaled.dequantized(torch.float32) - matrix).abs()
    smallest_step = 2.0**-9 * scaled.scales[:, None]
    assert (error <= torch.maximum(matrix.abs() / 16, smallest_step) * 1.001).all()


def test_each_row_s_largest_value_is_kept():
    matrix = torch.randn(7, 32) * torch.logspace(-6, 6, 7)[:, None]
    kept = ScaledMatrix.quantized(matrix).dequantized(torch.float32)
    largest = matrix.abs().argmax(dim=-1, keepdim=True)
    torch.testing.assert_close(kept.gather(1, largest), matrix.gather(1, largest), rtol=1e-6, atol=0)


def test_a_row_of_zeros_stays_one():
    matrix = torch.zeros(3, 16)
    matrix[1] = 2.0
    kept = ScaledMatrix.quantized(matrix).dequantized(torch.bfloat16)
    assert torch.equal(kept, matrix.bfloat16())


def test_a_stack_of_matrices_is_quantized_row_by_row():
    stack = torch.randn(3, 8, 16)
    whole = ScaledMatrix.quantized(stack)
    for i, matrix in enumerate(stack):
        alone = ScaledMatrix.quantized(matrix)
        assert torch.equal(whole[i].values.view(torch.uint8), alone.values.view(torch.uint8))
        assert torch.equal(whole[i].scales, alone.scales)
    assert whole.nbytes == 3 * 8 * (16 + 4)


@pytest.mark.parametrize("sign", [0, 0x80])
def test_moved_to_bfloat16_s_places_the_bits_are_the_value_times_a_power_of_two(sign):
    """`unpack_e4m3` of decode.cu; subnormals too. All codes but NaN's."""
    codes = torch.arange(0x7F, dtype=torch.int32) + sign
    moved = ((codes & 0x80) << 8 | (codes & 0x7F) << 4).to(torch.int32)
    bits = torch.where(moved >= 0x8000, moved - 0x10000, moved).to(torch.int16)
    found = bits.view(torch.bfloat16) * torch.tensor(2.0**120, dtype=torch.bfloat16)
    assert torch.equal(found.float(), codes.to(torch.uint8).view(E4M3).float())


def test_scales_are_rounded_as_a_gpu_rounds_them():
    """A GPU divides by a number by multiplying with its reciprocal; here too, or some scales would differ by an ulp."""
    wide = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    largest = wide.abs().amax(dim=-1)
    by_product = largest * torch.tensor(1 / 448)
    assert not torch.equal(by_product, largest / 448)
    assert torch.equal(ScaledMatrix.quantized(wide).scales, by_product)
