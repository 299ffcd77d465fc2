"""What a checkpoint says of itself, and how the engines are sized.

The first half is read from the checkpoint's JSON files and from nowhere else: published config
classes have defaults that fit no published checkpoint, so a missing key stops the start and names
itself. The second half, `TalkerEngineConfig` and `CodecEngineConfig`, is the only home of the
engines' defaults. Knows nothing of tensors or devices.
Source: spec sections 1.2 to 1.4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

from qwen3tts_core.errors import CheckpointMismatch
from qwen3tts_core.json_section import JsonSection
from qwen3tts_core.types import DrawParams, Sampling

ModelType = Literal["custom_voice", "voice_design", "base"]
_MODEL_TYPES: tuple[ModelType, ...] = ("custom_voice", "voice_design", "base")


# ---------------------------------------------------------------- the checkpoint
@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """Sizes of one stack of decoder layers (talker, code predictor, codec transformer)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def _read(cls, section: JsonSection) -> TransformerConfig:
        section.require("hidden_act", "silu")
        section.require("attention_bias", False)
        section.require("tie_word_embeddings", False)
        section.require_plain_rope()
        config = cls(
            hidden_size=section.size("hidden_size"),
            intermediate_size=section.size("intermediate_size"),
            num_layers=section.size("num_hidden_layers"),
            num_heads=section.size("num_attention_heads"),
            num_kv_heads=section.size("num_key_value_heads"),
            head_dim=section.size("head_dim"),
            rms_norm_eps=section.positive("rms_norm_eps"),
            rope_theta=section.positive("rope_theta"),
        )
        if config.num_heads % config.num_kv_heads:
            raise section.failure("num_key_value_heads", f"must divide the {config.num_heads} heads")
        if config.head_dim % 2:
            raise section.failure("head_dim", f"must be even for rotary positions, got {config.head_dim}")
        return config


@dataclass(frozen=True, slots=True)
class TalkerConfig:
    """The autoregressive transformer over frames, with the ids of its codec-side vocabulary."""

    transformer: TransformerConfig
    vocab_size: int
    text_vocab_size: int
    text_hidden_size: int
    max_positions: int
    num_code_groups: int
    codec_pad_id: int
    codec_bos_id: int
    codec_eos_id: int
    codec_think_id: int
    codec_nothink_id: int
    codec_think_bos_id: int
    codec_think_eos_id: int

    @property
    def num_suppressed(self) -> int:
        """Ids at the end of the vocabulary that are never drawn, EOS aside. Spec 2.4 step 3."""
        return 1024


@dataclass(frozen=True, slots=True)
class CodePredictorConfig:
    """Predicts the remaining code groups of one frame, one after the other."""

    transformer: TransformerConfig
    codebook_size: int
    num_code_groups: int


@dataclass(frozen=True, slots=True)
class CodecDecoderConfig:
    """Frames to PCM: quantiser tables, a windowed transformer, then convolutions."""

    transformer: TransformerConfig
    codebook_dim: int
    codebook_size: int
    latent_dim: int
    num_quantizers: int
    sliding_window: int
    decoder_dim: int
    upsample_rates: tuple[int, ...]
    upsampling_ratios: tuple[int, ...]
    sample_rate_hz: int

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.upsample_rates) * math.prod(self.upsampling_ratios)

    @property
    def frame_rate_hz(self) -> float:
        return self.sample_rate_hz / self.samples_per_frame

    @property
    def widest_stage(self) -> int:
        """Values a frame in the largest activation: channels halve where the rate grows."""
        widest = steps = math.prod(self.upsampling_ratios)
        widest *= self.decoder_dim
        for i, rate in enumerate(self.upsample_rates, start=1):
            steps *= rate
            widest = max(widest, steps * (self.decoder_dim >> i))
        return widest


@dataclass(frozen=True, slots=True)
class SpeakerEncoderConfig:
    """ECAPA-TDNN of the Base checkpoints. Published files give only `enc_dim` and `sample_rate`."""

    embedding_dim: int
    sample_rate_hz: int
    mel_dim: int = 128
    channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    attention_channels: int = 128
    res2net_scale: int = 8
    se_channels: int = 128


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Everything the JSON files of one checkpoint say; immutable and picklable."""

    model_type: ModelType
    model_size: str
    tts_pad_id: int
    tts_bos_id: int
    tts_eos_id: int
    talker: TalkerConfig
    code_predictor: CodePredictorConfig
    codec: CodecDecoderConfig
    speakers: Mapping[str, int]
    speaker_dialects: Mapping[str, str]
    languages: Mapping[str, int]
    sampling: Sampling
    max_new_tokens: int
    speaker_encoder: SpeakerEncoderConfig | None = None
    codec_encoder: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_checkpoint(cls, path: Path) -> CheckpointConfig:
        """Read `config.json`, `generation_config.json` and `speech_tokenizer/config.json`.

        Raises CheckpointMismatch naming the file and the key.
        """
        top = JsonSection.from_file(path / "config.json")
        section = top.section("talker_config")
        talker = _read_talker(section)
        model_type = cast("ModelType", top.choice("tts_model_type", _MODEL_TYPES))
        top.require("tokenizer_type", "qwen3_tts_tokenizer_12hz")
        codec_section = JsonSection.from_file(path / "speech_tokenizer" / "config.json")
        sampling, max_new_tokens = _read_generation(JsonSection.from_file(path / "generation_config.json"))
        config = cls(
            model_type=model_type,
            model_size=top.text("tts_model_size"),
            tts_pad_id=top.integer("tts_pad_token_id", 0, talker.text_vocab_size),
            tts_bos_id=top.integer("tts_bos_token_id", 0, talker.text_vocab_size),
            tts_eos_id=top.integer("tts_eos_token_id", 0, talker.text_vocab_size),
            talker=talker,
            code_predictor=_read_predictor(section.section("code_predictor_config")),
            codec=_read_codec(codec_section),
            speakers=section.ids("spk_id", talker.vocab_size),
            speaker_dialects=_read_dialects(section),
            languages=section.ids("codec_language_id", talker.vocab_size),
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            speaker_encoder=_read_speaker_encoder(top) if model_type == "base" else None,
            codec_encoder=codec_section.mapping("encoder_config"),
        )
        config._check_agreement(path)
        return config

    def _check_agreement(self, path: Path) -> None:
        groups = {
            "talker_config.num_code_groups": self.talker.num_code_groups,
            "code_predictor_config.num_code_groups": self.code_predictor.num_code_groups,
            "speech_tokenizer decoder_config.num_quantizers": self.codec.num_quantizers,
        }
        problems = []
        if len(set(groups.values())) > 1:
            problems.append("these must be equal: " + ", ".join(f"{k} = {v}" for k, v in groups.items()))
        if self.code_predictor.codebook_size != self.codec.codebook_size:
            problems.append(
                f"code_predictor_config.vocab_size is {self.code_predictor.codebook_size}, "
                f"the codec's codebook_size {self.codec.codebook_size}"
            )
        num_codes = self.talker.vocab_size - self.talker.num_suppressed
        if num_codes != self.codec.codebook_size:
            problems.append(
                f"talker_config.vocab_size is {self.talker.vocab_size:,}, which leaves {num_codes:,} codes to draw, "
                f"but the codec has {self.codec.codebook_size:,}"
            )
        dialects = {d for d in self.speaker_dialects.values() if d not in self.languages}
        if dialects:
            problems.append(f"spk_is_dialect names no language: {', '.join(sorted(dialects))}")
        if problems:
            raise CheckpointMismatch(str(path), problems)

    def __reduce__(self) -> tuple[Any, ...]:
        """mappingproxy doesn't pickle; rebuild through plain dicts."""
        values = [getattr(self, name) for name in self.__slots__]
        return _rebuild_checkpoint_config, tuple(
            dict(v) if isinstance(v, MappingProxyType) else v for v in values
        )


def _rebuild_checkpoint_config(*values: Any) -> CheckpointConfig:
    fields: list[Any] = [MappingProxyType(v) if isinstance(v, dict) else v for v in values]
    return CheckpointConfig(*fields)


def _read_talker(section: JsonSection) -> TalkerConfig:
    section.require("use_sliding_window", False)
    vocab_size = section.size("vocab_size")
    return TalkerConfig(
        transformer=TransformerConfig._read(section),
        vocab_size=vocab_size,
        text_vocab_size=section.size("text_vocab_size"),
        text_hidden_size=section.size("text_hidden_size"),
        max_positions=section.size("max_position_embeddings"),
        num_code_groups=section.integer("num_code_groups", 2),
        codec_pad_id=section.integer("codec_pad_id", 0, vocab_size),
        codec_bos_id=section.integer("codec_bos_id", 0, vocab_size),
        codec_eos_id=section.integer("codec_eos_token_id", 0, vocab_size),
        codec_think_id=section.integer("codec_think_id", 0, vocab_size),
        codec_nothink_id=section.integer("codec_nothink_id", 0, vocab_size),
        codec_think_bos_id=section.integer("codec_think_bos_id", 0, vocab_size),
        codec_think_eos_id=section.integer("codec_think_eos_id", 0, vocab_size),
    )


def _read_dialects(section: JsonSection) -> Mapping[str, str]:
    """Speakers that have one. Who isn't listed, or false, has none (quirk Q14 of the reference: a KeyError)."""
    dialects = {}
    for name, dialect in section.mapping("spk_is_dialect", {}).items():
        if dialect is not False and not isinstance(dialect, str):
            raise section.failure(
                f"spk_is_dialect.{name}", f"expected a dialect's name or false, got {dialect!r}"
            )
        if dialect:
            dialects[name.lower()] = dialect
    return MappingProxyType(dialects)


def _read_predictor(section: JsonSection) -> CodePredictorConfig:
    section.require("use_sliding_window", False)
    return CodePredictorConfig(
        transformer=TransformerConfig._read(section),
        codebook_size=section.size("vocab_size"),
        num_code_groups=section.size("num_code_groups"),
    )


def _read_codec(top: JsonSection) -> CodecDecoderConfig:
    section = top.section("decoder_config")
    config = CodecDecoderConfig(
        transformer=TransformerConfig._read(section),
        codebook_dim=section.size("codebook_dim"),
        codebook_size=section.size("codebook_size"),
        latent_dim=section.size("latent_dim"),
        num_quantizers=section.size("num_quantizers"),
        sliding_window=section.size("sliding_window"),
        decoder_dim=section.size("decoder_dim"),
        upsample_rates=section.sizes("upsample_rates"),
        upsampling_ratios=section.sizes("upsampling_ratios"),
        sample_rate_hz=top.size("output_sample_rate"),
    )
    rate = top.size("decode_upsample_rate")
    if rate != config.samples_per_frame:
        raise top.failure(
            "decode_upsample_rate",
            f"says {rate}, but the decoder's rates multiply to {config.samples_per_frame}",
        )
    return config


def _read_speaker_encoder(top: JsonSection) -> SpeakerEncoderConfig:
    section = top.section("speaker_encoder_config")
    default = {name: f.default for name, f in SpeakerEncoderConfig.__dataclass_fields__.items()}
    return SpeakerEncoderConfig(
        embedding_dim=section.size("enc_dim"),
        sample_rate_hz=section.size("sample_rate"),
        mel_dim=section.size("mel_dim", default["mel_dim"]),
        channels=section.sizes("enc_channels", default["channels"]),
        kernel_sizes=section.sizes("enc_kernel_sizes", default["kernel_sizes"]),
        dilations=section.sizes("enc_dilations", default["dilations"]),
        attention_channels=section.size("enc_attention_channels", default["attention_channels"]),
        res2net_scale=section.size("enc_res2net_scale", default["res2net_scale"]),
        se_channels=section.size("enc_se_channels", default["se_channels"]),
    )


def _read_generation(section: JsonSection) -> tuple[Sampling, int]:
    """The file wins over the hard defaults of spec 1.4, key by key."""
    default = DrawParams()

    def draw(prefix: str, sample_key: str) -> DrawParams:
        return DrawParams(
            do_sample=section.flag(sample_key, default.do_sample),
            temperature=section.positive(f"{prefix}temperature", default=default.temperature),
            top_k=section.integer(f"{prefix}top_k", 0, default=default.top_k),
            top_p=section.positive(f"{prefix}top_p", 1.0, default.top_p),
        )

    sampling = Sampling(
        talker=draw("", "do_sample"),
        subtalker=draw("subtalker_", "subtalker_dosample"),
        repetition_penalty=section.positive("repetition_penalty", default=Sampling().repetition_penalty),
    )
    return sampling, section.size("max_new_tokens", 2048)


# ---------------------------------------------------------------- the engines
Attention = Literal["own", "flashinfer"]
WeightDtype = Literal["auto", "float8_e4m3"]


@dataclass(frozen=True, slots=True)
class TalkerEngineConfig:
    """Sizes of the Talker engine.

    num_slots: streams decoded at once. max_queued: admitted requests that wait for a slot; beyond
        it a request is refused. max_positions: prompt rows + frames of one request.
    num_pages: KV pages in all, of `page_size` positions each; 0 means enough for every slot at
        half of `max_positions`. A request's pages are reserved before it starts, so a running
        stream never lacks one.
    decode_buckets: row counts a decode step is built for; empty means powers of two up to
        `num_slots`. prefill_buckets: packed prompt rows of one prefill; the largest is also the
        token budget between two decode steps.
    deterministic: one decode bucket, prompts prefilled singly, KV padded to one length: the same
        bytes whatever else runs, on one machine and build.
    memory_gib: what a replica on a GPU may allocate in all; 0 is no limit. A start that needs more fails.
    prefill_attention, decode_attention: "own" kernels or "flashinfer", on a GPU in bfloat16. What each
        costs: `load_tests/LOG.md`.
    """

    num_slots: int = 8
    max_queued: int = 32
    page_size: int = 16
    max_positions: int = 4096
    num_pages: int = 0
    decode_buckets: tuple[int, ...] = ()
    prefill_buckets: tuple[int, ...] = (32, 64, 128, 256, 512)
    min_frames: int = 2
    deterministic: bool = False
    memory_gib: float = 0.0
    prefill_attention: Attention = "own"
    decode_attention: Attention = "own"

    def __post_init__(self) -> None:
        _at_least_one(self, "num_slots", "page_size", "max_positions", "min_frames")
        for name in ("prefill_attention", "decode_attention"):
            if getattr(self, name) not in get_args(Attention):
                raise ValueError(f"{name} must be 'own' or 'flashinfer', got {getattr(self, name)!r}")
        if self.max_queued < 0 or self.num_pages < 0 or self.memory_gib < 0:
            raise ValueError("max_queued, num_pages and memory_gib must be 0 or more")
        buckets = self.decode_buckets or _powers_of_two(self.num_slots)
        if self.deterministic:  # rows below 4 take other kernels on CPU and round differently
            buckets = (max(4, -(-self.num_slots // 4) * 4),)
        _check_buckets("decode_buckets", buckets)
        _check_buckets("prefill_buckets", self.prefill_buckets)
        if buckets[-1] < self.num_slots:
            raise ValueError(
                f"the largest decode bucket, {buckets[-1]}, is below num_slots, {self.num_slots}"
            )
        object.__setattr__(self, "decode_buckets", buckets)
        if not self.num_pages:
            half = -(-self.num_slots * self.pages_for(self.max_positions) // 2)
            object.__setattr__(self, "num_pages", max(half, self.pages_for(self.max_positions)))

    def pages_for(self, num_positions: int) -> int:
        return -(-num_positions // self.page_size)


@dataclass(frozen=True, slots=True)
class CodecEngineConfig:
    """Sizes of the Codec engine.

    mode: "incremental" carries exact state per stream (spec 4.4); "window" decodes stateless
        windows with `left_context_frames` of left context (72 covers one attention window, 580 is
        exact for the published sizes).
    num_rows: streams that can be open at once (rows of the state arena).
    frame_buckets, batch_buckets: shapes a decode is built for.
    max_batch_frames: rows times frames of one decode, or the smallest batch if that is more; 0 is
        no limit. A GPU has enough to do from a few hundred on; more makes first chunks wait longer
        and takes more memory (3 MB a frame for the published sizes).
    batch_wait_s: how long a chunk that isn't needed yet may wait for others, since large batches cost a GPU
        less; a share of it while fewer than 65 streams are open, never more than a quarter of the time until it
        is to be played. First chunks never wait.
    memory_gib: what a replica on a GPU may allocate in all; 0 is no limit. Shapes that don't fit are
        left out at the start.
    max_primed_voices: clone voices whose state after their reference frames is kept (incremental
        mode; 5.2 MB each for the published sizes in float32).
    high_priority: on a GPU, its kernels go before others' that share it, the Talker's say: a first chunk waits less.
    deterministic: one (frames, batch) bucket for everything.
    """

    mode: Literal["incremental", "window"] = "incremental"
    num_rows: int = 16
    left_context_frames: int = 25
    frame_buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 25)
    batch_buckets: tuple[int, ...] = ()
    max_batch_frames: int = 400
    batch_wait_s: float = 0.0
    memory_gib: float = 0.0
    max_primed_voices: int = 32
    high_priority: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("incremental", "window"):
            raise ValueError(f"mode must be 'incremental' or 'window', got {self.mode!r}")
        _at_least_one(self, "num_rows")
        if self.left_context_frames < 0:
            raise ValueError(f"left_context_frames must be 0 or more, got {self.left_context_frames}")
        if self.max_primed_voices < 0:
            raise ValueError(f"max_primed_voices must be 0 or more, got {self.max_primed_voices}")
        if self.max_batch_frames < 0 or self.memory_gib < 0:
            raise ValueError("max_batch_frames and memory_gib must be 0 or more")
        if not 0 <= self.batch_wait_s <= 1:
            raise ValueError(f"batch_wait_s must be from 0 to 1, got {self.batch_wait_s}")
        batches = self.batch_buckets or _powers_of_two(min(self.num_rows, 64))
        frames = self.frame_buckets
        _check_buckets("batch_buckets", batches)
        _check_buckets("frame_buckets", frames)
        if self.deterministic:
            # One small batch: a large one would be padded for a single stream as well.
            batches, frames = (max(4, min(8, batches[-1])),), frames[-1:]
        object.__setattr__(self, "batch_buckets", batches)
        object.__setattr__(self, "frame_buckets", frames)


def _powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, … and the limit itself."""
    return (*(1 << i for i in range((limit - 1).bit_length())), limit)


def _check_buckets(name: str, buckets: tuple[int, ...]) -> None:
    if not buckets or buckets[0] < 1 or list(buckets) != sorted(set(buckets)):
        raise ValueError(f"{name} must rise from 1 or more, got {buckets}")


def _at_least_one(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")
