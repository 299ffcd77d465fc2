"""Clients that read as little as they can, of texts as long as they may: what waits for them is bounded, nobody else waits.

Some read a little at a time, some nothing at all. The engines must stop to speak for the slow ones once
`reader_ahead_s` of audio wait for them, and for the others `reader_timeout_s` after they stopped reading.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx

from load_tests.drills.listening import SPEECH, Heard, body, compare_lengths, listen, references
from load_tests.drills.processes import rss_bytes
from load_tests.drills.report import DrillResult, drilling, say
from load_tests.drills.server import App, DrillServer
from load_tests.drills.sockets import RawClient, request_bytes

READER_TIMEOUT_S, READER_AHEAD_S = 60.0, 5.0
APP_ARGS = {"reader_timeout_s": READER_TIMEOUT_S, "reader_ahead_s": READER_AHEAD_S}
_OTHERS = [body(seed, 40) for seed in range(4)]
_LONG_TEXT = (
    "It was a bright cold day in April, and the clocks were striking thirteen. " * 160
)  # 11,840 characters
_NUM_FRAMES = 8_000  # eleven minutes; as events of 48 kHz audio each frame is 10 KB, which fills the kernel's buffers soon
_BOUND_BYTES = 24 << 20
"""For one reader: what the kernel holds (4 MiB), what is in Serve's queues (2), ahead (1), and the piece in hand (5),
each perhaps twice, on its way from one process to the next."""
_SLACK_BYTES = 64 << 20  # Python's allocators, and what the other streams need
_SLOW_BUFFER_BYTES, _STILL_BUFFER_BYTES = (
    1 << 16,
    1 << 12,
)  # smaller ones keep even a willing reader waiting, for
# the kernel's timers: the window that they offer is less than a segment of the loopback
_MORE_THAN_OURS = 1 << 18
_PAUSED_FOR_S = 8.0
_NOTICED_WITHIN_S = 5.0
_PAUSES_WITHIN_S = 240.0  # generous: the engines must first have made all that may wait


async def slow_readers(server: DrillServer, app: App, *, count: int, num_others: int) -> DrillResult:
    """count: of readers, half of them slow, half reading nothing. num_others: requests beside them, one by one."""
    with drilling("slow readers") as result:
        async with app.client() as client, AsyncExitStack() as stack:
            whole = await references(client, _OTHERS)
            alone = await _others(client, num_others // 2, whole, result)
            before = _memory(server)
            slow = await _connect(app, stack, count // 2, _SLOW_BUFFER_BYTES)
            still = await _connect(app, stack, count // 2, _STILL_BUFFER_BYTES)
            readers = enumerate([*slow, *still], start=100)
            await asyncio.gather(*(_begin(app, reader, seed) for seed, reader in readers))
            is_over = asyncio.Event()
            trickling = [asyncio.create_task(_trickle(reader, is_over)) for reader in slow]
            beside = await _others(client, num_others, whole, result)
            num_frames = await _frames_at_pause(app)
            grown = max(0, _memory(server) - before)
            await asyncio.sleep(READER_TIMEOUT_S + _NOTICED_WITHIN_S)
            dropped = await asyncio.gather(*(_was_dropped(reader) for reader in still))
            is_over.set()
            num_trickled = await asyncio.gather(*trickling)
        result.requests = count + len(alone) + len(beside)
        if num_frames is None:
            result.problem("the engines speak on and on for readers that don't listen")
        if grown > (bound := count * _BOUND_BYTES + _SLACK_BYTES):
            result.problem(f"memory grew by {grown >> 20} MiB, {bound >> 20} were allowed")
        if not all(dropped):
            result.problem(
                f"{dropped.count(False)} of {len(still)} readers that took nothing are still served"
            )
        if not all(num_trickled):
            result.problem("a slow reader was cut off, though it read")
        result.leaks(await app.held_at_rest())
        result.notes = {
            "readers": count,
            "dropped": sum(dropped),
            "grown MiB": round(grown / (1 << 20), 1),
            "allowed": bound >> 20,
            "others' p50 s alone/beside": f"{_median_s(alone):.2f}/{_median_s(beside):.2f}",
        }
    return result


async def _connect(app: App, stack: AsyncExitStack, count: int, receive_buffer: int) -> list[RawClient]:
    return [await stack.enter_async_context(RawClient(app.url, receive_buffer)) for _ in range(count)]


async def _begin(app: App, reader: RawClient, seed: int) -> None:
    """Ask for a very long speech, and hear its header."""
    text: Mapping[str, Any] = body(
        seed, _NUM_FRAMES, input=_LONG_TEXT, stream_format="sse", sample_rate=48_000
    )
    await reader.send(request_bytes(app.url, SPEECH, text))
    await reader.receive(256)


async def _others(
    client: httpx.AsyncClient, count: int, whole: list[Heard], result: DrillResult
) -> list[Heard]:
    """One after the other, as a client that notices when it has to wait."""
    calls: list[Heard] = []
    for number in range(count):
        heard = await listen(client, _OTHERS[number % len(_OTHERS)])
        result.add(compare_lengths(heard, len(whole[number % len(_OTHERS)].pcm)), heard)
        calls.append(heard)
    return calls


async def _trickle(reader: RawClient, is_over: asyncio.Event) -> int:
    """Bytes taken until then, 40 KB a second, less than half of what listening takes; 0 when the server closed."""
    taken = 0
    while not is_over.is_set():
        try:
            part = await reader.receive(8192)
        except ConnectionError:
            part = b""
        if not part:
            return 0
        taken += len(part)
        await asyncio.sleep(0.2)
    return taken


async def _frames_at_pause(app: App) -> int | None:
    """All frames that the Talkers have made, once they make no more; None when they go on."""
    seen, since = -1, time.monotonic()
    deadline = since + _PAUSES_WITHIN_S
    while time.monotonic() < deadline:
        num_frames: int = sum(stats["frames"] for stats in await app.stats("Talker"))
        if num_frames != seen:
            seen, since = num_frames, time.monotonic()
        elif time.monotonic() - since > _PAUSED_FOR_S:
            say(f"slow readers: {num_frames:,} frames made, and no more")
            return num_frames
        await asyncio.sleep(0.5)
    return None


async def _was_dropped(reader: RawClient) -> bool:
    """Whether its connection has been cut: then there is no more than what this side's kernel holds."""
    taken = 0
    try:
        async with asyncio.timeout(_NOTICED_WITHIN_S):
            while taken < _MORE_THAN_OURS:
                part = await reader.receive()
                if not part:
                    return True
                taken += len(part)
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return False


def _memory(server: DrillServer) -> int:
    return sum(rss_bytes(process.pid) for process in server.processes)


def _median_s(calls: list[Heard]) -> float:
    return statistics.median(heard.total_s for heard in calls) if calls else 0.0
