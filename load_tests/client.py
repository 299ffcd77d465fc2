"""One streamed speech request over HTTP, with the time of every read.

TTFA starts right before the POST is written, with the body already made, and ends at the first bytes of PCM
at this socket. Reads have no fixed size: whatever has come is taken. aiohttp on uvloop: an answer of seven
chunks costs a sixth of httpx's CPU (`LOG.md`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

from load_tests.adapters import ADAPTERS, Adapter, BrokenStream, SpeechJob
from load_tests.playback import AudibleStart
from load_tests.records import SpeechRecord


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask and how. extra: fields for every body."""

    url: str
    engine: str = "ours"
    model: str | None = None
    api_key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    events: bool = False
    timeout_s: float = 300.0

    @property
    def adapter(self) -> Adapter:
        return ADAPTERS[self.engine]

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key or 'EMPTY'}"}


@dataclass(frozen=True, slots=True)
class Leave:
    """When a client goes away: so long after it has sent its request, or with so many reads of audio."""

    after_s: float | None = None
    after_reads: int | None = None


class SpeechClient:
    """Connections to one server, kept open between requests and without a limit."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._url = f"{target.url.rstrip('/')}/v1/audio/speech"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=target.timeout_s),
            headers={**target.headers, "Content-Type": "application/json"},
        )

    async def __aenter__(self) -> SpeechClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._session.close()

    async def speak(
        self, job: SpeechJob, leave: Leave | None = None, tag: str = "", keep: bytearray | None = None
    ) -> SpeechRecord:
        """One request, to its end or until `leave` says so; what goes wrong is in the record.

        keep: gets the PCM. Raises ValueError for a job that the server's dialect can't say.
        """
        target = self._target
        body = target.adapter.body(job, target.model, target.extra, target.events)
        record = SpeechRecord(job.number, time.perf_counter(), job.max_frames, tag=tag)
        try:
            async with asyncio.timeout(leave.after_s if leave else None):
                await self._exchange(body, record, leave.after_reads if leave else None, keep)
        except TimeoutError as error:  # asyncio's own, or aiohttp's for the whole request
            if leave is not None and leave.after_s is not None:
                record.outcome = "left"
            else:
                record.error = f"no end within {target.timeout_s:g} s ({type(error).__name__})"
        except (aiohttp.ClientError, BrokenStream, OSError) as error:
            record.outcome, record.error = "failed", f"{type(error).__name__}: {error}"
        record.total_s = time.perf_counter() - record.sent_at
        return record

    async def _exchange(
        self, body: bytes, record: SpeechRecord, leave_after: int | None, keep: bytearray | None
    ) -> None:
        record.sent_at = time.perf_counter()
        async with self._session.post(self._url, data=body) as response:
            record.status = response.status
            if response.status != 200:
                _note_refusal(record, response, await response.read())
                return
            record.server_s = read_server_timing(response.headers.get("Server-Timing", ""))
            reader, audible, num_bytes = self._target.adapter.reader(self._target.events), AudibleStart(), 0
            async for data in response.content.iter_any():
                at_s = time.perf_counter() - record.sent_at
                pcm = reader.feed(data)
                if not pcm:
                    continue
                num_bytes += len(pcm)
                record.arrivals.append((at_s, num_bytes))
                audible.feed(at_s, pcm)
                if keep is not None:
                    keep += pcm
                if leave_after is not None and len(record.arrivals) >= leave_after:
                    record.outcome = "left"
                    response.close()
                    return
            reader.finish()
            record.audible_s, record.num_frames = audible.at_s, reader.num_frames
            record.outcome = "ok" if num_bytes else "failed"
            record.error = None if num_bytes else "no audio"


def read_server_timing(header: str) -> dict[str, float]:
    """`prepared;dur=1.5, first_audio;dur=20` as seconds by name."""
    stages = {}
    for metric in header.split(","):
        name, _, duration = metric.strip().partition(";dur=")
        if duration:
            stages[name] = float(duration.partition(";")[0]) / 1000
    return stages


def _note_refusal(record: SpeechRecord, response: aiohttp.ClientResponse, content: bytes) -> None:
    record.outcome = "refused" if response.status == 503 else "failed"
    record.retry_after = response.headers.get("Retry-After")
    record.error = f"{response.status}: {content[:300].decode(errors='replace')}"


async def get_json(target: Target, path: str) -> Any:
    """A GET of the API. Raises aiohttp.ClientError, ValueError."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), headers=target.headers) as session,
        session.get(f"{target.url.rstrip('/')}/{path}") as response,
    ):
        response.raise_for_status()
        return json.loads(await response.read())
