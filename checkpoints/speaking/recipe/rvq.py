"""Residual vector quantisation, its books learned by running averages (EMA k-means).

Buffers carry the official names: a row of a book is `embedding_sum / cluster_usage`.
Source: van den Oord et al. 2017, appendix A.1 (EMA); Zeghidour et al. 2021, section III-C (residual
books, quantiser dropout, re-drawing dead codes); names: spec 1.6.

Shape letters: N vectors, B rows, F frames, G groups, C width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

_DECAY = 0.99
_EPS = 1e-5  # the decoder's own clamp (spec 1.6)
_DEAD_USAGE = 0.03  # vectors a step


class Codebook(nn.Module):
    """One book. `train()` mode moves it towards what it is asked to quantise."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.register_buffer("cluster_usage", torch.zeros(size))
        self.register_buffer("embedding_sum", torch.zeros(size, width))
        self.cluster_usage: Tensor
        self.embedding_sum: Tensor

    @property
    def rows(self) -> Tensor:
        return self.embedding_sum / self.cluster_usage.clamp(min=_EPS)[:, None]

    @torch.no_grad()
    def seed(self, vectors: Tensor) -> None:
        """Start from data: [N, C]."""
        chosen = _random_rows(vectors, len(self.cluster_usage))
        self.embedding_sum.copy_(chosen + 1e-3 * torch.randn_like(chosen))
        self.cluster_usage.fill_(1.0)

    @torch.no_grad()
    def nearest(self, vectors: Tensor) -> Tensor:
        """[N, C] float32 -> [N] int64, by Euclidean distance."""
        rows = self.rows
        distance = rows.square().sum(dim=1) - 2 * vectors @ rows.T  # the vectors' own norm decides nothing
        return distance.argmin(dim=1)

    @torch.no_grad()
    def update(self, vectors: Tensor, codes: Tensor) -> None:
        """Move towards `vectors` [N, C]; codes that nothing chose for long start anew from one of them."""
        hits = functional.one_hot(codes, len(self.cluster_usage)).to(vectors.dtype)
        self.cluster_usage.mul_(_DECAY).add_(hits.sum(dim=0), alpha=1 - _DECAY)
        self.embedding_sum.mul_(_DECAY).add_(hits.T @ vectors, alpha=1 - _DECAY)
        dead = self.cluster_usage < _DEAD_USAGE  # by masks: asking the device would wait for it
        self.embedding_sum.copy_(
            torch.where(dead[:, None], _random_rows(vectors, len(dead)), self.embedding_sum)
        )
        self.cluster_usage.masked_fill_(dead, 1.0)


def _random_rows(vectors: Tensor, count: int) -> Tensor:
    return vectors[torch.randint(len(vectors), (count,), device=vectors.device)]


class _Layer(nn.Module):
    """Only a name: `layers.i._codebook`."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self._codebook = Codebook(size, width)

    @property
    def book(self) -> Codebook:
        return self._codebook


class _Vq(nn.Module):
    def __init__(self, num_books: int, size: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(size, width) for _ in range(num_books))


class ResidualQuantizer(nn.Module):
    """Its projections, and books each of which quantises what the ones before left over."""

    def __init__(self, num_books: int, size: int, outer_width: int) -> None:
        super().__init__()
        width = outer_width // 2
        self.input_proj = nn.Conv1d(outer_width, width, 1, bias=False)
        self.output_proj = nn.Conv1d(width, outer_width, 1, bias=False)
        self.vq = _Vq(num_books, size, width)
        self._is_seeded = False  # known to be; a checkpoint's books say so themselves

    @property
    def books(self) -> list[Codebook]:
        return [layer.book for layer in self.vq.layers]  # type: ignore[misc]

    def _must_seed(self) -> bool:
        """Before the first update. Asks the device once, not in every step."""
        if not self.training or self._is_seeded:
            return False
        self._is_seeded = True
        return not self.books[0].cluster_usage.any()

    def bypass(self, latent: Tensor) -> Tensor:
        """Both projections and no quantisation, for the first steps of a training."""
        projected: Tensor = self.output_proj(self.input_proj(latent))
        return projected

    def forward(self, latent: Tensor, num_kept: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """latent: [B, C, F]. num_kept: [B], books whose vectors count, for quantiser dropout; None keeps all.

        Returns the quantised latent [B, C, F] with straight-through gradients, codes [B, F, G] int64 and
        the commitment loss, summed over the books.
        """
        with torch.autocast(latent.device.type, enabled=False):
            x = self.input_proj(latent.float()).transpose(1, 2)
            residual, total, codes = x, torch.zeros_like(x), []
            commitment = x.new_zeros(())
            must_seed = self._must_seed()
            for i, book in enumerate(self.books):
                flat = residual.detach().reshape(-1, x.shape[-1])
                if must_seed:
                    book.seed(flat)
                index = book.nearest(flat)
                chosen = book.rows[index].view_as(x)
                if self.training:
                    book.update(flat, index)
                commitment = commitment + functional.mse_loss(residual, chosen)
                kept = 1.0 if num_kept is None else (num_kept > i).to(x.dtype)[:, None, None]
                total = total + kept * chosen
                residual = residual - chosen
                codes.append(index.view(x.shape[:-1]))
            straight = x + (total - x).detach()
            out: Tensor = self.output_proj(straight.transpose(1, 2))
        return out, torch.stack(codes, dim=-1), commitment


class SplitQuantizer(nn.Module):
    """The first book apart from the others, as the decoder has it: two branches on one latent, summed."""

    def __init__(self, num_books: int, size: int, width: int) -> None:
        super().__init__()
        self.rvq_first = ResidualQuantizer(1, size, width)
        self.rvq_rest = ResidualQuantizer(num_books - 1, size, width)

    def bypass(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """(the sum, the first branch), unquantised."""
        first = self.rvq_first.bypass(latent)
        return first + self.rvq_rest.bypass(latent), first

    def forward(
        self, latent: Tensor, num_kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """num_kept counts all books, at least 1. Returns sum, first branch, codes [B, F, G], commitment."""
        first, first_codes, first_loss = self.rvq_first(latent)
        rest, rest_codes, rest_loss = self.rvq_rest(latent, None if num_kept is None else num_kept - 1)
        return first + rest, first, torch.cat([first_codes, rest_codes], dim=-1), first_loss + rest_loss
