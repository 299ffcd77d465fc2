"""Where our log lines go: one handler, set by each replica as it starts."""

from __future__ import annotations

import logging
import sys

_OURS = ("deployments", "qwen3tts_core")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def send_logs_to_stderr() -> None:
    """INFO and above of our packages to stderr, which Ray keeps per replica and shows the driver.

    Serve configures only its own logger; through it, lines would wait in a buffer under
    RAY_SERVE_THROUGHPUT_OPTIMIZED.
    """
    for name in _OURS:
        logger = logging.getLogger(name)
        if logger.handlers:
            continue
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
