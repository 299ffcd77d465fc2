"""The code predictor: groups 1 … G-1 of one frame, one after the other.

Its whole context is one frame's positions 0 … G-1, so its cache is a scratch of one page per row
that every frame starts afresh. Source: spec 2.3 and 2.5.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qwen3tts_core.config import CodePredictorConfig
from qwen3tts_core.model.layers import DecoderLayer, Packing, frozen, rope_table
from qwen3tts_core.model.weights import WeightReader
from qwen3tts_core.ops.interface import FrameLayout, LayerKV, Ops

Draw = Callable[[Tensor, int, Tensor | None], tuple[Tensor, Tensor | None]]
"""(logits [B, C], group, inputs [C, Dc]) -> codes [B] and inputs[codes] [B, Dc]; None after the last group."""


class CodePredictor(nn.Module):
    """All its inputs are projected to its width ahead of time, into tables.

    first_input: [talker vocabulary, Dc]; next_inputs: [G - 2, C, Dc] (the last group is never fed
    back). Folding the projection into the tables changes float32 results by rounding only.
    """

    def __init__(
        self,
        reader: WeightReader,
        config: CodePredictorConfig,
        *,
        talker_width: int,
        first_embedding: Tensor,
        group_embeddings: Tensor,
        packing: Packing,
    ) -> None:
        super().__init__()
        self.config = config
        transformer = config.transformer
        width = transformer.hidden_size
        self.layers = nn.ModuleList(
            DecoderLayer(reader, f"model.layers.{i}", transformer, packing)
            for i in range(transformer.num_layers)
        )
        self.norm, self.heads = packing.after_norm(
            reader.take("model.norm.weight", width),
            reader.stack(
                [f"lm_head.{g}.weight" for g in range(config.num_code_groups - 1)],
                config.codebook_size,
                width,
            ),
        )
        # The projection exists exactly where the widths differ (spec 1.5).
        self.projection: tuple[Tensor, Tensor] | None = None
        if width != talker_width:
            self.projection = (
                reader.take("small_to_mtp_projection.weight", width, talker_width),
                reader.take("small_to_mtp_projection.bias", width),
            )
        self.first_input = frozen(self.project(first_embedding))
        self.next_inputs = frozen(self.project(group_embeddings[:-1]))
        self.rope = rope_table(transformer, config.num_code_groups, reader.device, reader.dtype)

    def project(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., Dc]."""
        if self.projection is None:
            return x
        return nn.functional.linear(x, *self.projection)

    def forward(self, hidden: Tensor, first_codes: Tensor, ops: Ops, draw: Draw) -> Tensor:
        """Complete a frame. hidden: [B, D] after the talker's last norm; first_codes: [B].

        Returns codes [B, G]. `draw` is called once per group, in order; its codes are fed back.
        """
        batch, num_groups = len(hidden), self.config.num_code_groups
        scratch = self._scratch(batch, num_groups, hidden)
        codes = [first_codes]
        # The hidden state and group 0 go in together: 2 B rows, each with its own context.
        x: Tensor | None = torch.cat([self.project(hidden), self.first_input[first_codes]])
        layout = FrameLayout(position=0, num_positions=2)
        for group in range(1, num_groups):
            assert x is not None
            logits = self._step(x, layout, scratch, ops, group, batch)
            drawn, x = draw(logits, group, self.next_inputs[group - 1] if group < num_groups - 1 else None)
            codes.append(drawn)
            layout = FrameLayout(position=group + 1)
        return torch.stack(codes, dim=1)

    def _step(
        self, x: Tensor, layout: FrameLayout, scratch: list[LayerKV], ops: Ops, group: int, batch: int
    ) -> Tensor:
        for layer, kv in zip(self.layers, scratch, strict=True):
            x = layer(x, ops, self.rope, layout, kv)
        return ops.norm_linear(
            x[-batch:], self.norm, self.config.transformer.rms_norm_eps, self.heads[group - 1]
        )

    def _scratch(self, batch: int, num_positions: int, like: Tensor) -> list[LayerKV]:
        transformer = self.config.transformer
        shape = (batch, num_positions, transformer.num_kv_heads, transformer.head_dim)
        return [LayerKV(like.new_empty(shape), like.new_empty(shape)) for _ in self.layers]
