import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen3tts_core.ops.noise import gumbel, philox, uniform_from_words

ints64 = st.integers(-(2**63), 2**63 - 1)


def tensors(*values):
    return tuple(torch.tensor([value], dtype=torch.int64) for value in values)


def rows_of(*columns):
    """seed, piece and frame of each row."""
    return tuple(torch.tensor(column, dtype=torch.int64) for column in columns)


# ---------------------------------------------------------------- the generator
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers of Random123 1.14, tests/kat_vectors, "philox4x32 10"
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_answers(counter, key, words):
    assert tuple(int(word) for word in philox(tensors(*counter), tensors(*key))) == words


def philox_in_python(counter, key):
    """The paper's rounds over plain ints, to check the int64 arithmetic of the real one."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@given(ints64, st.integers(0, 2**32 - 1), st.integers(0, 2**31), st.integers(0, 15), st.integers(0, 3071))
def test_noise_is_its_written_definition(seed, piece, frame, group, token):
    word = philox_in_python((token // 4, group, frame, piece), (seed % 2**32, seed // 2**32 % 2**32))[
        token % 4
    ]
    expected = -math.log(-math.log((word // 2**9 + 0.5) / 2**23))
    noise = gumbel(*tensors(seed, piece, frame), range(group, group + 1), token + 1)[0, 0, token]
    # float32 logarithms: near u = 1 the inner one keeps 24 bits of 1 - u, so compare what they came from.
    assert noise == pytest.approx(expected, rel=2e-6, abs=2e-6)


def test_no_word_gives_an_infinite_noise():
    words = torch.tensor([0, 1, 511, 512, 0xFFFFFFFF, 0xFFFFFE00])
    uniform = uniform_from_words(words)
    assert ((uniform > 0) & (uniform < 1)).all()
    assert torch.isfinite(-torch.log(-torch.log(uniform))).all()
    assert uniform[0] == 2.0**-24
    assert uniform[4] == 1 - 2.0**-24


# ---------------------------------------------------------------- what it depends on
def test_a_row_draws_the_same_alone_and_in_a_batch():
    seeds, pieces, frames = rows_of([3, -1, 2**40, 3], [0, 7, 0, 1], [0, 5, 9, 0])
    together = gumbel(seeds, pieces, frames, range(16), 1088)
    for i in range(4):
        row = slice(i, i + 1)
        alone = gumbel(seeds[row], pieces[row], frames[row], range(16), 1088)
        assert torch.equal(alone[0], together[i])


def test_groups_and_ids_can_be_made_in_parts():
    key = tensors(5, 1, 2)
    whole = gumbel(*key, range(16), 64)
    for group in range(16):
        assert torch.equal(gumbel(*key, range(group, group + 1), 64)[:, 0], whole[:, group])
    for num_ids in (1, 2, 3, 4, 5, 63):
        assert torch.equal(gumbel(*key, range(16), num_ids), whole[..., :num_ids])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((0, 0, 0), (1, 0, 0)),
        ((0, 0, 0), (2**32, 0, 0)),  # seeds count beyond 32 bits
        ((0, 0, 0), (-(2**63), 0, 0)),
        ((1, 0, 0), (-1, 0, 0)),
        ((2**32 - 1, 0, 0), (-1, 0, 0)),
        ((0, 0, 0), (0, 1, 0)),
        ((0, 0, 0), (0, 0, 1)),
        ((0, 1, 0), (0, 0, 1)),
        ((0, 0, 1), (1, 0, 0)),
    ],
)
def test_seed_piece_and_frame_all_matter(a, b):
    noise_a, noise_b = (gumbel(*tensors(*key), range(16), 64) for key in (a, b))
    assert (noise_a == noise_b).float().mean() < 0.01


def test_group_and_id_matter():
    noise = gumbel(*tensors(0, 0, 0), range(16), 64).flatten()
    assert len(noise.unique()) > 0.99 * len(noise)


# ---------------------------------------------------------------- how it is distributed
def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def test_words_are_uniform():
    noise = gumbel(*rows_of(range(64), [0] * 64, [0] * 64), range(16), 1024)
    uniform = torch.exp(-torch.exp(-noise.double()))
    counts = torch.histc(uniform, bins=256, min=0, max=1)
    # 255 degrees of freedom: mean 255, deviation 22.6; a fixed seed, so 5 deviations is generous.
    assert chi_square(counts, uniform.numel() / 256) < 255 + 5 * 22.6


@pytest.mark.parametrize("moving", ["seed", "piece", "frame"])
def test_draws_follow_the_softmax(moving):
    """Arg max of logits + noise over many frames, seeds or pieces hits each id in its proportion."""
    logits = torch.tensor([2.0, 1.0, 0.0, 0.0, -1.0, -2.0, 0.5, 1.5])
    count = 1 << 15
    key = {name: torch.zeros(count, dtype=torch.int64) for name in ("seed", "piece", "frame")}
    key[moving] = torch.arange(count)
    for group in (0, 7):
        noise = gumbel(key["seed"], key["piece"], key["frame"], range(group, group + 1), len(logits))[:, 0]
        counts = torch.bincount((logits + noise).argmax(dim=-1), minlength=len(logits))
        assert chi_square(counts, count * logits.softmax(dim=0)) < 24.3  # 0.1 % point, 7 degrees


def test_neighbours_are_uncorrelated():
    """Frames, groups and ids next to each other, and seeds that differ by 1."""
    count = 4096
    zeros = torch.zeros(count, dtype=torch.int64)
    by_frame = gumbel(zeros, zeros, torch.arange(count), range(2), 2)
    by_seed = gumbel(torch.arange(count), zeros, zeros, range(1), 1)
    pairs = {
        "frames": (by_frame[:-1, 0, 0], by_frame[1:, 0, 0]),
        "groups": (by_frame[:, 0, 0], by_frame[:, 1, 0]),
        "ids": (by_frame[:, 0, 0], by_frame[:, 0, 1]),
        "seeds": (by_seed[:-1, 0, 0], by_seed[1:, 0, 0]),
    }
    for name, pair in pairs.items():
        correlation = torch.corrcoef(torch.stack(pair))[0, 1]
        assert abs(correlation) < 4 / count**0.5, name
