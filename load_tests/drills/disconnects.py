"""Clients that leave at any point, over every transport; what they held comes back, and who stays hears nothing of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from load_tests.drills.listening import SPEECH, body, compare_lengths, listen, references
from load_tests.drills.report import DrillResult, drilling, say
from load_tests.drills.server import App
from load_tests.drills.sockets import RawClient, request_bytes

_AT_ONCE = 12
_NUM_FRAMES = 50
_LONGEST_STAY_S = 0.4
_PATIENCE_S = 60.0  # for the parts it stays for
_STAYING = body(1, 100)

Way = Callable[[App, random.Random], Awaitable[str]]
"""Comes, asks for speech, and leaves at a random point; returns which."""


def ways() -> dict[str, Way]:
    """One of each transport."""
    speech = body(1, _NUM_FRAMES)
    item = {"input": "Hello there.", "max_new_tokens": _NUM_FRAMES}
    return {
        "raw": partial(_leave_http, SPEECH, speech),
        "sse": partial(_leave_http, SPEECH, {**speech, "stream_format": "sse"}),
        "whole": partial(_leave_http, SPEECH, {**speech, "stream": False}),
        "batch": partial(_leave_http, f"{SPEECH}/batch", {"items": [item, item]}),
        "websocket": _leave_websocket,
    }


async def disconnects(app: App, *, count: int, seed: int = 0) -> DrillResult:
    """count: how many leave."""
    with drilling("disconnects") as result:
        draw, left_at = random.Random(seed), Counter[str]()
        is_over = asyncio.Event()
        async with app.client() as client:
            (whole,) = await references(client, [_STAYING])
            staying = asyncio.create_task(_stay(client, len(whole.pcm), is_over, result))
            gate, each = asyncio.Semaphore(_AT_ONCE), list(ways().values())

            async def one(number: int) -> None:
                async with gate:
                    left_at[await each[number % len(each)](app, random.Random(draw.random()))] += 1
                if left_at.total() % 100 == 0:
                    say(f"disconnects: {left_at.total()} of {count} have left")

            await asyncio.gather(*(one(number) for number in range(count)))
            is_over.set()
            num_stayed = await staying
        result.requests = count + num_stayed
        result.leaks(await app.held_at_rest())
        result.notes = {"left": count, **dict(sorted(left_at.items())), "stayed": num_stayed}
    return result


async def _leave_http(path: str, content: dict[str, Any], app: App, draw: random.Random) -> str:
    request = request_bytes(app.url, path, content)
    stay_s = draw.uniform(0, _LONGEST_STAY_S)
    point = draw.choice(("in its request", "waiting", "listening", "listening"))
    async with RawClient(app.url) as client:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                if point == "in its request":
                    await client.send(request[: draw.randrange(1, len(request))])
                else:
                    await client.send(request)
                if point == "listening":
                    for _ in range(draw.randrange(1, 4)):
                        if not await client.receive():
                            break
                await asyncio.sleep(stay_s)
        except TimeoutError:
            point += " in vain"
        if draw.random() < 0.5:
            client.reset()
    return point


async def _leave_websocket(app: App, draw: random.Random) -> str:
    messages = [
        {"type": "session.config", "seed": 1, "response_format": "pcm", "stream_audio": True},
        {"type": "input.text", "text": "Hello there. "},
        {"type": "input.done"},
    ]
    url = f"{app.url.replace('http', 'ws', 1)}{SPEECH}/stream"
    point = draw.choice(("in its request", "waiting", "listening", "listening"))
    try:
        async with asyncio.timeout(_PATIENCE_S), connect(url) as socket:
            for message in messages[: draw.randrange(3)] if point == "in its request" else messages:
                await socket.send(json.dumps(message))
            if point == "listening":
                for _ in range(draw.randrange(1, 5)):
                    await socket.recv()
            await asyncio.sleep(draw.uniform(0, _LONGEST_STAY_S))
            socket.transport.abort()  # no closing handshake: the client is gone
    except TimeoutError:
        point += " in vain"
    except WebSocketException:  # the server was first: full, or done
        pass
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
