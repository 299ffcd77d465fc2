"""A Ray of our own on a machine that may have much else to do."""

from __future__ import annotations

import os
from typing import Any

import ray

from load_tests.drills.processes import descendants, end_all

ON_A_BUSY_MACHINE = {
    "RAY_worker_niceness": "0",  # Ray's 15 would be the last of a machine that does something else, too
    "RAY_worker_register_timeout_seconds": "600",  # Ray gives up starting a worker after a minute
}
"""For the environment before Ray starts."""
_ATTEMPTS = 3
"""Ray gives its node 30 s to start, a number in its code. Source: ray 2.60.0, ray/_private/node.py."""


def start_ray(**options: Any) -> None:
    """`ray.init` of a Ray on this machine alone, tried again where it was too slow. options: as `ray.init` takes them.

    Raises what the last attempt did.
    """
    before = set(descendants(os.getpid()))
    for attempts_left in reversed(range(_ATTEMPTS)):
        try:
            ray.init(address="local", **options)
            return
        except Exception as error:
            ray.shutdown()
            end_all(set(descendants(os.getpid())) - before)
            if not attempts_left:
                raise
            print(f"==> Ray has not started, tried again: {error!r}", flush=True)
