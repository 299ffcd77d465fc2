"""What deployments with an engine have in common: how they answer Serve, the ingress and operators."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from deployments.engine_metrics import Table, start_publishing
from deployments.engine_process import EngineProcess
from deployments.engines import EngineLike, EngineSettings
from deployments.exported import RaySink
from deployments.leases import Leases
from deployments.logs import send_logs_to_stderr
from deployments.stream_load import StreamLoad
from qwen3tts_core.engine.outbox import AsyncOutbox, Outbox
from qwen3tts_core.errors import StreamCancelled

Engine = TypeVar("Engine", bound=EngineLike)


class Replica:
    """One that answers for its load and its health."""

    _load: StreamLoad

    def check_health(self) -> None:
        """Called by Serve: raises EngineFault when the engine is dead or stuck."""
        raise NotImplementedError

    async def ready(self, stay_s: float = 0.0) -> bool:
        """Called by the ingress, which hears of a death by the call that is here; raises as `check_health` does."""
        await asyncio.sleep(stay_s)
        self.check_health()
        return True

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for the policy in `autoscaling.py`."""
        return self._load.stats()


class EngineReplica(Replica, Generic[Engine]):
    """One that forwards an engine's streams, each for as long as somebody waits for it. Ready when its constructor
    returns."""

    def __init__(
        self,
        settings: EngineSettings,
        open_engine: Callable[[Outbox[bytes]], Engine],
        table: Table,
        *,
        num_slots: int,
    ) -> None:
        """num_slots: streams that the engine makes at once. table: how its stats are exported."""
        send_logs_to_stderr()
        self._outbox: AsyncOutbox[bytes] = AsyncOutbox(asyncio.get_running_loop())
        self._load = StreamLoad(num_slots, settings.seconds_per_frame)
        self._engine = open_engine(self._outbox)
        self._leases = Leases(settings.lease_s, self._end)
        self._engine.start()
        start_publishing(self._engine.stats, table, RaySink())

    def _free(self, request_id: str) -> None:
        """Have the engine give back what it holds for a stream. Unknown ids are fine."""
        raise NotImplementedError

    async def roll_call(self, wanted: Sequence[str], given_up: Sequence[str]) -> None:
        """Called by ingresses: streams that they wait for, and streams that they don't any more."""
        self._leases.renew(wanted)
        self._leases.give_up(given_up)

    def _end(self, request_id: str) -> None:
        """Free a stream without its reader's help, and tell the reader, should there be one."""
        self._free(request_id)
        self._outbox.put(request_id, StreamCancelled())
        self._outbox.flush()

    def check_health(self) -> None:
        self._engine.check_health()

    async def stats(self) -> dict[str, Any]:
        """Counts of the engine, with the ids of the processes: for tests and operators."""
        engine, engine_pid = self._engine, os.getpid()
        if isinstance(engine, EngineProcess):
            await engine.refresh()
            engine_pid = engine.pid
        own = {"pid": os.getpid(), "engine_pid": engine_pid, "reaped": self._leases.num_reaped}
        return {**own, **dataclasses.asdict(self._engine.stats())}

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)  # absent when opening it failed
        if engine is not None:
            engine.stop()
