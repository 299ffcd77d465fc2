"""Ports for servers that start later."""

from __future__ import annotations

import random
import socket

_RANGE = range(20_000, 32_768)
"""Above Ray's own, and below what Linux gives to whoever asks for any port: in between nobody else gets one by chance."""


def free_port() -> int:
    """A port of loopback on which nobody listens. Raises OSError when there is none."""
    for port in random.SystemRandom().sample(_RANGE, len(_RANGE)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {_RANGE.start} to {_RANGE.stop - 1}")
