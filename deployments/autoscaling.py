"""How many replicas a deployment should have: arithmetic on numbers, and the policy that Serve calls with them.

    a replica's record_autoscaling_stats ──(streams, queued, slots, slack_s)──> Serve's controller
      ──> FreeSlotsPolicy ──> Serve: delays, bounds ──> replicas ──> Ray's autoscaler: nodes

Serve pickles this file by value and runs it in its controller, so it imports nothing of ours. What a
replica reports is made in `stream_load.py`. Serve adds the hysteresis in time (`upscale_delay_s`,
`downscale_delay_s`) and starts a deployment that is at zero as soon as a request waits for it; the
hysteresis in load is here, and in Serve's `policy_state` a memory of how many streams were too many.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

TOO_MANY_FOR_S = 1_800.0
"""How long it is remembered that so many streams were too many for a replica: whatever slowed it may be gone."""
_TOO_MANY, _SEEN_AT = "too_many", "seen_at"
_EPSILON = 1e-9
"""8 streams of 0.8 of 10 slots are one replica's, and 1.0000000000000002 is one."""


class ReplicaLoad(NamedTuple):
    """What one replica reported, averaged over the look-back.

    streams: running. queued: waiting inside the replica. slots: streams that it can run at once.
    slack_s: how long before its playback deadline audio leaves; below zero, listeners hear gaps.
    """

    streams: float
    queued: float
    slots: float
    slack_s: float


class ScalingLimits(NamedTuple):
    """max_use, min_use: shares of the slots in use; above the first it grows, and it shrinks only if it is
    below the second afterwards, too. min_slack_s: a replica with less takes no more streams."""

    max_use: float
    min_use: float
    min_slack_s: float


def wanted_replicas(
    loads: Sequence[ReplicaLoad], num_waiting: float, target: int, limits: ScalingLimits
) -> int:
    """How many replicas this load wants, without bounds and delays.

    loads: of the replicas that have reported. num_waiting: requests that no replica has taken yet.
    target: how many there are to be as of now, those included that are still starting.
    Never fewer than the running streams need; the same load asked again with its own answer as the
    target stays there.
    """
    if not loads:  # nothing known: those that start will say
        return max(target, 1 if num_waiting > 0 else 0)
    slots = max(1.0, *(load.slots for load in loads))
    num_streams = sum(load.streams for load in loads)
    demand = num_streams + sum(load.queued for load in loads) + num_waiting
    base = max(target, len(loads))
    usable = sum(_usable_slots(load, limits) for load in loads) + (base - len(loads)) * slots
    at_least = base + _ceil((demand / limits.max_use - usable) / slots)
    at_most = base + _ceil((demand / limits.min_use - usable) / slots)
    return max(at_least, min(at_most, target), _ceil(num_streams / slots), 0)


def _usable_slots(load: ReplicaLoad, limits: ScalingLimits) -> float:
    """A replica that is late has shown how many streams it can run: those, and no more."""
    return min(load.streams, load.slots) if _is_late(load, limits) else load.slots


def _is_late(load: ReplicaLoad, limits: ScalingLimits) -> bool:
    return load.streams > 0 and load.slack_s < limits.min_slack_s


def too_many_streams(
    known: Mapping[str, float], loads: Sequence[ReplicaLoad], limits: ScalingLimits, now: float
) -> dict[str, float]:
    """The fewest streams that a replica was late with, and when that was last so; empty when it never was, or
    too long ago. known: the answer of the time before."""
    late = [max(1.0, load.streams) for load in loads if _is_late(load, limits)]
    if not known or now - known[_SEEN_AT] >= TOO_MANY_FOR_S:
        return {_TOO_MANY: min(late), _SEEN_AT: now} if late else {}
    return {_TOO_MANY: min(known[_TOO_MANY], *late), _SEEN_AT: now} if late else dict(known)


def needed_replicas(num_streams: float, too_many: Mapping[str, float]) -> int:
    """Below which it would be late again: without this, it would stop being late, shrink, and be late."""
    return math.floor(num_streams / too_many[_TOO_MANY]) + 1 if too_many and num_streams > 0 else 0


def _ceil(value: float) -> int:
    return math.ceil(value - _EPSILON)


class FreeSlotsPolicy:
    """`policy_function` of an `autoscaling_config`; its `policy_kwargs` are the fields of ScalingLimits."""

    def __init__(self, max_use: float, min_use: float, min_slack_s: float) -> None:
        self._limits = ScalingLimits(max_use, min_use, min_slack_s)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """context: ray.serve.config.AutoscalingContext. Replicas, within its bounds, and what to remember."""
        loads, target = replica_loads(context.aggregated_metrics or {}), context.target_num_replicas
        known = {
            key: context.policy_state[key] for key in (_TOO_MANY, _SEEN_AT) if key in context.policy_state
        }
        too_many = too_many_streams(known, loads, self._limits, context.current_time)
        wanted = wanted_replicas(loads, context.total_queued_requests or 0.0, target, self._limits)
        kept = min(target, needed_replicas(sum(load.streams for load in loads), too_many))
        lowest, highest = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(lowest, min(max(wanted, kept), highest)), too_many


def replica_loads(metrics: Mapping[str, Mapping[Hashable, float]]) -> list[ReplicaLoad]:
    """Of the replicas that have reported every field; one that has just started may not have."""
    columns = [metrics.get(name, {}) for name in ReplicaLoad._fields]
    reported = [replica for replica in columns[0] if all(replica in column for column in columns)]
    return [ReplicaLoad(*(column[replica] for column in columns)) for replica in reported]
