"""The codec decoder's kernels in Triton; what each means stands in ops/codec_interface.py.

A conv is a product over (tap, channel): the program walks the taps, and a row's input at each is
either the row `back` steps above it or, before the step's first input, an entry of the stream's tail.
Both are pointers, so the loop only ever loads. Everything after the product happens in registers:
bias, residual, Snake in float32, the split into planes. A few programs more than there are tiles put
the layer's new tail into the arena.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qwen3tts_core.ops.cuda.pdl import prefetch_l2, wait_for_inputs

NONE = tl.constexpr(0)
SNAKE = tl.constexpr(1)
GELU = tl.constexpr(2)
GATED = tl.constexpr(3)
KEEP_BLOCK = tl.constexpr(1024)
MAX_SUMS = tl.constexpr(64)


# ---------------------------------------------------------------- parts
@triton.jit
def _round(x):
    """To the nearest integer, ties to even, for |x| < 2^22: float32 addition does it at full rate."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _snake(x, frequency, gain):
    """x + gain * sin²(x * frequency). sin² has period pi, so half turns left over don't matter."""
    u = x * (frequency * 0.3183098861837907)
    r = u - _round(u)  # in [-1/2, 1/2], exact
    r2 = r * r
    s = tl.fma(r2, -7.3704309e-3, 8.2145887e-2)  # sin(pi r) / r by Taylor to r^10: 6e-8 at 1/2
    s = tl.fma(r2, s, -5.9926453e-1)
    s = tl.fma(r2, s, 2.5501640)
    s = tl.fma(r2, s, -5.1677128)
    s = tl.fma(r2, s, 3.1415927)
    s = s * r
    return tl.fma(gain * s, s, x)


@triton.jit
def _store_planes(out_ptr, at, plane_size, value, mask, PLANES: tl.constexpr):
    rest = value
    for p in tl.static_range(PLANES):
        part = rest.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + p * plane_size + at, part, mask=mask)
        rest = rest - part.to(tl.float32)


@triton.jit
def _keep(
    program, keepers, x_ptr, x_plane, T, C,
    arena_ptr, rows_ptr, num_valid_ptr, position_ptr, row_size, offset, length, rate,
    PLANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Put a part of one row's last valid inputs into the ring; the kernel's tiles read the tail's copy."""
    b = program // keepers
    e = (program % keepers) * KEEP_BLOCK + tl.arange(0, KEEP_BLOCK)
    back = e // C
    wait_for_inputs(PDL)
    t = tl.load(num_valid_ptr + b).to(tl.int32) * rate - 1 - back
    mask = (back < length) & (t >= 0)
    at = (b.to(tl.int64) * T + tl.maximum(t, 0)) * C + e % C
    value = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if PLANES >= 2:
        value += tl.load(x_ptr + x_plane + at, mask=mask, other=0.0).to(tl.float32)
    slot = (tl.load(position_ptr + b) * rate + tl.maximum(t, 0)) % length
    out = tl.load(rows_ptr + b) * row_size + offset + slot * C + e % C
    tl.store(arena_ptr + out, value, mask=mask)


# ---------------------------------------------------------------- convs
# Sizes that a kernel is not compiled for. The others are: whether they divide by 16 decides how wide a
# load may be, and with one unknown stride in the row's address every load of it would be 2 bytes.
_CONV_FIXED = [
    "num_tiles", "keepers", "num_rows", "T", "taps", "dilation", "n_out", "num_sums", "offset", "length", "rate",
]  # fmt: skip


@triton.jit(do_not_specialize=_CONV_FIXED)
def conv_kernel(
    x_ptr, tail_ptr, w_ptr, bias_ptr, residual_ptr, frequency_ptr, gain_ptr, norm_ptr,
    raw_ptr, out_ptr, sums_ptr,
    arena_ptr, rows_ptr, num_valid_ptr, position_ptr,
    num_tiles, keepers, num_rows, T, N, C, taps, dilation, n_out, inv_scale, eps, num_sums,
    x_plane, tail_plane, w_plane, out_plane, tail_row, tail_offset,
    row_size, offset, length, rate,
    PLANES: tl.constexpr, OUT_PLANES: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_RAW: tl.constexpr, HAS_NORM: tl.constexpr,
    HAS_SUMS: tl.constexpr, HAS_KEEP: tl.constexpr, N_STEPS: tl.constexpr, EVEN_C: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    num_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    if HAS_KEEP:  # noqa: SIM102 - decided when compiled
        if pid >= num_tiles:
            _keep(
                pid - num_tiles, keepers, x_ptr, x_plane, T, C,
                arena_ptr, rows_ptr, num_valid_ptr, position_ptr, row_size, offset, length, rate, PLANES, PDL,
            )  # fmt: skip
            return
    pid_n = pid % num_n
    m = (pid // num_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    per_tap = tl.cdiv(C, BLOCK_K)
    w_row = w_ptr + tl.minimum(n, N - 1).to(tl.int64) * (taps * C)

    if PREFETCH and PDL:
        for start in range(0, taps * C, 64):  # 128 bytes of 16-bit weights
            for p in tl.static_range(PLANES):
                prefetch_l2(w_row + p * w_plane.to(tl.int64) + start, PDL)
    wait_for_inputs(PDL)

    flat = tl.minimum(m, num_rows - 1)
    row = flat // T
    t = flat - row * T
    x_row = x_ptr + flat.to(tl.int64) * C
    # Step s < 0 is entry reach + s of the tail: as far below the row as in x.
    tail_at = tail_ptr + row * tail_row + tail_offset + ((taps - 1) * dilation + t) * C

    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in range(taps * per_tap):
        tap = step // per_tap
        c = (step - tap * per_tap) * BLOCK_K + k
        back = (taps - 1 - tap) * dilation
        inside = t >= back
        x_at = (tl.where(inside, x_row, tail_at) - back * C)[:, None] + c[None, :]
        w_at = w_row[:, None] + (tap * C + c)[None, :]
        if EVEN_C:
            x0 = tl.load(x_at)
            w0 = tl.load(w_at)
        else:
            x0 = tl.load(x_at, mask=(c < C)[None, :], other=0.0)
            w0 = tl.load(w_at, mask=(c < C)[None, :], other=0.0)
        if PLANES >= 2:
            plane = tl.where(inside, x_plane, tail_plane)[:, None]
            if EVEN_C:
                x1 = tl.load(x_at + plane)
                w1 = tl.load(w_at + w_plane)
            else:
                x1 = tl.load(x_at + plane, mask=(c < C)[None, :], other=0.0)
                w1 = tl.load(w_at + w_plane, mask=(c < C)[None, :], other=0.0)
            # Tensor cores cut off what a sum can't hold: over thousands of terms in one accumulator that
            # cost 26 dB. So each block starts from zero, and true float32 additions join the blocks.
            part = tl.dot(x1, tl.trans(w0))
            part = tl.dot(x0, tl.trans(w1), part)
            acc += tl.dot(x0, tl.trans(w0), part)
        else:
            acc = tl.dot(x0, tl.trans(w0), acc)

    acc = acc * inv_scale
    if HAS_NORM:
        s = tl.arange(0, MAX_SUMS)
        norm_at = norm_ptr + flat[:, None] * num_sums + s[None, :]
        squares = tl.sum(tl.load(norm_at, mask=(s < num_sums)[None, :], other=0.0), axis=1)
        acc = acc * tl.rsqrt(squares / C + eps)[:, None]
    mask = (m < num_rows)[:, None] & (n < N)[None, :]
    channel = n
    if N_STEPS:
        channel = n % n_out
    if HAS_BIAS:
        acc += tl.load(bias_ptr + channel, mask=n < N, other=0.0)[None, :]
    at = flat.to(tl.int64)[:, None] * N + n[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RAW:
        tl.store(raw_ptr + at, acc.to(raw_ptr.dtype.element_ty), mask=mask)
    if HAS_SUMS:
        squares = tl.sum(tl.where(mask, acc * acc, 0.0), axis=1)
        tl.store(sums_ptr + flat * num_n + pid_n, squares, mask=m < num_rows)
    if ACTIVATION == SNAKE:
        frequency = tl.load(frequency_ptr + channel, mask=n < N, other=0.0)
        gain = tl.load(gain_ptr + channel, mask=n < N, other=0.0)
        acc = _snake(acc, frequency[None, :], gain[None, :])
    elif ACTIVATION == GELU:
        acc = 0.5 * acc * (1.0 + tl.erf(acc * 0.7071067811865476))
    if ACTIVATION == GATED:
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N // 2, 2]))
        acc = gate / (1.0 + tl.exp(-gate)) * up
        half = pid_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        mask = (m < num_rows)[:, None] & (half < N // 2)[None, :]
        at = flat.to(tl.int64)[:, None] * (N // 2) + half[None, :]
    if OUT_PLANES:
        _store_planes(out_ptr, at, out_plane.to(tl.int64), acc, mask, OUT_PLANES)


@triton.jit
def _unit_half(acc, inv_scale, bias_ptr, frequency_ptr, gain_ptr, n, C):
    """What lies between the unit's convs, for one half of the channels."""
    bias = tl.load(bias_ptr + n, mask=n < C, other=0.0)
    frequency = tl.load(frequency_ptr + n, mask=n < C, other=0.0)
    gain = tl.load(gain_ptr + n, mask=n < C, other=0.0)
    return _snake(acc * inv_scale + bias[None, :], frequency[None, :], gain[None, :])


@triton.jit
def _unit_product(acc, h, w_ptr, w_plane, n, k, C, PLANES: tl.constexpr):
    """acc + h @ w[n, k], h split into planes in registers."""
    at = w_ptr + n[:, None] * C + k[None, :]
    mask = (n < C)[:, None] & (k < C)[None, :]
    h0 = h.to(w_ptr.dtype.element_ty)
    w0 = tl.load(at, mask=mask, other=0.0)
    if PLANES >= 2:
        h1 = (h - h0.to(tl.float32)).to(w_ptr.dtype.element_ty)
        w1 = tl.load(at + w_plane, mask=mask, other=0.0)
        acc = tl.dot(h1, tl.trans(w0), acc)
        acc = tl.dot(h0, tl.trans(w1), acc)
    return tl.dot(h0, tl.trans(w0), acc)


@triton.jit
def _unit_finish(
    acc, inv_scale, bias_ptr, residual_ptr, frequency_ptr, gain_ptr, raw_ptr, out_ptr, out_plane,
    m, n, flat, num_rows, C, HAS_RAW: tl.constexpr, OUT_PLANES: tl.constexpr,
):  # fmt: skip
    mask = (m < num_rows)[:, None] & (n < C)[None, :]
    at = flat.to(tl.int64)[:, None] * C + n[None, :]
    acc = acc * inv_scale + tl.load(bias_ptr + n, mask=n < C, other=0.0)[None, :]
    acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RAW:
        tl.store(raw_ptr + at, acc.to(raw_ptr.dtype.element_ty), mask=mask)
    frequency = tl.load(frequency_ptr + n, mask=n < C, other=0.0)
    gain = tl.load(gain_ptr + n, mask=n < C, other=0.0)
    acc = _snake(acc, frequency[None, :], gain[None, :])
    _store_planes(out_ptr, at, out_plane.to(tl.int64), acc, mask, OUT_PLANES)


_UNIT_FIXED = ["num_tiles", "keepers", "num_rows", "T", "taps", "dilation", "offset", "length", "rate"]


@triton.jit(do_not_specialize=_UNIT_FIXED)
def unit_kernel(
    x_ptr, tail_ptr, residual_ptr,
    w1_ptr, bias1_ptr, frequency1_ptr, gain1_ptr, w2_ptr, bias2_ptr, frequency2_ptr, gain2_ptr,
    raw_ptr, out_ptr,
    arena_ptr, rows_ptr, num_valid_ptr, position_ptr,
    num_tiles, keepers, num_rows, T, C, taps, dilation, inv_scale1, inv_scale2,
    x_plane, tail_plane, w1_plane, w2_plane, out_plane, tail_row, tail_offset,
    row_size, offset, length, rate,
    PLANES: tl.constexpr, OUT_PLANES: tl.constexpr, HAS_RAW: tl.constexpr, HAS_KEEP: tl.constexpr,
    EVEN_C: tl.constexpr, BLOCK_M: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A whole residual unit: all channels in one program, as N0 and N1 of them (powers of two)."""
    pid = tl.program_id(0)
    if HAS_KEEP:  # noqa: SIM102 - decided when compiled
        if pid >= num_tiles:
            _keep(
                pid - num_tiles, keepers, x_ptr, x_plane, T, C,
                arena_ptr, rows_ptr, num_valid_ptr, position_ptr, row_size, offset, length, rate, PLANES, PDL,
            )  # fmt: skip
            return
    m = pid * BLOCK_M + tl.arange(0, BLOCK_M)
    n0 = tl.arange(0, N0)
    k = tl.arange(0, BLOCK_K)
    per_tap = tl.cdiv(C, BLOCK_K)
    w0_row = w1_ptr + tl.minimum(n0, C - 1) * (taps * C)
    if N1:
        n1 = N0 + tl.arange(0, N1)
        w1_row = w1_ptr + tl.minimum(n1, C - 1) * (taps * C)
    if PREFETCH and PDL:
        for start in range(0, taps * C, 64):
            for p in tl.static_range(PLANES):
                prefetch_l2(w0_row + p * w1_plane + start, PDL)
                if N1:
                    prefetch_l2(w1_row + p * w1_plane + start, PDL)
    wait_for_inputs(PDL)

    flat = tl.minimum(m, num_rows - 1)
    row = flat // T
    t = flat - row * T
    x_row = x_ptr + flat.to(tl.int64) * C
    tail_at = tail_ptr + row * tail_row + tail_offset + ((taps - 1) * dilation + t) * C

    acc0 = tl.zeros([BLOCK_M, N0], dtype=tl.float32)
    if N1:
        acc1 = tl.zeros([BLOCK_M, N1], dtype=tl.float32)
    for step in range(taps * per_tap):
        tap = step // per_tap
        c = (step - tap * per_tap) * BLOCK_K + k
        back = (taps - 1 - tap) * dilation
        inside = t >= back
        x_at = (tl.where(inside, x_row, tail_at) - back * C)[:, None] + c[None, :]
        w_c = (tap * C + c)[None, :]
        if EVEN_C:
            x0 = tl.load(x_at)
            v0 = tl.load(w0_row[:, None] + w_c)
            if N1:
                u0 = tl.load(w1_row[:, None] + w_c)
        else:
            c_mask = (c < C)[None, :]
            x0 = tl.load(x_at, mask=c_mask, other=0.0)
            v0 = tl.load(w0_row[:, None] + w_c, mask=c_mask, other=0.0)
            if N1:
                u0 = tl.load(w1_row[:, None] + w_c, mask=c_mask, other=0.0)
        if PLANES >= 2:
            plane = tl.where(inside, x_plane, tail_plane)[:, None]
            if EVEN_C:
                x1 = tl.load(x_at + plane)
                v1 = tl.load(w0_row[:, None] + w_c + w1_plane)
                if N1:
                    u1 = tl.load(w1_row[:, None] + w_c + w1_plane)
            else:
                x1 = tl.load(x_at + plane, mask=c_mask, other=0.0)
                v1 = tl.load(w0_row[:, None] + w_c + w1_plane, mask=c_mask, other=0.0)
                if N1:
                    u1 = tl.load(w1_row[:, None] + w_c + w1_plane, mask=c_mask, other=0.0)
            part = tl.dot(x1, tl.trans(v0))  # from zero, as in conv_kernel
            part = tl.dot(x0, tl.trans(v1), part)
            acc0 += tl.dot(x0, tl.trans(v0), part)
            if N1:
                part = tl.dot(x1, tl.trans(u0))
                part = tl.dot(x0, tl.trans(u1), part)
                acc1 += tl.dot(x0, tl.trans(u0), part)
        else:
            acc0 = tl.dot(x0, tl.trans(v0), acc0)
            if N1:
                acc1 = tl.dot(x0, tl.trans(u0), acc1)

    h0 = _unit_half(acc0, inv_scale1, bias1_ptr, frequency1_ptr, gain1_ptr, n0, C)
    out0 = tl.zeros([BLOCK_M, N0], dtype=tl.float32)
    out0 = _unit_product(out0, h0, w2_ptr, w2_plane, n0, n0, C, PLANES)
    if N1:
        h1 = _unit_half(acc1, inv_scale1, bias1_ptr, frequency1_ptr, gain1_ptr, n1, C)
        out0 = _unit_product(out0, h1, w2_ptr, w2_plane, n0, n1, C, PLANES)
        out1 = tl.zeros([BLOCK_M, N1], dtype=tl.float32)
        out1 = _unit_product(out1, h0, w2_ptr, w2_plane, n1, n0, C, PLANES)
        out1 = _unit_product(out1, h1, w2_ptr, w2_plane, n1, n1, C, PLANES)
    _unit_finish(
        out0, inv_scale2, bias2_ptr, residual_ptr, frequency2_ptr, gain2_ptr, raw_ptr, out_ptr, out_plane,
        m, n0, flat, num_rows, C, HAS_RAW, OUT_PLANES,
    )  # fmt: skip
    if N1:
        _unit_finish(
            out1, inv_scale2, bias2_ptr, residual_ptr, frequency2_ptr, gain2_ptr, raw_ptr, out_ptr, out_plane,
            m, n1, flat, num_rows, C, HAS_RAW, OUT_PLANES,
        )  # fmt: skip


# ---------------------------------------------------------------- the small ones
@triton.jit
def begin_kernel(
    lines_ptr, arena_ptr, positions_ptr, rows_ptr, position_ptr, wide_ptr, front_ptr, stack_ptr,
    row_size, num_copied, plane_size,
    FRONT_PLANES: tl.constexpr, STACK_PLANES: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One entry of one tail of one row: out of the ring, zeros if it lies before the stream's start."""
    line = lines_ptr + tl.program_id(0) * 6
    b = tl.program_id(1)
    offset, length, channels = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    rate, kind, place = tl.load(line + 3), tl.load(line + 4), tl.load(line + 5)
    c = tl.arange(0, BLOCK_C)
    mask = c < channels
    wait_for_inputs(PDL)
    row = tl.load(rows_ptr + b).to(tl.int64)
    position = tl.load(positions_ptr + row)
    if tl.program_id(0) == 0:
        tl.store(position_ptr + b, position)
    time = position * rate - length + place
    slot = tl.maximum(time, 0) % length
    at = row * row_size + offset + slot * channels + c
    value = tl.load(arena_ptr + at, mask=mask & (c + time >= c), other=0.0)
    out = b.to(tl.int64) * num_copied + offset + place * channels + c
    if kind == 0:
        tl.store(wide_ptr + out, value, mask=mask)
    elif kind == 1:
        _store_planes(front_ptr, out, plane_size, value, mask, FRONT_PLANES)
    else:
        _store_planes(stack_ptr, out, plane_size, value, mask, STACK_PLANES)


@triton.jit
def lookup_kernel(
    codes_ptr, table_ptr, out_ptr, C, num_codes, out_plane,
    G: tl.constexpr, OUT_PLANES: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = c < C
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_C], dtype=tl.float32)
    for g in tl.static_range(G):
        code = tl.load(codes_ptr + m * G + g)
        acc += tl.load(table_ptr + (g * num_codes + code) * C + c, mask=mask, other=0.0)
    _store_planes(out_ptr, m * C + c, out_plane, acc, mask, OUT_PLANES)


@triton.jit(do_not_specialize=["T", "offset", "length", "rate"])
def depthwise_norm_kernel(
    x_ptr, tail_ptr, w_ptr, bias_ptr, norm_weight_ptr, norm_bias_ptr, out_ptr,
    arena_ptr, rows_ptr, num_valid_ptr, position_ptr,
    T, C, tail_row, tail_offset, out_plane, row_size, offset, length, rate, eps,
    TAPS: tl.constexpr, OUT_PLANES: tl.constexpr, HAS_KEEP: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    c = tl.arange(0, BLOCK_C)
    mask = c < C
    h = tl.load(bias_ptr + c, mask=mask, other=0.0)
    norm_weight = tl.load(norm_weight_ptr + c, mask=mask, other=0.0)
    norm_bias = tl.load(norm_bias_ptr + c, mask=mask, other=0.0)
    b = m // T
    t = m - b * T
    wait_for_inputs(PDL)
    x = tl.zeros([BLOCK_C], dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        weight = tl.load(w_ptr + tap * C + c, mask=mask, other=0.0)
        if t >= back:
            x = tl.load(x_ptr + (m - back).to(tl.int64) * C + c, mask=mask, other=0.0)
        else:
            before = tail_ptr + b * tail_row + tail_offset + (TAPS - 1 + t - back) * C
            x = tl.load(before + c, mask=mask, other=0.0)
        h += weight * x
    if HAS_KEEP:
        valid = tl.load(num_valid_ptr + b).to(tl.int32) * rate
        if (t < valid) & (t >= valid - length):
            slot = (tl.load(position_ptr + b) * rate + t) % length
            at = tl.load(rows_ptr + b) * row_size + offset + slot * C + c
            tl.store(arena_ptr + at, x, mask=mask)
    h = tl.where(mask, h, 0.0)
    centred = tl.where(mask, h - tl.sum(h, axis=0) / C, 0.0)
    variance = tl.sum(centred * centred, axis=0) / C
    out = centred * tl.rsqrt(variance + eps) * norm_weight + norm_bias
    _store_planes(out_ptr, m.to(tl.int64) * C + c, out_plane.to(tl.int64), out, mask, OUT_PLANES)


@triton.jit(do_not_specialize=["F"])
def rope_kernel(
    inverse_frequency_ptr, cos_ptr, sin_ptr, position_ptr, F, HALF_E, HALF: tl.constexpr, PDL: tl.constexpr
):
    m = tl.program_id(0)
    j = tl.arange(0, HALF)
    inverse_frequency = tl.load(inverse_frequency_ptr + j, mask=j < HALF_E, other=0.0)
    wait_for_inputs(PDL)
    angle = (tl.load(position_ptr + m // F) + m % F).to(tl.float32) * inverse_frequency
    tl.store(cos_ptr + m * HALF_E + j, tl.cos(angle), mask=j < HALF_E)
    tl.store(sin_ptr + m * HALF_E + j, tl.sin(angle), mask=j < HALF_E)


@triton.jit
def _rotated(ptr, cos_ptr, sin_ptr, frame, mask, j, E: tl.constexpr):
    """Heads at `ptr` [n] of frames `frame` [n], rotated: two halves [n, HALF] float32."""
    both = mask[:, None] & (j < E // 2)[None, :]
    low = tl.load(ptr[:, None] + j[None, :], mask=both, other=0.0)
    high = tl.load(ptr[:, None] + E // 2 + j[None, :], mask=both, other=0.0)
    at = frame[:, None] * (E // 2) + j[None, :]
    cos = tl.load(cos_ptr + at, mask=both, other=0.0)
    sin = tl.load(sin_ptr + at, mask=both, other=0.0)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _attend(q_low, q_high, k_low, k_high, v, visible, scale, peak, total, acc):
    """One block of keys into the running softmax."""
    scores = tl.dot(q_low, tl.trans(k_low), input_precision="tf32x3")
    scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision="tf32x3") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp(scores - new_peak[:, None])
    shrink = tl.exp(peak - new_peak)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="tf32x3")
    return new_peak, total, acc


@triton.jit(do_not_specialize=["F", "splits"])
def attention_kernel(
    qkv_ptr, cos_ptr, sin_ptr, out_ptr,
    arena_ptr, rows_ptr, num_valid_ptr, position_ptr,
    F, out_plane, row_size, offset, splits, scale,
    H: tl.constexpr, KVH: tl.constexpr, E: tl.constexpr, PAST: tl.constexpr,
    HALF: tl.constexpr, FULL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr,
    OUT_PLANES: tl.constexpr, HAS_ARENA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and one KV head; its query heads and blocks of queries in turn.

    Key j of a step is frame position + j: below 0 in the ring, from 0 on in qkv. A query sees PAST
    keys and itself. The ring is written after its last read, by the one program that reads it.
    """
    b = tl.program_id(0) // KVH
    head = tl.program_id(0) % KVH
    j = tl.arange(0, HALF)
    e = tl.arange(0, FULL)
    width: tl.constexpr = (H + 2 * KVH) * E
    wait_for_inputs(PDL)
    position = tl.load(position_ptr + b)
    ring = arena_ptr
    if HAS_ARENA:
        ring = arena_ptr + tl.load(rows_ptr + b) * row_size + offset + head * E
    new = qkv_ptr + b.to(tl.int64) * F * width
    cos_ptr += b * F * (E // 2)
    sin_ptr += b * F * (E // 2)

    for block in range(tl.program_id(1), tl.cdiv(F, BLOCK_Q), splits):
        q_frame = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        q_mask = q_frame < F
        for g in range(H // KVH):
            query_head = head * (H // KVH) + g
            q_at = new + q_frame * width + query_head * E
            q_low, q_high = _rotated(q_at, cos_ptr, sin_ptr, q_frame, q_mask, j, E)
            peak = tl.full([BLOCK_Q], -1e30, dtype=tl.float32)
            total = tl.zeros([BLOCK_Q], dtype=tl.float32)
            acc = tl.zeros([BLOCK_Q, FULL], dtype=tl.float32)
            if HAS_ARENA:
                first = tl.maximum(block * BLOCK_Q - PAST, -tl.minimum(position, PAST).to(tl.int32))
                for start in range(first, 0, BLOCK_T):
                    t = start + tl.arange(0, BLOCK_T)
                    key_mask = (t < 0)[:, None] & (j < E // 2)[None, :]
                    at = ring + ((position + t) % PAST) * (2 * KVH * E)
                    k_low = tl.load(at[:, None] + j[None, :], mask=key_mask, other=0.0)
                    k_high = tl.load(at[:, None] + E // 2 + j[None, :], mask=key_mask, other=0.0)
                    v_mask = (t < 0)[:, None] & (e < E)[None, :]
                    v = tl.load(at[:, None] + KVH * E + e[None, :], mask=v_mask, other=0.0)
                    visible = (t < 0)[None, :] & (t[None, :] >= q_frame[:, None] - PAST)
                    peak, total, acc = _attend(
                        q_low, q_high, k_low, k_high, v, visible, scale, peak, total, acc
                    )
            first = tl.maximum(block * BLOCK_Q - PAST, 0)
            for start in range(first, tl.minimum((block + 1) * BLOCK_Q, F), BLOCK_T):
                t = start + tl.arange(0, BLOCK_T)
                at = new + t * width + (H + head) * E
                k_low, k_high = _rotated(at, cos_ptr, sin_ptr, t, t < F, j, E)
                v_mask = (t < F)[:, None] & (e < E)[None, :]
                v = tl.load(at[:, None] + KVH * E + e[None, :], mask=v_mask, other=0.0)
                visible = (t[None, :] <= q_frame[:, None]) & (t[None, :] >= q_frame[:, None] - PAST)
                peak, total, acc = _attend(q_low, q_high, k_low, k_high, v, visible, scale, peak, total, acc)
            out_at = (b.to(tl.int64) * F + q_frame)[:, None] * (H * E) + query_head * E + e[None, :]
            out_mask = q_mask[:, None] & (e < E)[None, :]
            _store_planes(out_ptr, out_at, out_plane, acc / total[:, None], out_mask, OUT_PLANES)

    if HAS_ARENA:
        tl.debug_barrier()
        valid = tl.load(num_valid_ptr + b).to(tl.int32)
        for start in range(tl.maximum(valid - PAST, 0), valid, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            at = new + t * width + (H + head) * E
            k_low, k_high = _rotated(at, cos_ptr, sin_ptr, t, t < valid, j, E)
            v_mask = (t < valid)[:, None] & (e < E)[None, :]
            v = tl.load(at[:, None] + KVH * E + e[None, :], mask=v_mask, other=0.0)
            key_mask = (t < valid)[:, None] & (j < E // 2)[None, :]
            to = ring + ((position + t) % PAST) * (2 * KVH * E)
            tl.store(to[:, None] + j[None, :], k_low, mask=key_mask)
            tl.store(to[:, None] + E // 2 + j[None, :], k_high, mask=key_mask)
            tl.store(to[:, None] + KVH * E + e[None, :], v, mask=v_mask)


_WAVE_FIXED = ["num_tiles", "keepers", "num_rows", "T", "offset", "length", "rate"]


@triton.jit(do_not_specialize=_WAVE_FIXED)
def wave_kernel(
    x_ptr, tail_ptr, w_ptr, out_ptr, positions_ptr, arena_ptr, rows_ptr, num_valid_ptr, position_ptr,
    num_tiles, keepers, num_rows, T, C, bias, x_plane, tail_plane, tail_row, tail_offset,
    row_size, offset, length, rate,
    TAPS: tl.constexpr, PLANES: tl.constexpr, QUANTIZE: tl.constexpr, HAS_KEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if HAS_KEEP:  # noqa: SIM102 - decided when compiled
        if pid >= num_tiles:
            program = pid - num_tiles
            _keep(
                program, keepers, x_ptr, x_plane, T, C,
                arena_ptr, rows_ptr, num_valid_ptr, position_ptr, row_size, offset, length, rate, PLANES, PDL,
            )  # fmt: skip
            if program % keepers == 0:
                b = program // keepers
                end = tl.load(position_ptr + b) + tl.load(num_valid_ptr + b)
                tl.store(positions_ptr + tl.load(rows_ptr + b), end)
            return
    m = pid * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    wait_for_inputs(PDL)
    flat = tl.minimum(m, num_rows - 1)
    row = flat // T
    t = flat - row * T
    x_row = x_ptr + flat.to(tl.int64) * C
    tail_at = tail_ptr + row * tail_row + tail_offset + (TAPS - 1 + t) * C
    products = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
    for tap in range(TAPS):
        weight = tl.load(w_ptr + tap * C + c, mask=c < C, other=0.0)
        inside = t >= TAPS - 1 - tap
        at = (tl.where(inside, x_row, tail_at) - (TAPS - 1 - tap) * C)[:, None] + c[None, :]
        x = tl.load(at, mask=(c < C)[None, :], other=0.0).to(tl.float32)
        if PLANES >= 2:
            plane = tl.where(inside, x_plane, tail_plane)[:, None]
            x += tl.load(at + plane, mask=(c < C)[None, :], other=0.0).to(tl.float32)
        products += x * weight[None, :]
    wave = tl.sum(products, axis=1) + bias
    if QUANTIZE:
        is_number = wave == wave
        wave = tl.minimum(tl.maximum(wave, -1.0), 1.0) * 32767.0
        wave = tl.where(is_number, _round(wave), -32768.0)
    tl.store(out_ptr + m, wave.to(out_ptr.dtype.element_ty), mask=m < num_rows)
