"""Where our log lines go: one handler, set by each replica as it starts."""

from __future__ import annotations

import logging
import sys

_OURS = ("deployments", "qwen3tts_core")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def send_logs_to_stderr() -> None:
    """INFO and above of our packages to stderr, which Ray keeps per replica and shows the driver.

    Serve configures only its own logger. Under RAY_SERVE_THROUGHPUT_OPTIMIZED it also takes over
    `sys.stderr`, and lines wait in its buffer of a thousand; `sys.__stderr__` is still the real one.
    """
    for name in _OURS:
        logger = logging.getLogger(name)
        if logger.handlers:
            continue
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
