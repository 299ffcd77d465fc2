"""From logits to a code: the processors in the reference's order, then one draw.

penalty -> minimum length -> suppression -> temperature -> top-k -> top-p -> arg max of
(scores + noise). Greedy rows get no noise. Each step is exact in float32, so that the scores equal
the reference's bit for bit. Source: spec 2.4 and 2.5, quirks Q15 and Q16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen3tts_core.ops.interface import DrawRows

_EXCLUDED = float("-inf")


def first_code_scores(
    logits: Tensor, seen: Tensor, penalty: Tensor, forbid_eos: Tensor, allowed: Tensor, eos_id: int
) -> Tensor:
    """Steps 1 to 3 of spec 2.4 on group 0. Shapes as in `Ops.draw_first`; returns [B, V] float32."""
    penalty = penalty[:, None]
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
    scores = torch.where(seen, penalised, logits)
    is_eos = torch.arange(logits.shape[-1], device=logits.device) == eos_id
    excluded = ~allowed | (is_eos & forbid_eos[:, None])
    return scores.masked_fill(excluded, _EXCLUDED)


def cut_scores(scores: Tensor, draw: DrawRows) -> Tensor:
    """Step 4 of spec 2.4: temperature, top-k (ties stay), top-p. [B, V] -> [B, V]."""
    num_ids = scores.shape[-1]
    scores = scores / draw.temperature[:, None]
    ordered, index = scores.sort(dim=-1)
    kept = torch.where(draw.top_k > 0, draw.top_k.clamp(max=num_ids), num_ids)
    threshold = ordered.gather(-1, (num_ids - kept)[:, None])
    scores = scores.masked_fill(scores < threshold, _EXCLUDED)
    ordered = ordered.masked_fill(ordered < threshold, _EXCLUDED)
    tail_mass = draw.tail_mass[:, None]
    in_tail = (ordered.softmax(dim=-1).cumsum(dim=-1) <= tail_mass) & (tail_mass > 0)
    in_tail[:, -1] = False  # always keep the best one
    return scores.masked_fill(torch.zeros_like(in_tail).scatter(-1, index, in_tail), _EXCLUDED)


def draw_codes(scores: Tensor, draw: DrawRows, noise: Tensor) -> Tensor:
    """One id per row. scores [B, V] after `first_code_scores` or raw; noise [B, V] -> [B] int64."""
    noise = torch.where(draw.do_sample[:, None], noise, 0.0)
    return (cut_scores(scores, draw) + noise).argmax(dim=-1)
