"""Where our log lines go: one handler, set by each replica as it starts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from ray._common.formatters import JSONFormatter

_OURS = ("deployments", "qwen3tts_core")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def send_logs_to_stderr() -> None:
    """INFO and above of our packages to stderr, which Ray keeps per replica and shows the driver.

    Serve configures only its own logger. Under RAY_SERVE_THROUGHPUT_OPTIMIZED it also takes over
    `sys.stderr`, and lines wait in its buffer of a thousand; `sys.__stderr__` is still the real one.
    Where Serve's `logging_config` says `encoding: JSON`, ours are such objects too, with the request's id.
    """
    formatter, filters = _serves_own_json() or (logging.Formatter(_FORMAT), ())
    for name in _OURS:
        logger = logging.getLogger(name)
        if logger.handlers:
            continue
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(formatter)
        for each in filters:
            handler.addFilter(each)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _serves_own_json() -> tuple[logging.Formatter, Sequence[Any]] | None:
    """How Serve writes its own lines of this replica: the formatter, and filters that add who and which request."""
    for handler in logging.getLogger("ray.serve").handlers:
        file_handler = getattr(handler, "target", None)  # behind a buffer
        if isinstance(formatter := getattr(file_handler, "formatter", None), JSONFormatter):
            return formatter, handler.filters
    return None
