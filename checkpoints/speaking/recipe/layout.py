"""The checkpoint's dimensions, and its JSON files in the official layout.

Every other module reads its sizes from the files that this one writes, through the project's own
`CheckpointConfig`, so what is trained is what will be loaded. Source: spec 1.2 to 1.4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOICES = ("slt", "rms", "awb")
NUM_GROUPS = 16
SAMPLE_RATE_HZ = 24_000
SAMPLES_PER_FRAME = 1_920
_RATES, _RATIOS = (8, 5, 4, 3), (2, 2)
_NUM_SUPPRESSED = 1_024  # ids at the end of the codec vocabulary that are never drawn (spec 2.4)
_TEXT_TABLE_STEP = 64


@dataclass(frozen=True, slots=True)
class Stack:
    """One stack of decoder layers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the official config lets shrink. latent, decoder_width: of the codec decoder."""

    codebook: int
    codebook_dim: int
    latent: int
    decoder_width: int
    window: int
    codec: Stack
    talker: Stack
    predictor: Stack
    text_hidden: int
    encoder_width: int  # of the training-only encoder, which no checkpoint holds


SPEAKING = Sizes(
    codebook=256,
    codebook_dim=128,
    latent=160,
    decoder_width=256,
    window=24,  # frames; crops of 2 s are 25: nothing attends further than was trained
    codec=Stack(160, 3, 5, 5, 32, 448),
    talker=Stack(256, 6, 4, 2, 64, 768),
    predictor=Stack(192, 3, 3, 1, 64, 512),
    text_hidden=256,
    encoder_width=192,
)
REHEARSAL = Sizes(  # every part is there, and twenty steps are seconds on one core
    codebook=32,
    codebook_dim=16,
    latent=32,
    decoder_width=32,
    window=8,
    codec=Stack(32, 1, 2, 2, 16, 32),
    talker=Stack(32, 2, 2, 1, 16, 48),
    predictor=Stack(24, 1, 2, 1, 12, 32),
    text_hidden=24,
    encoder_width=32,
)
SIZES: Mapping[str, Sizes] = {"speaking": SPEAKING, "rehearsal": REHEARSAL}


def write_configs(folder: Path, sizes: Sizes, text_ids: Mapping[str, int]) -> None:
    """`config.json`, `generation_config.json`, `speech_tokenizer/*.json` and the processor's file.

    text_ids: ids of the tokenizer's special tokens, and `assistant`, as `bpe.write_tokenizer` returns them.
    """
    files = {
        "config.json": model_config(sizes, text_ids),
        "generation_config.json": GENERATION,
        "preprocessor_config.json": _PROCESSOR,
        "speech_tokenizer/config.json": codec_config(sizes),
        "speech_tokenizer/preprocessor_config.json": _FEATURE_EXTRACTOR,
        "speech_tokenizer/configuration.json": {"framework": "pytorch", "task": "feature-extraction"},
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def model_config(sizes: Sizes, text_ids: Mapping[str, int]) -> dict[str, Any]:
    first_special = sizes.codebook  # codes lie below vocab_size - 1024, everything else above
    names = ("pad", "bos", "eos_token", "think", "nothink", "think_bos", "think_eos", "english", *VOICES)
    ids = {name: first_special + i for i, name in enumerate(names)}
    text_rows = -(-(max(text_ids.values()) + 1) // _TEXT_TABLE_STEP) * _TEXT_TABLE_STEP
    head = sizes.talker.head_dim // 2
    sections = [head - 2 * (head * 10 // 32), head * 10 // 32, head * 10 // 32]
    talker = {
        **_stack(sizes.talker),
        "model_type": "qwen3_tts_talker",
        "rope_theta": 1_000_000.0,
        "rope_scaling": {
            "interleaved": True,
            "mrope_section": sections,
            "rope_type": "default",
            "type": "default",
        },
        "max_position_embeddings": 4_096,
        "position_id_per_seconds": 13,
        "vocab_size": sizes.codebook + _NUM_SUPPRESSED,
        "text_vocab_size": text_rows,
        "text_hidden_size": sizes.text_hidden,
        "num_code_groups": NUM_GROUPS,
        **{f"codec_{name}_id": ids[name] for name in names[:7]},
        "codec_language_id": {"english": ids["english"]},
        "spk_id": {voice: ids[voice] for voice in VOICES},
        "spk_is_dialect": dict.fromkeys(VOICES, False),
        "code_predictor_config": {
            **_stack(sizes.predictor),
            "model_type": "qwen3_tts_talker_code_predictor",
            "rope_theta": 1_000_000.0,
            "rope_scaling": None,
            "layer_types": ["full_attention"] * sizes.predictor.layers,
            "max_position_embeddings": 4_096,
            "max_window_layers": 28,
            "vocab_size": sizes.codebook,
            "num_code_groups": NUM_GROUPS,
        },
    }
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "transformers_version": "4.57.3",
        "tts_model_type": "custom_voice",
        "tts_model_size": "0b6",  # takes no instructions
        "im_start_token_id": text_ids["<|im_start|>"],
        "im_end_token_id": text_ids["<|im_end|>"],
        "assistant_token_id": text_ids["assistant"],
        "tts_pad_token_id": text_ids["<tts_pad>"],
        "tts_bos_token_id": text_ids["<tts_text_bos>"],
        "tts_eos_token_id": text_ids["<tts_text_eod>"],
        "talker_config": talker,
    }


def codec_config(sizes: Sizes) -> dict[str, Any]:
    stack = _stack(sizes.codec)
    for key in ("initializer_range", "use_cache", "use_sliding_window"):
        del stack[key]
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "transformers_version": "4.57.3",
        "input_sample_rate": SAMPLE_RATE_HZ,
        "output_sample_rate": SAMPLE_RATE_HZ,
        "encode_downsample_rate": SAMPLES_PER_FRAME,
        "decode_upsample_rate": SAMPLES_PER_FRAME,
        "encoder_valid_num_quantizers": NUM_GROUPS,
        "decoder_config": {
            **stack,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000,
            "sliding_window": sizes.window,
            "max_position_embeddings": 8_000,
            "layer_scale_initial_scale": 0.01,
            "codebook_size": sizes.codebook,
            "codebook_dim": sizes.codebook_dim,
            "latent_dim": sizes.latent,
            "decoder_dim": sizes.decoder_width,
            "num_quantizers": NUM_GROUPS,
            "num_semantic_quantizers": 1,
            "semantic_codebook_size": sizes.codebook,
            "vector_quantization_hidden_dimension": sizes.codebook_dim,
            "upsample_rates": list(_RATES),
            "upsampling_ratios": list(_RATIOS),
        },
        # The official class always builds one; a CustomVoice checkpoint never runs it. See `export`.
        "encoder_config": {},
    }


def _stack(stack: Stack) -> dict[str, Any]:
    return {
        "hidden_size": stack.hidden,
        "intermediate_size": stack.inner,
        "num_hidden_layers": stack.layers,
        "num_attention_heads": stack.heads,
        "num_key_value_heads": stack.kv_heads,
        "head_dim": stack.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "use_sliding_window": False,
    }


# Sampling for a small model of a deterministic teacher: low temperature, and no repetition penalty, for
# silence repeats its code.
GENERATION: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.3,
    "top_k": 20,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.3,
    "subtalker_top_k": 10,
    "subtalker_top_p": 1.0,
    "max_new_tokens": 400,
}
_PROCESSOR = {
    "padding_side": "left",
    "padding_value": 0.0,
    "processor_class": "Qwen3TTSProcessor",
    "return_attention_mask": True,
}
_FEATURE_EXTRACTOR = {
    "chunk_length_s": None,
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "overlap": None,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": SAMPLE_RATE_HZ,
}
