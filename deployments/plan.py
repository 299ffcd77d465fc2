"""Which deployments an app's args ask for: each model a talker, and what models can share they share.

Models share a codec when its files are the same, byte for byte, and its settings too; they share a
reference encoder when they are the same Base checkpoint. Binds nothing.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deployments.app_args import AppArgs, ModelArgs
from deployments.voice_aliases import check_voice_aliases
from qwen3tts_core.config import CheckpointConfig, CodecEngineConfig
from qwen3tts_core.model.checkpoint import CODEC_FILES, CONFIG_FILES, resolve_checkpoint
from qwen3tts_core.model.codec_files import FileHashes, codec_digest
from qwen3tts_core.text.voices import list_speakers

logger = logging.getLogger(__name__)

HASHES = Path("~/.cache/qwen3tts/file_hashes.json")

Resolve = Callable[[str, Sequence[str]], Path]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """One model and the names of its deployments. encoder: None for checkpoints that clone no voices."""

    args: ModelArgs
    talker: str
    codec: str
    encoder: str | None
    seconds_per_frame: float

    @property
    def sleepers(self) -> tuple[str, ...]:
        """Its deployments that may have no replica, in the order in which they are to start."""
        scaling = self.args.autoscaling
        named = (
            (self.talker, scaling.talker),
            (self.codec, scaling.codec),
            (self.encoder, scaling.reference_encoder),
        )
        return tuple(name for name, own in named if name is not None and own is not None and own.may_sleep)


def plan_app(args: AppArgs, resolve: Resolve = resolve_checkpoint) -> tuple[PlannedModel, ...]:
    """The models in their order. Fetches what tells kinds and codecs apart, where that isn't here yet.

    Raises CheckpointMismatch, or ValueError for voice aliases that don't fit the models, and for `ingress: codec` where
    one codec can't serve them all.
    """
    models = args.served
    files = CODEC_FILES if len(models) > 1 else CONFIG_FILES
    folders = [resolve(model.checkpoint_path, files) for model in models]
    configs = [CheckpointConfig.from_checkpoint(folder) for folder in folders]
    is_base = [config.model_type == "base" for config in configs]
    built_in = [name for config in configs for name in list_speakers(config)]
    check_voice_aliases(args.voice_aliases, built_in, clones=any(is_base))
    talkers = _names("Talker", models, range(len(models)))
    codecs = _names("Codec", models, _codec_keys(models, folders))
    if args.ingress == "codec" and (several := list(dict.fromkeys(codecs)))[1:]:
        raise ValueError(
            f"ingress: codec needs models that share one codec, these need {len(several)}: {', '.join(several)}"
        )
    encoders = _names(
        "ReferenceEncoder",
        [model for model, base in zip(models, is_base, strict=True) if base],
        [
            (folder, model.autoscaling.reference_encoder)
            for model, folder, base in zip(models, folders, is_base, strict=True)
            if base
        ],
    )
    named_encoders = iter(encoders)
    planned = tuple(
        PlannedModel(
            model,
            talker,
            codec,
            next(named_encoders) if base else None,
            1.0 / config.codec.frame_rate_hz,
        )
        for model, talker, codec, base, config in zip(models, talkers, codecs, is_base, configs, strict=True)
    )
    for model in planned:
        logger.info(
            "model %s: %s, %s, %s",
            model.args.served_name,
            model.talker,
            model.codec,
            model.encoder or "no clones",
        )
    return planned


def shared_codec_engine(models: Iterable[ModelArgs]) -> CodecEngineConfig:
    """Settings of the codec that these models share: theirs, with the rows of all of them."""
    members = list(models)
    config = _with_rows(members[0].codec, sum(model.codec.num_rows for model in members))
    return dataclasses.replace(config, deterministic=True) if members[0].deterministic else config


def _codec_keys(models: Sequence[ModelArgs], folders: Sequence[Path]) -> list[object]:
    """Equal for models that can share a codec."""
    if len(models) == 1:
        return [None]
    hashes = FileHashes(HASHES.expanduser())
    return [
        (
            codec_digest(folder, hashes),
            _with_rows(model.codec, 1),
            model.codec_dtype,
            model.deterministic,
            model.autoscaling.codec,
        )
        for model, folder in zip(models, folders, strict=True)
    ]


def _with_rows(config: CodecEngineConfig, num_rows: int) -> CodecEngineConfig:
    """The same for another number of rows; the batch buckets follow it unless they were chosen."""
    own = config.batch_buckets
    follow = own == dataclasses.replace(config, batch_buckets=()).batch_buckets
    return dataclasses.replace(config, num_rows=num_rows, batch_buckets=() if follow else own)


def _names(kind: str, models: Sequence[ModelArgs], keys: Iterable[object]) -> list[str]:
    """One deployment name per model, the same for equal keys.

    A deployment that is the only one of its kind is called after its kind. Else the name of its
    first model is added, in letters that file names can hold.
    """
    firsts: dict[object, ModelArgs] = {}
    keys = list(keys)
    for model, key in zip(models, keys, strict=True):
        firsts.setdefault(key, model)
    if len(firsts) == 1:
        return [kind] * len(models)
    names: dict[object, str] = {}
    for key, model in firsts.items():
        last_part = model.served_name.rpartition("/")[2]
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", last_part).strip("-.") or "model"
        name, number = f"{kind}-{plain}", 2
        while name in names.values():
            name, number = f"{kind}-{plain}-{number}", number + 1
        names[key] = name
    return [names[key] for key in keys]
