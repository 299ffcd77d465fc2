"""What a dtype does to the talker's logits: frames forced on it, the numbers beside float32's.

The prompt goes in by one prefill, each frame by a decode step of one row, and the code predictor runs
over all frames at once, so that prefill and decode kernels both have their part.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from qwen3tts_core.model.talker import Talker
from qwen3tts_core.ops.interface import DecodeLayout, LayerKV, Layout, PrefillLayout, PrefillSequence

_PAGE_SIZE = 16


@dataclass(frozen=True)
class LogitError:
    """Root mean square and worst error, both relative to the largest exact logit; and of the places where
    float32's best two are more than 1 apart, the share where the same code wins."""

    rms: float
    worst: float
    agreement: float

    @classmethod
    def of(cls, actual: Tensor, exact: Tensor) -> LogitError:
        actual, exact = actual.float().cpu(), exact.float().cpu()
        scale, error = exact.abs().max(), actual - exact
        best = exact.topk(2, dim=-1).values
        sure = best[..., 0] - best[..., 1] > 1
        same = actual.argmax(dim=-1)[sure] == exact.argmax(dim=-1)[sure]
        agreement = float(same.float().mean()) if len(same) else 1.0
        return cls(float(error.square().mean().sqrt() / scale), float(error.abs().max() / scale), agreement)


@torch.inference_mode()
def forced_logits(talker: Talker, rows: Tensor, codes: Tensor) -> dict[str, Tensor]:
    """rows: [P + F, D], a prompt and what follows each forced frame; codes: [F, G].

    Returns "first" [F + 1, V], group 0, and "next" [F, G - 1, C].
    """
    num_frames, stack = len(codes), talker.config.talker.transformer
    num_pages, num_prompt = -(-len(rows) // _PAGE_SIZE), len(rows) - num_frames
    shape = (num_pages + 1, _PAGE_SIZE, stack.num_kv_heads, stack.head_dim)
    cache = [LayerKV(rows.new_zeros(shape), rows.new_zeros(shape)) for _ in range(stack.num_layers)]
    places = torch.arange(len(rows), device=rows.device)
    pages = torch.arange(num_pages, device=rows.device)[None]
    prompt = places[:num_prompt]
    layouts: list[Layout] = [
        PrefillLayout(prompt, prompt, pages, 0 * prompt, (PrefillSequence(0, num_prompt, 0),))
    ]
    layouts += [DecodeLayout(place, place, pages) for place in torch.split(places[num_prompt:], 1)]
    parts = torch.split(rows, [num_prompt] + [1] * num_frames)
    hidden = torch.cat([talker(part, layout, cache) for part, layout in zip(parts, layouts, strict=True)])
    hidden = talker.final_norm(hidden[num_prompt - 1 :])
    seen: list[Tensor] = []

    def forced(logits: Tensor, group: int, inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        seen.append(logits.clone())
        drawn = codes[:, group]
        return drawn, None if inputs is None else inputs[drawn]

    talker.code_predictor(hidden[:-1], codes[:, 0], talker.ops, forced)
    return {"first": talker.first_logits(hidden), "next": torch.stack(seen, dim=1)}


def errors(actual: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    return {name: asdict(LogitError.of(actual[name], exact[name])) for name in exact}
