"""Which tile a codec product takes: a function of its shape alone. No tensors here.

A tile of m rows and n columns reads (m + n) values for m * n products, out of L2 and into one
processor's shared memory. So large products want large tiles, as deep as shared memory lets them run
ahead; small ones want many programs, each with few weights to read.
"""

from __future__ import annotations

from dataclasses import dataclass

_SHARED_MEMORY = 200_000  # bytes of 227 KiB; the epilogue takes some


@dataclass(frozen=True, slots=True)
class ConvTile:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    prefetch: bool = False


@dataclass(frozen=True, slots=True)
class UnitTile:
    """n0 + n1 channels, each a power of two, n1 possibly 0."""

    block_m: int
    n0: int
    n1: int
    block_k: int
    num_warps: int
    num_stages: int
    prefetch: bool = False


def choose_conv_tile(num_rows: int, n: int, num_in: int, planes: int, *, num_processors: int) -> ConvTile:
    if num_rows <= 64:  # bound by reading the weights
        block_m, block_k = _at_least_16(num_rows), _block_k(num_in, 128)
        block_n = 16 if n <= 32 * num_processors else 32
        num_stages = _num_stages(block_m + block_n, block_k, planes, most=5)
        return ConvTile(block_m, block_n, block_k, 4, num_stages, prefetch=True)
    block_m, block_n, block_k = 128, 128, _block_k(num_in, 64)
    if -(-n // 128) * 128 > 1.15 * n:  # too many columns of padding
        block_n = 64
    while block_m * block_n > 1024 and -(-num_rows // block_m) * -(-n // block_n) < num_processors:
        if block_m >= block_n:
            block_m //= 2
        else:
            block_n //= 2
    block_m, block_n = min(block_m, _at_least_16(num_rows)), min(block_n, _at_least_16(n))
    num_warps = 8 if block_m * block_n >= 128 * 128 else 4
    return ConvTile(
        block_m, block_n, block_k, num_warps, _num_stages(block_m + block_n, block_k, planes, most=4)
    )


def choose_unit_tile(num_rows: int, channels: int, planes: int, *, num_processors: int) -> UnitTile | None:
    """None where two convs are better: too many channels for one program, or too few rows to fill the GPU.

    One program reads the weights of all channels, so few rows would mean few programs that read much.
    """
    if channels > 192 or (channels > 96 and num_rows < 64 * num_processors):
        return None
    n0 = max(16, 1 << (channels.bit_length() - 1))
    rest = channels - n0
    n1 = _at_least_16(rest) if rest > 0 else 0
    block_m, block_k = 128, _block_k(channels, 64 if planes == 1 else 32)
    while block_m > 32 and -(-num_rows // block_m) < num_processors:
        block_m //= 2
    num_warps = 8 if block_m == 128 and (channels > 96 or planes > 1) else 4
    return UnitTile(
        block_m, n0, n1, block_k, num_warps, _num_stages(block_m + n0 + n1, block_k, planes, most=4)
    )


def _num_stages(lines: int, block_k: int, planes: int, *, most: int) -> int:
    """As many blocks in shared memory as fit; the compiler keeps `num_stages` of them."""
    return max(2, min(most, _SHARED_MEMORY // (2 * lines * block_k * planes)))


def _block_k(num_in: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides the channels, if one of 32 or more does."""
    block = largest
    while block > 32 and num_in % block:
        block //= 2
    return min(block, _at_least_16(num_in))


def _at_least_16(n: int) -> int:
    """The power of two at or above n, 16 at least: the smallest side of a product."""
    return max(16, 1 << (n - 1).bit_length())
