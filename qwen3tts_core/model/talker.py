"""The talker: a prompt of summed features in, one hidden state per frame out.

Holds the embeddings, the layers, the group-0 head and the code predictor. Which rows go in and
where their keys and values lie is the engine's business. Source: spec 1.5, 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qwen3tts_core.config import CheckpointConfig, WeightDtype
from qwen3tts_core.errors import EngineFault, InvalidCodes, InvalidRequest
from qwen3tts_core.model.code_predictor import CodePredictor
from qwen3tts_core.model.layers import DecoderLayer, Packing, frozen, rope_table
from qwen3tts_core.model.weights import SafetensorsFolder, TensorSource, WeightReader
from qwen3tts_core.ops.interface import LayerKV, Layout, Ops
from qwen3tts_core.types import NO_ID, PrefillPlan, ReferenceVoice

_FOLD_ROWS = 8192  # text rows projected at once: bounds the start's peak memory


class Talker(nn.Module):
    """Weights of talker and code predictor, and the sums that make their inputs.

    The text embedding and its projection are folded into one table, text_table [text vocabulary,
    D]: every text id enters through both, so a prompt row or a trailing row is a single gather.
    """

    def __init__(
        self,
        source: TensorSource,
        config: CheckpointConfig,
        *,
        num_positions: int,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        weight_dtype: WeightDtype = "auto",
    ) -> None:
        """weight_dtype: of the layers' matrices and the code predictor's heads; "auto" is `dtype`."""
        super().__init__()
        self.config = config
        self.ops = ops
        packing = Packing.of(ops, weight_dtype)
        talker = config.talker
        transformer = talker.transformer
        width = transformer.hidden_size
        reader = WeightReader(
            source, owned="talker.", elsewhere=("speaker_encoder.",), device=device, dtype=dtype
        )
        self.text_table = frozen(_fold_text_table(reader, config))
        self.codec_embedding = frozen(reader.take("model.codec_embedding.weight", talker.vocab_size, width))
        codebook_size = config.code_predictor.codebook_size
        self.group_embeddings = frozen(
            reader.stack(
                [
                    f"code_predictor.model.codec_embedding.{g}.weight"
                    for g in range(talker.num_code_groups - 1)
                ],
                codebook_size,
                width,
            )
        )
        self.layers = nn.ModuleList(
            DecoderLayer(reader, f"model.layers.{i}", transformer, packing)
            for i in range(transformer.num_layers)
        )
        self.norm = frozen(reader.take("model.norm.weight", width))
        self.codec_head = frozen(reader.take("codec_head.weight", talker.vocab_size, width))
        self.code_predictor = CodePredictor(
            reader.within("code_predictor."),
            config.code_predictor,
            talker_width=width,
            first_embedding=self.codec_embedding,
            group_embeddings=self.group_embeddings,
            packing=packing,
        )
        reader.finish()
        self.rope = rope_table(transformer, num_positions, device, dtype)
        allowed = torch.arange(talker.vocab_size, device=device) < talker.vocab_size - talker.num_suppressed
        allowed[talker.codec_eos_id] = True
        self.allowed_ids = frozen(allowed)

    @property
    def width(self) -> int:
        return self.config.talker.transformer.hidden_size

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    # ------------------------------------------------------------ inputs
    def text_features(self, ids: Sequence[int]) -> Tensor:
        """P(id) of spec 2.1. [n] -> [n, D]."""
        return self.text_table[self._on_device(ids)]

    def frame_embeddings(self, codes: Tensor) -> Tensor:
        """Sum over the groups of a frame's embeddings, one reduction (spec 8). [.., G] -> [.., D]."""
        groups = torch.arange(codes.shape[-1] - 1, device=codes.device)
        rest = self.group_embeddings[groups, codes[..., 1:]]
        return torch.cat([self.codec_embedding[codes[..., :1]], rest], dim=-2).sum(dim=-2)

    def prompt_rows(self, plan: PrefillPlan, reference: ReferenceVoice | None = None) -> Tensor:
        """The prompt as the talker reads it: [P, D].

        Raises InvalidRequest for a voice of another checkpoint, InvalidCodes for more reference frames
        than the plan has rows for, EngineFault for ids that no table holds.
        """
        self.check_ids(plan)
        rows = self.rows_of(self._on_device(plan.text_ids), self._on_device(plan.codec_ids))
        if plan.speaker_row is not None:
            assert reference is not None
            rows[plan.speaker_row] += self._x_vector(reference)
        if plan.reference_row is not None:
            assert reference is not None
            frames = self.frame_embeddings(self.reference_codes(reference))
            if plan.reference_row + len(frames) > len(rows):
                raise InvalidCodes(f"{len(frames)} reference frames don't fit the prompt that was planned")
            rows[plan.reference_row : plan.reference_row + len(frames)] += frames
        return rows

    def frame_rows(self, plan: PrefillPlan, codes: Tensor) -> Tensor:
        """What the talker reads after each frame from frame 0 on: [F, G] -> [F, D]. Spec 2.3."""
        num_text = min(len(plan.trailing_ids), len(codes))
        pads = [self.config.tts_pad_id] * (len(codes) - num_text)
        return self.frame_embeddings(codes) + self.text_features([*plan.trailing_ids[:num_text], *pads])

    def rows_of(self, text_ids: Tensor, codec_ids: Tensor) -> Tensor:
        """What two ids add up to as one row; none for a negative one. [n], [n] -> [n, D]. Spec 2.3."""
        text = self.text_table[text_ids.clamp(min=0)].masked_fill((text_ids < 0)[:, None], 0)
        codec = self.codec_embedding[codec_ids.clamp(min=0)].masked_fill((codec_ids < 0)[:, None], 0)
        return text + codec

    def check_ids(self, plan: PrefillPlan) -> None:
        """Raises EngineFault: a lookup beyond a table would end every stream of a GPU, not just this one."""
        talker = self.config.talker
        tables = {
            "text": (plan.text_ids, talker.text_vocab_size),
            "codec": (plan.codec_ids, talker.vocab_size),
        }
        tables["trailing text"] = (plan.trailing_ids or (NO_ID,), talker.text_vocab_size)
        for name, (ids, size) in tables.items():
            if min(ids) < NO_ID or max(ids) >= size:
                raise EngineFault(
                    f"the plan's {name} ids reach from {min(ids)} to {max(ids)}, the table has {size:,} rows"
                )

    def _x_vector(self, reference: ReferenceVoice) -> Tensor:
        vector = np.frombuffer(reference.x_vector, dtype="<f4")
        if len(vector) != self.width:
            raise InvalidRequest(
                f"the voice has {len(vector)} values, this checkpoint takes {self.width}", "voice"
            )
        return torch.from_numpy(vector.copy()).to(self.device, self.dtype, non_blocking=True)

    def reference_codes(self, reference: ReferenceVoice) -> Tensor:
        """[F, G] int64 on the device. Raises InvalidRequest for codes that this checkpoint doesn't have."""
        try:
            return self.frame_codes(reference.codes)
        except InvalidCodes as error:
            raise InvalidRequest(f"the voice's {error}", "voice") from None

    def frame_codes(self, data: bytes) -> Tensor:
        """Frames from [F, G] int16, little endian: [F, G] int64 on the device. Raises InvalidCodes."""
        groups, size = self.config.talker.num_code_groups, self.config.code_predictor.codebook_size
        is_whole = len(data) % (2 * groups) == 0
        codes = np.frombuffer(data, dtype="<i2") if is_whole else np.empty(0, "<i2")
        # Looked up unchecked, a wrong code would take the engine's thread, or the device, with it.
        if not is_whole or (codes.size and not 0 <= codes.min() <= codes.max() < size):
            raise InvalidCodes(f"codes aren't frames of {groups} code groups in [0, {size})")
        return self._on_device(codes.astype(np.int64).reshape(-1, groups))

    def _on_device(self, ids: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Without a wait for what the device has still to do."""
        return torch.from_numpy(np.asarray(ids, np.int64)).to(self.device, non_blocking=True)

    # ------------------------------------------------------------ passes
    def forward(self, rows: Tensor, layout: Layout, cache: Sequence[LayerKV]) -> Tensor:
        """rows: [N, D] -> the last layer's output [N, D], before the final norm."""
        hidden = rows
        for layer, kv in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, self.ops, self.rope, layout, kv)
        return hidden

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.ops.rms_norm(hidden, self.norm, self.config.talker.transformer.rms_norm_eps)

    def first_logits(self, hidden: Tensor) -> Tensor:
        """Group-0 logits of a normed hidden state. [N, D] -> [N, V]."""
        return self.ops.linear(hidden, self.codec_head)


def open_talker(
    checkpoint: Path,
    config: CheckpointConfig,
    *,
    num_positions: int,
    ops: Ops,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    weight_dtype: WeightDtype = "auto",
) -> Talker:
    """Load from a checkpoint folder. num_positions: the longest prompt + frames that will be run.

    Raises CheckpointMismatch listing every tensor that is missing, misshapen or left over.
    """
    source = SafetensorsFolder(checkpoint)
    return Talker(
        source,
        config,
        num_positions=num_positions,
        ops=ops,
        device=torch.device(device),
        dtype=dtype,
        weight_dtype=weight_dtype,
    )


def _fold_text_table(reader: WeightReader, config: CheckpointConfig) -> Tensor:
    talker = config.talker
    inner, width = talker.text_hidden_size, talker.transformer.hidden_size
    embedding = reader.take("model.text_embedding.weight", talker.text_vocab_size, inner)
    weight1 = reader.take("text_projection.linear_fc1.weight", inner, inner)
    bias1 = reader.take("text_projection.linear_fc1.bias", inner)
    weight2 = reader.take("text_projection.linear_fc2.weight", width, inner)
    bias2 = reader.take("text_projection.linear_fc2.bias", width)
    table = embedding.new_empty(len(embedding), width)
    for start in range(0, len(embedding), _FOLD_ROWS):
        rows = slice(start, start + _FOLD_ROWS)
        hidden = nn.functional.silu(nn.functional.linear(embedding[rows], weight1, bias1))
        table[rows] = nn.functional.linear(hidden, weight2, bias2)
    return table
