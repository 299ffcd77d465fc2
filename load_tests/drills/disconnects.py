"""Clients that leave at any point, over every transport; what they held comes back, and who stays hears nothing of it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import httpx

from load_tests.drills.listening import SPEECH, body, compare_lengths, listen, references
from load_tests.drills.report import DrillResult, drilling, say
from load_tests.drills.server import App
from load_tests.drills.sockets import RawClient, request_bytes

_AT_ONCE = 12
_NUM_FRAMES = 50
_LONGEST_STAY_S = 0.4
_STAYING = body(1, 100)


def _transports() -> dict[str, tuple[str, dict[str, Any]]]:
    """Path and body of each way to ask for speech."""
    speech = body(1, _NUM_FRAMES)
    item = {"input": "Hello there.", "max_new_tokens": _NUM_FRAMES}
    return {
        "raw": (SPEECH, speech),
        "sse": (SPEECH, {**speech, "stream_format": "sse"}),
        "whole": (SPEECH, {**speech, "stream": False}),
        "batch": (f"{SPEECH}/batch", {"items": [item, item]}),
    }


async def disconnects(app: App, *, count: int, seed: int = 0) -> DrillResult:
    """count: how many leave."""
    with drilling("disconnects") as result:
        draw, left_at = random.Random(seed), Counter[str]()
        is_over = asyncio.Event()
        async with app.client() as client:
            (whole,) = await references(client, [_STAYING])
            staying = asyncio.create_task(_stay(client, len(whole.pcm), is_over, result))
            gate = asyncio.Semaphore(_AT_ONCE)
            transports = _transports()

            async def one(number: int) -> None:
                name = list(transports)[number % len(transports)]
                async with gate:
                    left_at[await _come_and_leave(app, *transports[name], random.Random(draw.random()))] += 1
                if left_at.total() % 100 == 0:
                    say(f"disconnects: {left_at.total()} of {count} have left")

            await asyncio.gather(*(one(number) for number in range(count)))
            is_over.set()
            num_stayed = await staying
        result.requests = count + num_stayed
        result.leaks(await app.held_at_rest())
        result.notes = {"left": count, **dict(sorted(left_at.items())), "stayed": num_stayed}
    return result


async def _come_and_leave(app: App, path: str, content: dict[str, Any], draw: random.Random) -> str:
    """Where it left."""
    request = request_bytes(app.url, path, content)
    stay_s = draw.uniform(0, _LONGEST_STAY_S)
    point = draw.choice(("in its request", "waiting", "listening", "listening"))
    async with RawClient(app.url) as client:
        try:
            async with asyncio.timeout(30):
                if point == "in its request":
                    await client.send(request[: draw.randrange(1, len(request))])
                    await asyncio.sleep(stay_s / 3)
                else:
                    await client.send(request)
                if point == "listening":
                    for _ in range(draw.randrange(1, 4)):
                        if not await client.receive():
                            break
                if point != "in its request":
                    await asyncio.sleep(stay_s)
        except TimeoutError:
            point += " in vain"
        if draw.random() < 0.5:
            client.reset()
    return point


async def _stay(
    client: httpx.AsyncClient, num_bytes: int, is_over: asyncio.Event, result: DrillResult
) -> int:
    """Listen again and again, to the end, while others leave; how often that was asked for."""
    count = 0
    while not is_over.is_set():
        count += 1
        heard = await listen(client, _STAYING)
        if heard.is_refused:
            await asyncio.sleep(0.2)
        else:
            result.add(compare_lengths(heard, num_bytes), heard)
    return count
