"""The Triton kernels on CPU, in Triton's own interpreter, against the reference ops.

    TRITON_INTERPRET=1 python -m tests.qwen3tts_core.ops.interpreted

A program of its own: the variable counts when triton is imported, and would turn the kernels of a
GPU test in the same process into interpreted ones. Prints a line per comparison; exits 1 on the
first that differs. float32 only, and no dependent launches: what those change shows on a GPU alone.
"""

import torch

from qwen3tts_core.ops.cuda.backend import CudaOps
from qwen3tts_core.ops.interface import DecodeLayout, DrawRows, FrameLayout, LayerKV, NoiseKey, RopeTable
from qwen3tts_core.ops.reference import ReferenceOps, spell_out
from qwen3tts_core.ops.scaled_matrix import ScaledMatrix

EPS = 1e-6
REFERENCE = ReferenceOps()


def ops_with(num_processors):
    """How many there are decides into how many splits attention cuts a context."""
    return CudaOps(torch.device("cpu"), num_processors=num_processors, pdl=False)


def compare(name, actual, expected, tolerance=1e-5):
    error = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-9))
    print(f"{name:60s} {error:.1e}")
    if not error <= tolerance:
        raise SystemExit(f"{name}: off by {error:.1e} of the largest value, the limit is {tolerance:.0e}")


def check_linears(rows, outputs, width):
    ops, name = ops_with(132), f"{rows} rows, {width} -> {outputs}"
    x, weight = torch.randn(rows, width), torch.randn(outputs, width) / width**0.5
    gain, residual = torch.rand(width) + 0.5, torch.randn(rows, outputs)
    gate_up = torch.randn(2 * outputs, width) / width**0.5
    compare(f"linear: {name}", ops.linear(x, weight), REFERENCE.linear(x, weight))
    for norm in (gain, None):
        compare(f"rms_norm: {name}", ops.rms_norm(x, norm, EPS), REFERENCE.rms_norm(x, norm, EPS))
        normed = REFERENCE.norm_linear(x, norm, EPS, weight)
        compare(f"norm_linear: {name}", ops.norm_linear(x, norm, EPS, weight), normed)
    added = REFERENCE.linear_add(x, weight, residual)
    compare(f"linear_add: {name}", ops.linear_add(x, weight, residual.clone()), added)
    for norm in (gain, None):
        gated = REFERENCE.norm_gate_up(x, norm, EPS, gate_up)
        compare(f"norm_gate_up: {name}", ops.norm_gate_up(x, norm, EPS, gate_up), gated)


def check_eight_bits(rows, outputs, width):
    """Gated: half of the rows are gates."""
    ops, name = ops_with(132), f"{rows} rows, {width} -> {outputs}, e4m3"
    x, matrix = torch.randn(rows, width), ScaledMatrix.quantized(torch.randn(outputs, width) / width**0.5)
    residual = torch.randn(rows, outputs)
    compare(f"linear: {name}", ops.linear(x, matrix), REFERENCE.linear(x, matrix))
    added = REFERENCE.linear_add(x, matrix, residual)
    compare(f"linear_add: {name}", ops.linear_add(x, matrix, residual.clone()), added)
    gated = REFERENCE.norm_gate_up(x, None, EPS, matrix)
    compare(f"norm_gate_up: {name}", ops.norm_gate_up(x, None, EPS, matrix), gated)


def cached_streams(rows, kv_heads, head_dim, pages, page_size, positions):
    """Pages in random order; NaN wherever no position of a row was written."""
    shape = (rows * pages + 1, page_size, kv_heads, head_dim)
    kv = LayerKV(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    table = torch.randperm(rows * pages).view(rows, pages)
    for row, position in enumerate(positions.tolist()):
        t = torch.arange(position)
        kv.key[table[row, t // page_size], t % page_size] = torch.randn(position, kv_heads, head_dim)
        kv.value[table[row, t // page_size], t % page_size] = torch.randn(position, kv_heads, head_dim)
    return kv, table


def check_attention(rows, heads, kv_heads, head_dim, pages, num_processors):
    page_size, ops = 16, ops_with(num_processors)
    positions = torch.randint(0, pages * page_size, (rows,))
    positions[0] = pages * page_size - 1
    kv, table = cached_streams(rows, kv_heads, head_dim, pages, page_size, positions)
    other = LayerKV(kv.key.clone(), kv.value.clone())
    angles = torch.arange(pages * page_size)[:, None] * torch.rand(head_dim // 2)
    rope = RopeTable(angles.cos(), angles.sin())
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim)
    q_norm, k_norm = torch.rand(head_dim) + 0.5, torch.rand(head_dim) + 0.5
    write_index = table[torch.arange(rows), positions // page_size] * page_size + positions % page_size
    layout = DecodeLayout(positions, write_index, table)
    expected = REFERENCE.attention(qkv, q_norm, k_norm, EPS, rope, layout, other)
    name = f"attention: {rows} rows, {heads}/{kv_heads} heads of {head_dim}, {pages} pages"
    compare(name, ops.attention(qkv, q_norm, k_norm, EPS, rope, layout, kv), expected)
    compare(f"{name}, keys", kv.key.nan_to_num(7), other.key.nan_to_num(7))
    compare(f"{name}, values", kv.value.nan_to_num(7), other.value.nan_to_num(7))
    shared = DecodeLayout(positions, write_index, table, rows_share_pages=True)
    compare(f"{name}, writes first", ops.attention(qkv, q_norm, k_norm, EPS, rope, shared, kv), expected)


def check_first_pass_of_the_predictor():
    """Two positions of every row in one pass: the second attends to what the first writes."""
    batch, heads, kv_heads, head_dim = 3, 4, 2, 16
    shape = (batch, 16, kv_heads, head_dim)
    kv, other = (LayerKV(torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in range(2))
    rope = RopeTable(torch.rand(16, head_dim // 2), torch.rand(16, head_dim // 2))
    qkv = torch.randn(2 * batch, (heads + 2 * kv_heads) * head_dim)
    norm, layout = torch.ones(head_dim), FrameLayout(0, num_positions=2)
    expected = REFERENCE.attention(
        qkv, norm, norm, EPS, rope, spell_out(layout, 2 * batch, 16, qkv.device), other
    )
    actual = ops_with(132).attention(qkv, norm, norm, EPS, rope, layout, kv)
    compare("attention: first pass of the code predictor", actual, expected)


def check_draws(rows, num_ids):
    ops = ops_with(132)
    logits = torch.randn(rows, num_ids) * 3
    logits[0, 5] = logits[0].max()  # a tie at the top
    draw = DrawRows(
        torch.tensor([True, True, False, True])[:rows],
        torch.tensor([0.9, 0.6, 1.0, 1.3])[:rows],
        torch.tensor([50, 0, 0, 3])[:rows],
        torch.tensor([0, 0.2, 0, 0.35])[:rows],
    )
    key = NoiseKey(
        *(torch.tensor(column)[:rows] for column in ([2**44 + 1, -5, 7, 0], [0, 1, 2, 3], [0, 5, 9, 1000]))
    )
    noises = [each.frame_noise(key, 16, num_ids, num_ids) for each in (ops, REFERENCE)]
    table = torch.randn(num_ids, 48)
    for group in (1, 2, 15):
        codes, fed = ops.draw_next(logits, draw, noises[0], group, table)
        expected, _ = REFERENCE.draw_next(logits, draw, noises[1], group, table)
        compare(f"draw_next: {rows} rows, group {group}", codes.float(), expected.float(), 0)
        compare(f"draw_next: {rows} rows, group {group}, fed", fed, table[expected], 0)
    first = (
        torch.rand(rows, num_ids) < 0.3,
        torch.tensor([1.05, 1.7, 1.0, 1.2])[:rows],
        torch.tensor([True, False, True, False])[:rows],
        torch.arange(num_ids) < 200,
        250,
    )
    codes, expected = (
        each.draw_first(logits, *first, draw, noise)
        for each, noise in zip((ops, REFERENCE), noises, strict=True)
    )
    compare(f"draw_first: {rows} rows", codes.float(), expected.float(), 0)


def main():
    torch.manual_seed(0)
    for rows, outputs, width in [(1, 64, 48), (3, 80, 96), (8, 160, 64), (33, 48, 200)]:
        check_linears(rows, outputs, width)
    check_eight_bits(3, 80, 96)
    for sizes in [(1, 4, 2, 32, 5, 132), (3, 5, 1, 24, 9, 132), (3, 6, 3, 16, 3, 4), (2, 4, 4, 128, 17, 132)]:
        check_attention(*sizes)
    check_first_pass_of_the_predictor()
    check_draws(1, 300)
    check_draws(4, 300)


if __name__ == "__main__":
    main()
