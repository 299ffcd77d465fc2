"""The one thread that an engine lives on: how it ends."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger(__name__)

STOP_WITHIN_S = 10.0
"""A turn of an engine's loop takes milliseconds; the longest a second on a slow CPU."""


def join_or_leave(thread: threading.Thread) -> None:
    """Wait for a loop that was told to end. One that hangs, in a call to a GPU that doesn't answer, say, is left
    behind, being a daemon: whoever waited for it could never end either, and would keep the GPU's memory."""
    thread.join(STOP_WITHIN_S)
    if thread.is_alive():
        logger.error("%s didn't end within %g s and is left behind", thread.name, STOP_WITHIN_S)
