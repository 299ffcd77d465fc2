"""The codec decoder's transformer: causal attention over a sliding window of frames.

No q/k norm and no biases within the layers, a scale vector on each branch, rotary positions that
run on from chunk to chunk. Source: spec 4.1, step 3.

Shape letters: B rows, F frames, D width, H heads, K KV heads, E head dim, W attention window.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from qwen3tts_core.config import CodecDecoderConfig, TransformerConfig
from qwen3tts_core.model.codec_state import Past, Tail
from qwen3tts_core.model.layers import frozen
from qwen3tts_core.model.weights import WeightReader


class WindowAttention(nn.Module):
    """Causal attention over the last W frames; rotary positions, no biases, no q/k norm.

    Explicit matmuls: fused attention rounds a row differently at batch 1 than in a larger batch.
    """

    def __init__(self, reader: WeightReader, config: TransformerConfig, window: int) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        rows = {"q_proj.weight": q_rows, "k_proj.weight": kv_rows, "v_proj.weight": kv_rows}
        self.qkv = frozen(reader.concat(rows, config.hidden_size))
        self.split = [q_rows, kv_rows, kv_rows]
        self.out = frozen(reader.take("o_proj.weight", config.hidden_size, q_rows))
        self.tail = Tail(2 * kv_rows, window - 1)

    def forward(self, x: Tensor, past: Past, rope: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """x: [B, F, D]; rope: cos and sin; visible: [B, F, W - 1 + F] bool -> [B, F, D]."""
        num_rows, num_frames, _ = x.shape
        heads = (num_rows, num_frames, -1, self.head_dim)
        q, k, v = torch.split(functional.linear(x, self.qkv), self.split, dim=-1)
        q, k = _rotate(q.view(heads), *rope), _rotate(k.view(heads), *rope)
        kv = past.extend(self.tail, torch.cat([k.flatten(2), v], dim=-1).transpose(1, 2))
        k, v = kv.reshape(num_rows, 2, self.num_kv_heads, 1, self.head_dim, -1).unbind(1)
        q = q.view(num_rows, num_frames, self.num_kv_heads, -1, self.head_dim).permute(0, 2, 3, 1, 4)
        # q: [B, K, H / K, F, E]; k, v: [B, K, 1, E, W - 1 + F]
        scores = (q * self.head_dim**-0.5 @ k).float()
        weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(dim=-1)
        mixed = weights.to(v.dtype) @ v.transpose(-1, -2)
        return functional.linear(mixed.permute(0, 3, 1, 2, 4).flatten(2), self.out)


class TransformerLayer(nn.Module):
    """h += s_a ⊙ attention(norm(h)); h += s_m ⊙ SwiGLU(norm(h))."""

    def __init__(self, reader: WeightReader, config: TransformerConfig, window: int) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.eps = config.rms_norm_eps
        self.attention = WindowAttention(reader.within("self_attn."), config, window)
        self.attention_norm = frozen(reader.take("input_layernorm.weight", width))
        self.attention_scale = frozen(reader.take("self_attn_layer_scale.scale", width))
        self.mlp_norm = frozen(reader.take("post_attention_layernorm.weight", width))
        self.mlp_scale = frozen(reader.take("mlp_layer_scale.scale", width))
        self.gate_up = frozen(
            reader.concat({"mlp.gate_proj.weight": inner, "mlp.up_proj.weight": inner}, width)
        )
        self.down = frozen(reader.take("mlp.down_proj.weight", width, inner))

    def forward(self, h: Tensor, past: Past, rope: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        h = h + self.attention_scale * self.attention(
            _rms_norm(h, self.attention_norm, self.eps), past, rope, visible
        )
        gate, up = functional.linear(_rms_norm(h, self.mlp_norm, self.eps), self.gate_up).chunk(2, dim=-1)
        return h + self.mlp_scale * functional.linear(functional.silu(gate) * up, self.down)


class WindowTransformer(nn.Module):
    """The transformer between the codes and the convs. [B, C, F] -> [B, C, F]."""

    def __init__(self, reader: WeightReader, config: CodecDecoderConfig) -> None:
        super().__init__()
        transformer, width = config.transformer, config.transformer.hidden_size
        self.window, self.eps = config.sliding_window, transformer.rms_norm_eps
        self.head_dim, self.rope_theta = transformer.head_dim, transformer.rope_theta
        self.project_in, self.bias_in = take_linear(reader.within("input_proj."), config.latent_dim, width)
        self.layers = nn.ModuleList(
            TransformerLayer(reader.within(f"layers.{i}."), transformer, config.sliding_window)
            for i in range(transformer.num_layers)
        )
        self.norm = frozen(reader.take("norm.weight", width))
        self.project_out, self.bias_out = take_linear(reader.within("output_proj."), width, config.latent_dim)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        h = functional.linear(x.transpose(1, 2), self.project_in, self.bias_in)
        rope, visible = self._rope(past.position, h.shape[1]), self._visible(past.position, h.shape[1])
        for layer in self.layers:
            h = layer(h, past, rope, visible)
        h = functional.linear(_rms_norm(h, self.norm, self.eps), self.project_out, self.bias_out)
        return h.transpose(1, 2)

    def _rope(self, position: Tensor, num_frames: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the new frames' angles, float32, [B, F, 1, E / 2]."""
        half = torch.arange(0, self.head_dim, 2, device=position.device).float() / self.head_dim
        frames = position[:, None] + torch.arange(num_frames, device=position.device)
        angles = frames[:, :, None, None].float() * self.rope_theta**-half
        return angles.cos(), angles.sin()

    def _visible(self, position: Tensor, num_frames: int) -> Tensor:
        """[B, F, W - 1 + F] bool. Key j is frame position - (W - 1) + j: before frame 0 lies nothing."""
        past = self.window - 1
        query = torch.arange(num_frames, device=position.device)[:, None]
        key = torch.arange(past + num_frames, device=position.device)
        in_window = (key >= query) & (key <= query + past)
        return in_window & (key >= past - position[:, None])[:, None, :]


def take_linear(reader: WeightReader, num_in: int, num_out: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight and bias of a linear layer."""
    return frozen(reader.take("weight", num_out, num_in)), frozen(reader.take("bias", num_out))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-form rotary embedding in float32. x: [B, F, heads, E]; cos, sin: [B, F, 1, E / 2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
