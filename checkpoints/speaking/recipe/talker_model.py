"""The talker in its trainable form, and batches in the official prompt layouts.

`qwen3tts_core.model.talker` computes the same from frozen, folded tables; tests hold the two together.
This one's `state_dict` is the official layout, without the prefix `talker.`. Batches are made on the
device by arithmetic on row numbers, in static shapes. Source: spec 1.5, 2.1 to 2.3, 3.2, 3.3.

Shape letters: B utterances, L rows of a sequence, F frames, G groups, D width, N frames drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from checkpoints.speaking.recipe.layers import Mlp, RmsNorm, rope_angles, rotate
from qwen3tts_core.config import CheckpointConfig, TransformerConfig

_NONE = -1
_NUM_ROLE_ROWS = 3
LONGEST_HEAD = _NUM_ROLE_ROWS + 4 + 1 + 1  # role, language given, speaker, begin


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim, self.repeats = config.head_dim, config.num_heads // config.num_kv_heads
        self.q_proj = nn.Linear(config.hidden_size, rows, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_rows, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_rows, bias=False)
        self.o_proj = nn.Linear(rows, config.hidden_size, bias=False)
        self.q_norm = RmsNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RmsNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        q, k = rotate(q, *rope).to(v.dtype), rotate(k, *rope).to(v.dtype)
        k, v = k.repeat_interleave(self.repeats, dim=1), v.repeat_interleave(self.repeats, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: TransformerConfig, dropout: float) -> None:
        super().__init__()
        width = config.hidden_size
        self.self_attn = Attention(config)
        self.mlp = Mlp(width, config.intermediate_size)
        self.input_layernorm = RmsNorm(width, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(width, eps=config.rms_norm_eps)
        self.dropout = dropout

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), rope)
        x = x + functional.dropout(attended, self.dropout, self.training)
        fed = self.mlp(self.post_attention_layernorm(x))
        return x + functional.dropout(fed, self.dropout, self.training)


class _Stack(nn.Module):
    """Layers and the final norm, with embeddings beside them as the official names want it."""

    codec_embedding: Any  # one table in the talker, a list of them in the code predictor
    text_embedding: Any

    def __init__(self, config: TransformerConfig, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config, dropout) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._head_dim, self._theta = config.head_dim, config.rope_theta

    def forward(self, x: Tensor, *, tap: int = 0) -> tuple[Tensor, Tensor]:
        """[B, L, D] -> the normed hidden states, and the output of layer number `tap`."""
        rope = rope_angles(x.shape[1], self._head_dim, self._theta, x.device)
        tapped = x
        for i, layer in enumerate(self.layers):
            x = layer(x, rope)
            tapped = x if i == tap else tapped
        return self.norm(x), tapped


class _TextProjection(nn.Module):
    def __init__(self, text_width: int, width: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(text_width, text_width)
        self.linear_fc2 = nn.Linear(text_width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear_fc2(functional.silu(self.linear_fc1(x)))
        return y


class _CodePredictor(nn.Module):
    def __init__(self, config: CheckpointConfig, dropout: float) -> None:
        super().__init__()
        predictor, width = config.code_predictor, config.talker.transformer.hidden_size
        inner, size = predictor.transformer.hidden_size, predictor.codebook_size
        num_rest = predictor.num_code_groups - 1
        self.model = _Stack(predictor.transformer, dropout)
        self.model.codec_embedding = nn.ModuleList(nn.Embedding(size, width) for _ in range(num_rest))
        self.lm_head = nn.ModuleList(nn.Linear(inner, size, bias=False) for _ in range(num_rest))
        # As in the official model: no projection where the widths are equal.
        self.small_to_mtp_projection = nn.Linear(width, inner) if inner != width else nn.Identity()


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's sequences. All on the device.

    text_ids, codec_ids: [B, L], -1 adds nothing. frame: [B, L], the frame whose codes the row adds, or -1.
    target: [B, L], the frame that the row predicts; its count of frames stands for the end; -1 for none.
    codes: [B, F, G]; phones: [B, F]; num_frames: [B].
    """

    text_ids: Tensor
    codec_ids: Tensor
    frame: Tensor
    target: Tensor
    codes: Tensor
    phones: Tensor
    num_frames: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class PromptIds:
    """The ids that are in every prompt."""

    role: tuple[int, int, int]
    tts_pad: int
    tts_bos: int
    tts_eos: int
    codec_pad: int
    codec_bos: int
    auto: tuple[int, ...]
    given: tuple[int, ...]
    speakers: tuple[int, ...]

    @classmethod
    def of(cls, config: CheckpointConfig, role: tuple[int, int, int], voices: tuple[str, ...]) -> PromptIds:
        t = config.talker
        return cls(
            role=role,
            tts_pad=config.tts_pad_id,
            tts_bos=config.tts_bos_id,
            tts_eos=config.tts_eos_id,
            codec_pad=t.codec_pad_id,
            codec_bos=t.codec_bos_id,
            auto=(t.codec_nothink_id, t.codec_think_bos_id, t.codec_think_eos_id),
            given=(
                t.codec_think_id,
                t.codec_think_bos_id,
                config.languages["english"],
                t.codec_think_eos_id,
            ),
            speakers=tuple(config.speakers[voice] for voice in voices),
        )


def lay_out(
    ids: PromptIds,
    text: Tensor,
    num_text: Tensor,
    num_frames: Tensor,
    voices: Tensor,
    is_streaming: Tensor,
    is_auto: Tensor,
    length: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of both text layouts: text ids, codec ids, frame and target as in `Batch`, each [B, length].

    text: [B, T] padded; num_text, num_frames, voices: [B]; is_streaming, is_auto: [B] bool.
    What lies beyond `length` is cut. With i counted from the end of the head, both layouts have the
    same text side (t0 t1 ... EOS PAD PAD), and differ in where the codec side begins (spec 3.3).
    """
    device = text.device
    row = torch.arange(length, device=device)[None]
    head_rows = torch.where(is_auto, LONGEST_HEAD - 1, LONGEST_HEAD)[:, None]
    i = row - head_rows
    n = num_text[:, None]
    body = text.gather(1, i.clamp(0, text.shape[1] - 1))
    text_ids = torch.where(i < n, body, torch.where(i == n, ids.tts_eos, ids.tts_pad))
    head_text = torch.tensor([*ids.role, *[ids.tts_pad] * LONGEST_HEAD], device=device)[
        row.clamp(max=LONGEST_HEAD)
    ]
    head_text = torch.where(i == -1, ids.tts_bos, head_text)
    text_ids = torch.where(i < 0, head_text, text_ids)

    bos_at = torch.where(is_streaming[:, None], 0, n + 1)
    codec_ids = torch.where(i < bos_at, ids.codec_pad, torch.where(i == bos_at, ids.codec_bos, _NONE))
    speaker = torch.tensor(ids.speakers, device=device)[voices][:, None]
    blank = (_NONE,) * _NUM_ROLE_ROWS
    # Both heads in one table, speaker and the begin's pad filled in after the language.
    tables = torch.tensor(
        [[*blank, *ids.given, _NONE, ids.codec_pad], [*blank, *ids.auto, _NONE, ids.codec_pad, _NONE]],
        device=device,
    )
    head_codec = tables[is_auto.long()].gather(1, row.clamp(max=LONGEST_HEAD - 1).expand(len(text), -1))
    head_codec = torch.where(i == -2, speaker, head_codec)
    codec_ids = torch.where(i < 0, head_codec, codec_ids)

    frame = i - bos_at - 1
    frames = num_frames[:, None]
    target = torch.where((frame >= -1) & (frame < frames), frame + 1, _NONE)
    is_inside = frame < frames
    frame = torch.where((frame >= 0) & is_inside, frame, _NONE)
    text_ids = torch.where(is_inside, text_ids, _NONE)
    return text_ids, codec_ids, frame, target


def num_rows(num_text: Tensor, num_frames: Tensor) -> Tensor:
    """Rows of the longer layout with the longer head."""
    return LONGEST_HEAD + num_text + 2 + num_frames


@dataclass(frozen=True, slots=True)
class Corruption:
    """What is done to the codes that the talker reads, never to those it must predict.

    A talker that can trust its own history follows it instead of the text. Per utterance a rate is drawn
    from `zeroed`: so many frames lose their codes; in `redrawn` of all frames the groups from
    `first_redrawn` on become random.
    """

    zeroed: tuple[float, float] = (0.1, 0.5)
    redrawn: float = 0.1
    first_redrawn: int = 4

    def keep(self, shape: torch.Size, device: torch.device) -> Tensor:
        """[B, F] bool: whose codes stay."""
        low, high = self.zeroed
        rate = low + (high - low) * torch.rand(shape[0], 1, device=device)
        return torch.rand(shape[:2], device=device) >= rate

    def redraw(self, codes: Tensor, codebook_size: int) -> Tensor:
        """[B, F, G] -> the same with late groups of some frames drawn anew."""
        chosen = torch.rand(codes.shape[:2], device=codes.device) < self.redrawn
        late = torch.arange(codes.shape[-1], device=codes.device) >= self.first_redrawn
        random = torch.randint(codebook_size, codes.shape, device=codes.device)
        return torch.where(chosen[..., None] & late, random, codes)


class TrainableTalker(nn.Module):
    def __init__(self, config: CheckpointConfig, num_phones: int, dropout: float = 0.1) -> None:
        super().__init__()
        talker, width = config.talker, config.talker.transformer.hidden_size
        self.codebook_size, self.eos_id = config.code_predictor.codebook_size, talker.codec_eos_id
        self._tap = min(2, talker.transformer.num_layers - 1)
        self.model = _Stack(talker.transformer, dropout)
        self.model.codec_embedding = nn.Embedding(talker.vocab_size, width)
        self.model.text_embedding = nn.Embedding(talker.text_vocab_size, talker.text_hidden_size)
        self.text_projection = _TextProjection(talker.text_hidden_size, width)
        self.codec_head = nn.Linear(width, talker.vocab_size, bias=False)
        self.code_predictor = _CodePredictor(config, dropout)
        self.phone_head = nn.Linear(width, 2 * num_phones)  # training only: this frame's phone and the next's
        self.apply(_initialise)

    def exported(self) -> Mapping[str, Tensor]:
        """The official tensors."""
        return {name: t for name, t in self.state_dict().items() if not name.startswith("phone_head.")}

    # ------------------------------------------------------------ inputs
    def text_features(self, ids: Tensor) -> Tensor:
        features: Tensor = self.text_projection(self.model.text_embedding(ids.clamp(min=0)))
        return features * (ids >= 0)[..., None]

    def frame_features(self, codes: Tensor) -> Tensor:
        """[.., G] -> [.., D]."""
        total = self.model.codec_embedding(codes[..., 0])
        for g, embedding in enumerate(self.code_predictor.model.codec_embedding, start=1):
            total = total + embedding(codes[..., g])
        return total  # type: ignore[no-any-return]

    def rows(self, batch: Batch, corruption: Corruption | None = None) -> Tensor:
        """The sequences as the talker reads them: [B, L, D]."""
        codes = batch.codes if corruption is None else corruption.redraw(batch.codes, self.codebook_size)
        frames = self.frame_features(codes)
        if corruption is not None:
            frames = frames * corruption.keep(codes.shape, codes.device)[..., None]
        index = batch.frame.clamp(min=0)[..., None].expand(-1, -1, frames.shape[-1])
        rows = self.text_features(batch.text_ids) + frames.gather(1, index) * (batch.frame >= 0)[..., None]
        codec: Tensor = self.model.codec_embedding(batch.codec_ids.clamp(min=0))
        return rows + codec * (batch.codec_ids >= 0)[..., None]

    # ------------------------------------------------------------ outputs
    def hidden(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Normed hidden states, and those the phone head reads."""
        return self.model(rows, tap=self._tap)  # type: ignore[no-any-return]

    def rest_logits(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """Groups 1 .. G-1, teacher-forced. hidden: [N, D]; codes: [N, G] -> [N, G - 1, C]."""
        predictor = self.code_predictor
        inputs = [hidden, self.model.codec_embedding(codes[:, 0])]
        for g, embedding in enumerate(list(predictor.model.codec_embedding)[:-1], start=1):
            inputs.append(embedding(codes[:, g]))
        x = predictor.small_to_mtp_projection(torch.stack([x.to(hidden.dtype) for x in inputs], dim=1))
        states, _ = predictor.model(x)
        return torch.stack([head(states[:, g]) for g, head in enumerate(predictor.lm_head, start=1)], dim=1)


def _initialise(module: nn.Module) -> None:
    """Embeddings of a size that the sum of sixteen starts near one; linears as the published config says."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.1)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
