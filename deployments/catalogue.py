"""What this server has to offer, as `GET /v1/models` and `GET /v1/audio/voices` show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deployments.served_models import ServedModel, ServedModels
from deployments.tasks import TASK_TYPES
from deployments.voice_aliases import VoiceAliases
from qwen3tts_core.audio.voice_store import VoiceRecord
from qwen3tts_core.text.prompt import takes_instructions


def describe_model(model: ServedModel) -> dict[str, Any]:
    config = model.frontend.config
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "qwen3tts-serve",
        "aliases": list(model.aliases),
        "task_type": TASK_TYPES[config.model_type],
        "size": config.model_size,
        "takes_instructions": takes_instructions(config),
        "sample_rate_hz": config.codec.sample_rate_hz,
        "max_new_tokens": config.max_new_tokens,
    }


def describe_voices(
    models: ServedModels, records: Sequence[VoiceRecord], only: ServedModel | None, aliases: VoiceAliases
) -> dict[str, Any]:
    """Built-in voices, uploaded ones, and aliases of those, each with the models that speak with it.

    only: this model's alone. The default voice and the languages are that model's, or the default model's.
    """
    shown = [only] if only is not None else list(models)
    built_in: dict[str, dict[str, Any]] = {}
    for model in shown:
        dialects = model.frontend.config.speaker_dialects
        for name in model.frontend.voices:
            new = {
                "id": name,
                "object": "voice",
                "built_in": True,
                "dialect": dialects.get(name),
                "models": [],
            }
            built_in.setdefault(name, new)["models"].append(model.name)
    cloning = [model.name for model in shown if model.cloner is not None]
    data = list(built_in.values())
    if cloning:
        data += [describe_voice(record, cloning) for record in records]
    by_name = {voice["id"].lower(): voice for voice in data}
    data += [
        {**by_name[voice.lower()], "id": alias, "alias_of": by_name[voice.lower()]["id"]}
        for alias, voice in aliases.items()
        if voice.lower() in by_name
    ]
    chosen = (only or models.default).frontend
    return {
        "object": "list",
        "data": data,
        "voices": [voice["id"] for voice in data],
        "default": chosen.default_voice or None,
        "languages": list(chosen.languages),
    }


def describe_voice(record: VoiceRecord, models: Sequence[str]) -> dict[str, Any]:
    """An uploaded voice. models: those that speak with it."""
    return {
        "id": record.name,
        "object": "voice",
        "built_in": False,
        "dialect": None,
        "models": list(models),
        "ref_text": record.transcript,
        "clip_seconds": round(record.clip_seconds, 3),
        "created_at": int(record.created_at),
    }
