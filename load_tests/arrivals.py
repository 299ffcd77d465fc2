"""When requests are sent in an open loop: a Poisson process, whatever the server does with them."""

from __future__ import annotations

import random


def poisson_arrivals(rate_per_s: float, duration_s: float, seed: int) -> list[float]:
    """Rising times in [0, duration_s), seconds; exponential gaps. The same seed gives the same times.

    Source: sglang-omni's latency measurements and `vllm bench serve --request-rate` (burstiness 1).
    """
    if rate_per_s <= 0 or duration_s <= 0:
        raise ValueError(f"rate and duration must be above 0, got {rate_per_s} and {duration_s}")
    generator = random.Random(seed)
    times = []
    now = generator.expovariate(rate_per_s)
    while now < duration_s:
        times.append(now)
        now += generator.expovariate(rate_per_s)
    return times
