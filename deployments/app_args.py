"""What may be written under `args:` of a Serve config, and what follows from it.

One checkpoint, or several under `models:`; a key that a model leaves out is taken from the level
above, and one checkpoint is short for a list of one. Knows files by name only, and nothing of Ray.

No `from __future__ import annotations` here: Serve validates the YAML's args only against real classes.
"""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    IPvAnyNetwork,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.deadline import FIRST_AUDIO_TIMEOUT_S
from deployments.engines import Home
from deployments.handles import Transport
from deployments.leases import LEASE_S, SHORTEST_LEASE_S
from deployments.read_ahead import READER_AHEAD_S
from deployments.reader_pace import READER_TIMEOUT_S
from deployments.reference_encoder import EncoderSettings
from deployments.reference_fetch import FetchPolicy
from deployments.scaling_args import AutoscalingArgs
from deployments.sleepers import COLD_START_S
from deployments.strict_args import StrictArgs
from deployments.utterance import RESUME_TIMEOUT_S
from qwen3tts_core.audio.clip import ReferenceLimits
from qwen3tts_core.audio.voice_store import DEFAULT_MAX_VOICES
from qwen3tts_core.config import CodecEngineConfig, TalkerEngineConfig, WeightDtype
from qwen3tts_core.model.checkpoint import CHECKPOINTS
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.text.sentences import LongText

_ROOT = Path(__file__).parents[1]
_FETCH = FetchPolicy()

IngressShape = Literal["separate", "codec"]
Dtype = Literal["auto", "float32", "bfloat16"]
CodecDtype = Literal["auto", "float32", "float16", "bfloat16"]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")]
Checkpoint = Annotated[str, Field(pattern=r"\S")]
VoiceName = Annotated[str, Field(min_length=1, max_length=256)]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")]


class TransportArgs(StrictArgs):
    """How the items of each link travel."""

    talker_to_codec: Transport = "object_ref"
    codec_to_ingress: Transport = "value"


class EnginesArgs(StrictArgs):
    """Where the replicas of each kind keep their engines: README, "Configuration"."""

    talker: Home = "thread"
    codec: Home = "thread"


class ModelArgs(StrictArgs):
    """One served checkpoint.

    checkpoint: a folder, relative to where Serve runs or to the project; a short name; or a hub id.
    model_name: what clients call it; default: the hub id, or a folder's last part.
    dtypes: "auto" lets the engine choose for its device.
    codec.num_rows: by default as many as its talker admits, so that no admitted request lacks a
        row. Models that share a codec add theirs up.
    deterministic: the same bytes whatever else runs, at a cost (README, "Configuration").
    autoscaling: of its talker, its codec and its reference encoder, each by itself.
    """

    checkpoint: Checkpoint
    model_name: str = ""
    talker_dtype: Dtype = "auto"
    talker_weight_dtype: WeightDtype = "auto"
    codec_dtype: CodecDtype = "auto"
    chunk_ramp: ChunkRamp = ChunkRamp()
    talker: TalkerEngineConfig = TalkerEngineConfig()
    codec: CodecEngineConfig = CodecEngineConfig()
    deterministic: bool = False
    autoscaling: AutoscalingArgs = AutoscalingArgs()

    @model_validator(mode="before")
    @classmethod
    def _size_the_codec(cls, data: Any) -> Any:
        """Fill in `codec.num_rows` where the args leave it out."""
        if not isinstance(data, dict) or not isinstance(codec := data.get("codec", {}), dict):
            return data
        if "models" in data:
            return data  # each model's own talker counts
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
    def num_admitted(self) -> int:
        """Requests its talker holds at once, waiting ones included."""
        return self.talker.num_slots + self.talker.max_queued

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

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names that the registry has for this published checkpoint; a client may use those too."""
        checkpoint = CHECKPOINTS.get(self.checkpoint, self.checkpoint).partition("@")[0]
        names: list[str] = []
        for short_name, hub_id in CHECKPOINTS.items():
            if checkpoint == hub_id or Path(checkpoint).name == hub_id.partition("/")[2]:
                names += (short_name, hub_id)
        return tuple(name for name in names if name != self.served_name)


class ReferenceArgs(StrictArgs):
    """Clips for voice clone (Base checkpoints), and where they may come from.

    limits: what a clip may be; its max_bytes bounds what is fetched and uploaded, too.
    memo_bytes: of encoded voices remembered by the encoder; absent: the core's default.
    The rest is as in `FetchPolicy`.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    limits: ReferenceLimits = ReferenceLimits()
    memo_bytes: Annotated[int, Field(ge=0)] | None = None
    connect_s: Annotated[float, Field(gt=0)] = _FETCH.connect_s
    total_s: Annotated[float, Field(gt=0)] = _FETCH.total_s
    max_redirects: Annotated[int, Field(ge=0)] = _FETCH.max_redirects
    max_concurrent: Annotated[int, Field(ge=1)] = _FETCH.max_concurrent
    allow_http: bool = _FETCH.allow_http
    allowed_networks: tuple[IPvAnyNetwork, ...] = ()
    file_roots: tuple[Path, ...] = ()

    @property
    def fetch_policy(self) -> FetchPolicy:
        return FetchPolicy(
            max_bytes=self.limits.max_bytes,
            connect_s=self.connect_s,
            total_s=self.total_s,
            max_redirects=self.max_redirects,
            max_concurrent=self.max_concurrent,
            allow_http=self.allow_http,
            allowed_networks=tuple(self.allowed_networks),
            file_roots=tuple(root.expanduser().absolute() for root in self.file_roots),
        )

    def encoder_settings(self, checkpoint: str) -> EncoderSettings:
        return EncoderSettings(checkpoint, self.limits, self.device, self.memo_bytes)


class VoicesArgs(StrictArgs):
    """Uploaded voices. folder: where they lie, relative to where Serve runs; every ingress replica must see it."""

    folder: Path = Path("~/.local/share/qwen3tts/voices")
    max_voices: Annotated[int, Field(ge=1)] = DEFAULT_MAX_VOICES

    @property
    def path(self) -> Path:
        return self.folder.expanduser().absolute()


class AppArgs(ModelArgs):
    """Args of `build_app`. Unknown keys are refused, nested ones too.

    models: the served checkpoints; a request that names none gets the first. Without it the keys of
        `ModelArgs` here describe the one model; beside it they are what its models leave out.
    ingress: "codec" lets the Codec's own replicas answer HTTP, see `codec_ingress.py`; autoscaling.codec is then of both,
        and transport.codec_to_ingress of nothing.
    device: "auto", "cpu", or "cuda[:index]", for talkers and codecs.
    api_keys_file: one key a line; requests must then bring one of them, or one of the environment's.
    allowed_origins: sites whose pages may use the API from a browser, e.g. https://app.example; "*" is every site.
    reader_timeout_s: for a client that takes nothing of its body; 0 is no limit. reader_ahead_s: of audio that waits
        for a slow one, as 24 kHz PCM; then its text isn't spoken on.
    first_audio_timeout_s: from a request's body to its first audio, queues included; 0 is no limit.
    stream_lease_s: engines free a stream that no ingress has named for so long, two seconds at least; 0 leaves it to
        its own end.
    resume_timeout_s: how long a stream whose engine died waits for another to go on; 0 cuts it at once.
    cold_start_s: how much longer a request may wait that found a deployment asleep.
    voice_aliases: other names that requests may use, each with the voice it means.
    long_text: when a text is cut into pieces, and how long it may be, in characters.
    """

    checkpoint: Checkpoint = ""
    models: tuple[ModelArgs, ...] = ()
    ingress: IngressShape = "separate"
    device: Device = "auto"
    transport: TransportArgs = TransportArgs()
    engines: EnginesArgs = EnginesArgs()
    reference: ReferenceArgs = ReferenceArgs()
    voices: VoicesArgs = VoicesArgs()
    voice_aliases: dict[VoiceName, VoiceName] = Field(default_factory=dict)
    api_keys_file: Path | None = None
    allowed_origins: tuple[Origin, ...] = ()
    first_audio_timeout_s: Annotated[float, Field(ge=0, le=86_400)] = FIRST_AUDIO_TIMEOUT_S
    reader_timeout_s: Annotated[float, Field(ge=0, le=86_400)] = READER_TIMEOUT_S
    reader_ahead_s: Annotated[float, Field(gt=0)] = READER_AHEAD_S
    stream_lease_s: Annotated[float, Field(ge=0, le=86_400)] = LEASE_S
    resume_timeout_s: Annotated[float, Field(ge=0, le=86_400)] = RESUME_TIMEOUT_S
    cold_start_s: Annotated[float, Field(ge=0, le=86_400)] = COLD_START_S
    long_text: LongText = LongText()

    @field_validator("stream_lease_s")
    @classmethod
    def _check_lease(cls, lease_s: float) -> float:
        if 0 < lease_s < SHORTEST_LEASE_S:
            raise ValueError(
                f"must be 0 or at least {SHORTEST_LEASE_S:g}: streams that are heard would be freed"
            )
        return lease_s

    @field_validator("voice_aliases")
    @classmethod
    def _check_aliases(cls, aliases: dict[str, str]) -> dict[str, str]:
        counts = Counter(alias.lower() for alias in aliases)
        if twice := [alias for alias, count in counts.items() if count > 1]:
            raise ValueError(f"upper and lower case are one name; twice: {', '.join(twice)}")
        return aliases

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_models(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("models"), list | tuple):
            return data
        if misplaced := [key for key in ("checkpoint", "model_name") if key in data]:
            raise ValueError(f"{' and '.join(misplaced)} can't stand beside models, only in one of them")
        shared = {key: value for key, value in data.items() if key in ModelArgs.model_fields}
        filled = [{**shared, **model} if isinstance(model, dict) else model for model in data["models"]]
        return {**data, "models": filled}

    @model_validator(mode="after")
    def _check_models(self) -> "AppArgs":
        if not self.models and not self.checkpoint:
            raise ValueError("nothing to serve: give checkpoint, or models with one checkpoint each")
        counts = Counter(model.served_name for model in self.served)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"models need names of their own, give model_name; twice: {', '.join(twice)}")
        return self

    @model_validator(mode="after")
    def _check_who_sleeps(self) -> "AppArgs":
        scalings = [model.autoscaling.codec for model in self.served]
        if self.ingress == "codec" and any(own is not None and own.may_sleep for own in scalings):
            raise ValueError(
                "autoscaling.codec.min_replicas must be at least 1 with ingress: codec, got 0: who answers HTTP can't sleep"
            )
        return self

    @property
    def served(self) -> tuple[ModelArgs, ...]:
        """Every model, the default one first."""
        return self.models or (ModelArgs(**{name: getattr(self, name) for name in ModelArgs.model_fields}),)
