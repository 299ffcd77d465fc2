"""Builder args to a Serve application: the only file that binds the graph.

    Ingress ──decode──> Codec ──generate──> Talker, one for each model
       ├──encode───> ReferenceEncoder, for Base checkpoints
       └──ready────> all of them

With `ingress: codec` the first two are one deployment, called as the Codec is (`codec_ingress.py`).

No `from __future__ import annotations` here: Serve validates the YAML's args only if the builder's
annotation is a real class, and would pass an unchecked dict otherwise.
"""

import os
from collections.abc import Sequence
from typing import Any

from ray import serve
from ray.serve import Application

from deployments.api_keys import read_key_hashes
from deployments.app_args import AppArgs, TransportArgs
from deployments.codec import Codec
from deployments.codec_ingress import CodecIngress
from deployments.engines import CodecSettings, TalkerSettings
from deployments.ingress import Ingress, IngressModel, IngressSettings
from deployments.leases import LEASE_S
from deployments.plan import PlannedModel, plan_app, shared_codec_engine
from deployments.reference_encoder import ReferenceEncoder
from deployments.scaling_args import ScalingArgs
from deployments.talker import Talker

__all__ = ["AppArgs", "TransportArgs", "build_app"]

API_KEYS_VARIABLE = "QWEN3TTS_API_KEYS"
"""Keys separated by commas, beside those of `api_keys_file`, in the environment that starts Ray."""
_SPARE_CALLS = 16
"""Calls beside the requests that must always get through: readiness, stats, refusals on their way out."""
_INGRESS_CALLS = 10_000
"""More than anyone sends: the ingress takes every request, so that every refusal is an error object of ours."""


def build_app(args: AppArgs) -> Application:
    """Bind the graph. Talkers come first: Serve deploys in the order in which the ingress holds them, and on
    nodes of several GPUs the smaller fractions, placed first, can leave no GPU with room for a Talker."""
    models = plan_app(args)
    talkers = {model.talker: _bind_talker(model, args) for model in models}
    encoders = {
        name: _bind_encoder(name, [model for model in models if model.encoder == name], args)
        for name in dict.fromkeys(model.encoder for model in models)
        if name is not None
    }
    if args.ingress == "codec":
        return _bind_codec_ingress(models, {**talkers, **encoders}, args)
    codecs = {
        name: _bind_codec(name, [model for model in models if model.codec == name], talkers, args)
        for name in dict.fromkeys(model.codec for model in models)
    }
    return _deploy(serve.ingress()(Ingress), "Ingress", _INGRESS_CALLS).bind(
        _ingress_settings(models, args),
        {**talkers, **codecs, **encoders},
        args.transport.codec_to_ingress,
    )


def _bind_talker(model: PlannedModel, args: AppArgs) -> Application:
    own = model.args
    settings = TalkerSettings(
        checkpoint=own.checkpoint_path,
        device=args.device,
        dtype=own.talker_dtype,
        seconds_per_frame=model.seconds_per_frame,
        lease_s=args.stream_lease_s,
        home=args.engines.talker,
        engine=own.talker_engine,
        ramp=own.chunk_ramp,
        weight_dtype=own.talker_weight_dtype,
    )
    return _deploy(Talker, model.talker, own.num_admitted, own.autoscaling.talker).bind(settings)


def _bind_codec(
    name: str, models: Sequence[PlannedModel], talkers: dict[str, Application], args: AppArgs
) -> Application:
    settings = _codec_settings(models, args)
    return _deploy(Codec, name, settings.engine.num_rows, models[0].args.autoscaling.codec).bind(
        settings,
        {model.args.served_name: talkers[model.talker] for model in models},
        args.transport.talker_to_codec,
    )


def _bind_codec_ingress(
    models: Sequence[PlannedModel], others: dict[str, Application], args: AppArgs
) -> Application:
    """others: every other deployment, by its name. It takes every request, as the Ingress does alone."""
    name, scaling = models[0].codec, models[0].args.autoscaling.codec
    return _deploy(serve.ingress()(CodecIngress), name, _INGRESS_CALLS, scaling).bind(
        _codec_settings(models, args),
        _ingress_settings(models, args),
        others,
        args.transport.talker_to_codec,
    )


def _codec_settings(models: Sequence[PlannedModel], args: AppArgs) -> CodecSettings:
    """Of the codec that these models share."""
    first = models[0].args
    return CodecSettings(
        checkpoint=first.checkpoint_path,
        device=args.device,
        dtype=first.codec_dtype,
        seconds_per_frame=models[0].seconds_per_frame,
        lease_s=args.stream_lease_s,
        home=args.engines.codec,
        engine=shared_codec_engine([model.args for model in models]),
    )


def _bind_encoder(name: str, models: Sequence[PlannedModel], args: AppArgs) -> Application:
    num_requests = sum(model.args.num_admitted for model in models)  # each may bring a clip of its own
    first = models[0].args
    settings = args.reference.encoder_settings(first.checkpoint_path)
    return _deploy(ReferenceEncoder, name, num_requests, first.autoscaling.reference_encoder).bind(settings)


def _ingress_settings(models: Sequence[PlannedModel], args: AppArgs) -> IngressSettings:
    return IngressSettings(
        models=tuple(_ingress_model(model) for model in models),
        voices_folder=args.voices.path,
        max_voices=args.voices.max_voices,
        fetch=args.reference.fetch_policy,
        voice_aliases=args.voice_aliases,
        allowed_origins=args.allowed_origins,
        first_audio_timeout_s=args.first_audio_timeout_s,
        reader_timeout_s=args.reader_timeout_s,
        reader_ahead_s=args.reader_ahead_s,
        resume_timeout_s=args.resume_timeout_s,
        roll_call_period_s=(args.stream_lease_s or LEASE_S) / 5,
        cold_start_s=args.cold_start_s,
        api_key_hashes=_api_key_hashes(args),
        long_text=args.long_text,
    )


def _ingress_model(model: PlannedModel) -> IngressModel:
    own = model.args
    return IngressModel(
        checkpoint=own.checkpoint_path,
        model_name=own.served_name,
        max_positions=own.talker.max_positions,
        codec=model.codec,
        talker=model.talker,
        encoder=model.encoder,
        aliases=own.aliases,
        sleepers=model.sleepers,
    )


def _api_key_hashes(args: AppArgs) -> tuple[bytes, ...]:
    """Keys end here: replicas get their hashes alone. Raises ValueError, OSError."""
    file = args.api_keys_file
    return read_key_hashes(
        None if file is None else file.expanduser(), os.environ.get(API_KEYS_VARIABLE), API_KEYS_VARIABLE
    )


def _deploy(cls: type, name: str, num_requests: int, scaling: ScalingArgs | None = None) -> Any:
    """Admission is the engine's, so Serve lets through what the engine can hold, and refusals besides.
    A replica that is to go first ends its streams."""
    most_replicas = 1 if scaling is None else scaling.max_replicas
    deployment = serve.deployment(cls).options(
        name=name,
        max_ongoing_requests=num_requests + _SPARE_CALLS,
        max_queued_requests=num_requests * most_replicas + _SPARE_CALLS,  # of callers that wait for replicas
        graceful_shutdown_timeout_s=120,
        health_check_period_s=5,
    )
    return (
        deployment if scaling is None else deployment.options(autoscaling_config=scaling.autoscaling_config)
    )
