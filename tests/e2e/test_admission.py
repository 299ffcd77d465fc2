"""A server that is full: who comes then is sent away at once, and who is being served doesn't notice."""

import asyncio
import time

import httpx

from tests.e2e.conftest import ANOTHER_LASTING_SEED, DEADLINE_S, LASTING_SEED
from tests.e2e.test_replica_death import audio_of_events
from tests.e2e.test_speech import assert_same_codes

SPEECH = "v1/audio/speech"
BYTES_PER_FRAME = 1920 * 2
NUM_ADMITTED = 8 + 32  # slots and queue of the config
NUM_FRAMES = 900  # so many steps that a hundred refusals fit in between, also on a busy machine
NUM_COMPARED = 300  # of them with the same request alone
LONG = {"input": "Hello there.", "seed": LASTING_SEED, "response_format": "pcm"}
OTHER = {**LONG, "seed": ANOTHER_LASTING_SEED, "stream": True, "max_new_tokens": 2100}


async def refused_in(client):
    began = time.perf_counter()
    response = await client.post(SPEECH, json={"input": "Hello there."})
    took_s = time.perf_counter() - began
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "overloaded"
    assert int(response.headers["retry-after"]) >= 1
    return took_s


async def until_full(app):
    async with asyncio.timeout(DEADLINE_S):
        while (await asyncio.to_thread(app.stats, "Talker"))["num_waiting"] < 32:  # noqa: ASYNC110 - counts of another process
            await asyncio.sleep(0.05)


async def test_a_burst_is_refused_at_once_while_streams_run_and_health_answers(app):
    """known_faults row 26, on the real thing."""
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=app.url, timeout=300, limits=limits) as client:
        body = {**LONG, "stream": True, "max_new_tokens": NUM_FRAMES, "stream_format": "sse"}
        async with client.stream("POST", SPEECH, json=body) as running:
            parts = running.aiter_raw()
            received = await anext(parts)
            waiting = [asyncio.create_task(client.post(SPEECH, json=OTHER)) for _ in range(NUM_ADMITTED - 1)]
            await until_full(app)
            took_s = []
            for _ in range(10):
                burst = [refused_in(client) for _ in range(10)]
                *refused, health = await asyncio.gather(*burst, client.get("health"))
                assert health.status_code == 200
                took_s += refused
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            async for part in parts:
                received += part
    audio, finish = audio_of_events(received)
    assert (len(audio), finish) == (NUM_FRAMES * BYTES_PER_FRAME, "length")
    took_s.sort()
    print(f"100 refusals: p50 {1000 * took_s[49]:.0f} ms, p99 {1000 * took_s[98]:.0f} ms")
    assert took_s[98] < 10.0  # a liveness bound on two shared cores; load tests have the strict one
    await asyncio.to_thread(app.wait_until_free)
    alone = app.speak(**LONG, max_new_tokens=NUM_COMPARED)
    assert_same_codes(audio[: NUM_COMPARED * BYTES_PER_FRAME], alone.content)
