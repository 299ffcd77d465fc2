"""Streams in a paged cache, laid out to hurt: shuffled pages, NaN wherever nobody wrote.

A `Paged` is one layer's cache with some streams in it, driven through `Ops.attention`; `dense` is
what all of it must equal, in float64 and without pages.
"""

from dataclasses import dataclass

import torch

from qwen3tts_core.ops.interface import DecodeLayout, LayerKV, PrefillLayout, PrefillSequence, RopeTable

EPS = 1e-6


@dataclass(frozen=True)
class HeadShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def qkv_width(self):
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def norms(self, dtype=torch.float32):
        """q_norm and k_norm, away from 1."""
        generator = torch.Generator().manual_seed(11)
        return [(0.5 + torch.rand(self.head_dim, generator=generator)).to(dtype) for _ in range(2)]


def rope_for(head_dim, num_positions, dtype=torch.float32):
    angles = torch.arange(num_positions)[:, None] * 100.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return RopeTable(angles.cos().to(dtype), angles.sin().to(dtype))


class Paged:
    """Streams of `lengths` positions at most, over pages in random order; the rest of the cache is NaN.

    The page table is wider than any stream needs; beyond a stream's own pages it names pages of
    others and free ones, as a slot's row does after a longer request has left it.
    """

    def __init__(self, shape, lengths, *, page_size=4, seed=0, ops, device="cpu", dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.ops, self.device, self.page_size = shape, ops, torch.device(device), page_size
        counts = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(counts) + 4, generator=generator)
        self.num_pages = len(order)  # and one trash page behind them
        table = torch.randint(0, self.num_pages, (len(lengths), max(counts) + 2), generator=generator)
        self.owned = []
        for row, pages in zip(table, order[: sum(counts)].split(counts), strict=True):
            row[: len(pages)] = pages
            self.owned.append(pages.tolist())
        self.page_table = table.to(device)
        places = (self.num_pages + 1, page_size, shape.num_kv_heads, shape.head_dim)
        self.kv = LayerKV(*(torch.full(places, torch.nan, dtype=dtype, device=device) for _ in range(2)))
        self.norms = [norm.to(device) for norm in shape.norms(dtype)]
        rope = rope_for(shape.head_dim, max(lengths), dtype)
        self.rope = RopeTable(rope.cos.to(device), rope.sin.to(device))

    def place(self, stream, position):
        """Flat index in the cache."""
        return self.owned[stream][position // self.page_size] * self.page_size + position % self.page_size

    def _attend(self, qkv, layout):
        return self.ops.attention(qkv.to(self.device), *self.norms, EPS, self.rope, layout, self.kv).cpu()

    def _tensor(self, values):
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def prefill(self, parts, num_padding=0):
        """parts: {stream: (first position, qkv of its new positions)} -> {stream: [n, H E]}, padding rows."""
        sequences, positions, places, owner, first_row = [], [], [], [], 0
        for stream, (first, qkv) in parts.items():
            owner += [len(sequences)] * len(qkv)
            sequences.append(PrefillSequence(first_row, len(qkv), first))
            span = range(first, first + len(qkv))
            positions += span
            places += [self.place(stream, position) for position in span]
            first_row += len(qkv)
        positions += [0] * num_padding
        places += [self.num_pages * self.page_size] * num_padding
        owner += [-1] * num_padding
        some = next(iter(parts.values()))[1]
        packed = torch.cat([*(qkv for _, qkv in parts.values()), some.new_zeros(num_padding, some.shape[1])])
        layout = PrefillLayout(
            positions=self._tensor(positions),
            write_index=self._tensor(places),
            page_table=self.page_table[list(parts)],
            row_sequence=self._tensor(owner),
            sequences=tuple(sequences),
        )
        out = self._attend(packed, layout)
        ends = [s.first_row + s.num_rows for s in sequences]
        results = out.tensor_split(ends)
        return dict(zip(parts, results, strict=False)), results[-1]

    def decode(self, parts, num_padding=0):
        """parts: {stream: (position, qkv [1, ..] of it)} -> {stream: [1, H E]}; padding is in the trash page."""
        some = next(iter(parts.values()))[1]
        trash = torch.full_like(self.page_table[:1], self.num_pages).repeat(num_padding, 1)
        layout = DecodeLayout(
            self._tensor([position for position, _ in parts.values()] + [0] * num_padding),
            self._tensor(
                [self.place(stream, position) for stream, (position, _) in parts.items()]
                + [self.num_pages * self.page_size] * num_padding
            ),
            torch.cat([self.page_table[list(parts)], trash]),
        )
        packed = torch.cat([*(qkv for _, qkv in parts.values()), some.new_zeros(num_padding, some.shape[1])])
        out = self._attend(packed, layout)
        return dict(zip(parts, out.split(1), strict=False)), out[len(parts) :]

    def written(self):
        """Key and value of every page but the trash page, on the host."""
        return torch.stack([self.kv.key[:-1].cpu(), self.kv.value[:-1].cpu()])


def random_qkv(shape, length, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, shape.qkv_width, generator=generator).to(dtype)


def dense(shape, qkv):
    """Causal attention of one stream, whole and without a cache: [T, qkv] -> [T, H E] in float64.

    Also returns the keys and values that a cache should hold, [T, K, E].
    """
    num_rows, head_dim = len(qkv), shape.head_dim
    heads = qkv.double().view(num_rows, -1, head_dim)
    q, k, v = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
    q_norm, k_norm = shape.norms()
    rope = rope_for(head_dim, num_rows)

    def norm_and_rotate(x, weight):
        x = x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * weight.double()
        half = head_dim // 2
        turn = torch.complex(rope.cos.double(), rope.sin.double())[:, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    q, k = norm_and_rotate(q, q_norm), norm_and_rotate(k, k_norm)
    out = torch.zeros_like(q)
    for row in range(num_rows):
        for head in range(shape.num_heads):
            kv_head = head // (shape.num_heads // shape.num_kv_heads)
            weights = (k[: row + 1, kv_head] @ q[row, head] * head_dim**-0.5).softmax(dim=0)
            out[row, head] = weights @ v[: row + 1, kv_head]
    return out.flatten(1), k, v
