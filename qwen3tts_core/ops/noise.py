"""Counter-based noise: a pure function of (seed, piece, frame, group, id).

The one written definition that every backend follows:

    key     = (seed mod 2^32, seed div 2^32 mod 2^32)
    counter = (id div 4, group, frame, piece)
    word    = Philox4x32-10(key, counter)[id mod 4]
    u       = ((word div 2^9) + 1/2) / 2^23          in (0, 1), exact in float32
    noise   = -log(-log(u))                          Gumbel(0, 1)

So a request draws the same noise alone or in a batch, on any device, and arg max of
(log-weights + noise) is a draw from their softmax.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, for Philox.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_ROUNDS = 10


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four words per counter. All tensors are int64 holding values in [0, 2^32), broadcastable.

    A 32 x 32 bit product overflows int64 only in its sign: the bits are right, so mask after shifting.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((product1 >> 32) & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform_from_words(words: Tensor) -> Tensor:
    """[..] int64 words -> float32 in (0, 1), never 0 or 1."""
    return ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23


def gumbel(seed: Tensor, piece: Tensor, frame: Tensor, groups: range, num_ids: int) -> Tensor:
    """Noise for every row, group and id. seed, piece, frame: [B] int64 -> [B, len(groups), num_ids]."""
    quads = -(-num_ids // 4)
    device = seed.device
    ids = torch.arange(quads, device=device).view(1, 1, quads)
    group = torch.arange(groups.start, groups.stop, device=device).view(1, -1, 1)
    rows = (len(seed), 1, 1)
    key = ((seed & _MASK).view(rows), ((seed >> 32) & _MASK).view(rows))
    words = philox((ids, group, frame.view(rows), piece.view(rows)), key)
    stacked = torch.stack(words, dim=-1).flatten(-2)[..., :num_ids]
    return -torch.log(-torch.log(uniform_from_words(stacked)))
