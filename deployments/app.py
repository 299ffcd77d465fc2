"""Builder args to a Serve application: the only file that binds the graph.

    Ingress ──decode──> Codec ──generate──> Talker
       └───────────ready───────────────────────┘

No `from __future__ import annotations` here: Serve validates the YAML's args only if the builder's
annotation is a real class, and would pass an unchecked dict otherwise.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator
from ray import serve
from ray.serve import Application

from deployments.codec import Codec, CodecSettings
from deployments.handles import Transport
from deployments.ingress import Ingress, IngressSettings
from deployments.talker import Talker, TalkerSettings
from qwen3tts_core.config import CodecEngineConfig, TalkerEngineConfig
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp

_ROOT = Path(__file__).parents[1]
_SPARE_CALLS = 16
"""Calls beside the requests that must always get through: readiness, stats, refusals on their way out."""
_INGRESS_CALLS = 10_000
"""More than anyone sends: the ingress takes every request, so that every refusal is an error object of ours."""

Dtype = Literal["auto", "float32", "bfloat16"]


class TransportArgs(BaseModel):
    """How the items of each link travel."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    talker_to_codec: Transport = "object_ref"
    codec_to_ingress: Transport = "value"


class AppArgs(BaseModel):
    """Args of `build_app`, from `args:` of a Serve config. Unknown keys are refused, nested ones too.

    checkpoint: a folder, relative to where Serve runs or to the project; a short name; or a hub id.
    model_name: what clients call it; default: the hub id, or a folder's last part.
    device: "auto", "cpu", or "cuda[:index]". dtypes: "auto" lets the engine choose for its device.
    codec.num_rows: by default as many as a talker admits, so that no admitted request lacks a row.
    deterministic: the same bytes whatever else runs, at a cost (README, "Configuration").
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    checkpoint: str
    model_name: str = ""
    device: str = "auto"
    talker_dtype: Dtype = "auto"
    codec_dtype: Dtype = "auto"
    chunk_ramp: ChunkRamp = ChunkRamp()
    talker: TalkerEngineConfig = TalkerEngineConfig()
    codec: CodecEngineConfig = CodecEngineConfig()
    transport: TransportArgs = TransportArgs()
    deterministic: bool = False

    @model_validator(mode="before")
    @classmethod
    def _size_the_codec(cls, data: Any) -> Any:
        """Fill in `codec.num_rows` where the args leave it out."""
        if not isinstance(data, dict) or not isinstance(codec := data.get("codec", {}), dict):
            return data
        try:
            talker = TypeAdapter(TalkerEngineConfig).validate_python(data.get("talker", {}))
        except ValidationError:
            return data  # the talker's own validation says what is wrong
        return {**data, "codec": {"num_rows": talker.num_slots + talker.max_queued, **codec}}

    @property
    def talker_engine(self) -> TalkerEngineConfig:
        return dataclasses.replace(self.talker, deterministic=True) if self.deterministic else self.talker

    @property
    def codec_engine(self) -> CodecEngineConfig:
        return dataclasses.replace(self.codec, deterministic=True) if self.deterministic else self.codec

    @property
    def checkpoint_path(self) -> str:
        """A folder made absolute, since replicas may run elsewhere than `serve run`; else as given."""
        for base in (Path.cwd(), _ROOT):
            folder = base / Path(self.checkpoint).expanduser()
            if (folder / "config.json").is_file():
                return str(folder.resolve())
        return self.checkpoint

    @property
    def served_name(self) -> str:
        """What clients call the model: as configured, a folder's last part, or the hub id."""
        path = Path(self.checkpoint_path)
        return self.model_name or (path.name if path.is_absolute() else self.checkpoint)


def build_app(args: AppArgs) -> Application:
    """Bind the graph. The Talker comes first: Serve deploys in the order of dependencies, and on nodes
    of several GPUs the smaller fractions, placed first, can leave no GPU with room for a Talker."""
    checkpoint = args.checkpoint_path
    admitted = args.talker.num_slots + args.talker.max_queued
    talker = _deploy(Talker, admitted).bind(
        TalkerSettings(checkpoint, args.talker_engine, args.chunk_ramp, args.device, args.talker_dtype)
    )
    codec = _deploy(Codec, args.codec.num_rows).bind(
        CodecSettings(checkpoint, args.codec_engine, args.device, args.codec_dtype),
        talker,
        args.transport.talker_to_codec,
    )
    return _deploy(serve.ingress()(Ingress), _INGRESS_CALLS).bind(
        IngressSettings(checkpoint, args.served_name, args.talker.max_positions),
        codec,
        talker,
        args.transport.codec_to_ingress,
    )


def _deploy(cls: type, num_requests: int) -> Any:
    """Admission is the engine's, so Serve lets through what the engine can hold, and refusals besides."""
    return serve.deployment(cls).options(
        name=cls.__name__,
        max_ongoing_requests=num_requests + _SPARE_CALLS,
        max_queued_requests=num_requests + _SPARE_CALLS,
        graceful_shutdown_timeout_s=120,
        health_check_period_s=5,
    )
