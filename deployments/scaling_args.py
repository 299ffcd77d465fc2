"""What may be written under `autoscaling:`, and the `autoscaling_config` that Serve gets for it.

No `from __future__ import annotations` here, as in `app_args.py`.
"""

from typing import Annotated, Any

from pydantic import Field, model_validator

from deployments.strict_args import StrictArgs

POLICY = "deployments.autoscaling:FreeSlotsPolicy"

_Seconds = Annotated[float, Field(ge=0, le=86_400)]
_Share = Annotated[float, Field(gt=0, le=1)]


class ScalingArgs(StrictArgs):
    """How one deployment grows and shrinks with its load; what is absent here is as Serve has it.

    min_replicas: 0 lets it sleep; a request that comes then wakes it, and waits.
    max_use, min_use: shares of the slots in use. Above the first it grows; it shrinks when, afterwards, it
        would still be below the second.
    min_slack_s: a replica takes no more streams while a quarter of its streams have their audio later than
        this before it must be heard.
    upscale_delay_s, downscale_delay_s: how long a load must last. downscale_to_zero_delay_s: from one to none.
    look_back_period_s: what is reported is averaged over it.
    """

    max_replicas: Annotated[int, Field(ge=1, le=10_000)]
    min_replicas: Annotated[int, Field(ge=0)] = 1
    initial_replicas: Annotated[int, Field(ge=0)] | None = None
    max_use: _Share = 0.8
    min_use: _Share = 0.5
    min_slack_s: Annotated[float, Field(ge=-10, le=10)] = 0.0
    upscale_delay_s: _Seconds = 5.0
    downscale_delay_s: _Seconds = 120.0
    downscale_to_zero_delay_s: _Seconds = 300.0
    look_back_period_s: Annotated[float, Field(gt=0, le=3_600)] = 15.0

    @model_validator(mode="after")
    def _check_order(self) -> "ScalingArgs":
        first = self.min_replicas if self.initial_replicas is None else self.initial_replicas
        if not self.min_replicas <= first <= self.max_replicas:
            raise ValueError(
                "min_replicas <= initial_replicas <= max_replicas is needed, got "
                f"{self.min_replicas}, {first}, {self.max_replicas}"
            )
        if self.min_use >= self.max_use:
            raise ValueError(
                f"min_use must be below max_use, or it would grow and shrink in turns; got {self.min_use} "
                f"and {self.max_use}"
            )
        return self

    @property
    def may_sleep(self) -> bool:
        return self.min_replicas == 0

    @property
    def autoscaling_config(self) -> dict[str, Any]:
        """As Serve takes it."""
        limits = {"max_use": self.max_use, "min_use": self.min_use, "min_slack_s": self.min_slack_s}
        return {
            "min_replicas": self.min_replicas,
            "max_replicas": self.max_replicas,
            "initial_replicas": self.initial_replicas,
            "upscale_delay_s": self.upscale_delay_s,
            "downscale_delay_s": self.downscale_delay_s,
            "downscale_to_zero_delay_s": self.downscale_to_zero_delay_s,
            "look_back_period_s": self.look_back_period_s,
            "policy": {"policy_function": POLICY, "policy_kwargs": limits},
        }


class AutoscalingArgs(StrictArgs):
    """Each deployment by itself; one that is absent has one replica, or what `deployments:` says."""

    talker: ScalingArgs | None = None
    codec: ScalingArgs | None = None
    reference_encoder: ScalingArgs | None = None
