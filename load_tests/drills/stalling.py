"""The app of `deployments/app.py`, whose Talkers can be told to hang in a decode step, as on a GPU that stops answering.

No `from __future__ import annotations` here, for the reason given there.
"""

import time
from typing import Any
from unittest import mock

from ray.serve import Application

import deployments.app
from deployments.app_args import AppArgs
from deployments.talker import Talker

STUCK_AFTER_S = 8.0
"""Instead of a minute: for how long a turn may last before the engine is taken for stuck."""


class StallingTalker(Talker):
    async def stall(self, seconds: float) -> int:
        """If it speaks, its next decode step takes so long; all around the engine's thread goes on. Returns the streams hit."""
        from qwen3tts_core.engine import talker_engine

        talker_engine._STUCK_AFTER_S = STUCK_AFTER_S  # of this replica's process alone
        engine: Any = self._engine
        num_running: int = engine.stats().num_running
        runner, launch = engine._runner, engine._runner.launch

        def stalled(placed: Any) -> Any:
            runner.launch = launch
            time.sleep(seconds)
            return launch(placed)

        if num_running:
            runner.launch = stalled
        return num_running


def build_app(args: AppArgs) -> Application:
    with mock.patch.object(deployments.app, "Talker", StallingTalker):
        return deployments.app.build_app(args)
