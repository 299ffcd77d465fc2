"""The client against a server that does what servers do, and what they should not."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from load_tests.adapters import BYTES_PER_FRAME, SpeechJob
from load_tests.client import Leave, SpeechClient, Target, read_server_timing
from load_tests.playback import seconds_of
from tests.fakes import until

JOB = SpeechJob(4, "Hello.", max_frames=3)
FRAME = b"\x00\x20" * (BYTES_PER_FRAME // 2)


async def speak(request):
    assert (await request.json())["input"] == JOB.text
    response = web.StreamResponse(headers={"Server-Timing": "prepared;dur=1.5, first_audio;dur=20.0"})
    await response.prepare(request)
    for _ in range(3):
        await response.write(FRAME)
        await asyncio.sleep(0.01)
    return response


async def cut(request):
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(FRAME)
    await asyncio.sleep(0.01)
    request.transport.abort()
    return response


async def say_no_end(_):
    return web.Response(body=b'data: {"type": "speech.audio.delta", "audio": "AAAA"}\n\n')


async def refuse(_):
    return web.json_response({"error": {"code": "overloaded"}}, status=503, headers={"Retry-After": "1"})


async def say_nothing(_):
    return web.Response(body=b"")


async def never(_):
    await asyncio.sleep(60)


@asynccontextmanager
async def served(handler, **options):
    app = web.Application()
    app.router.add_post("/v1/audio/speech", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        async with SpeechClient(Target(f"http://127.0.0.1:{port}", **options)) as client:
            yield client
    finally:
        await runner.cleanup()


async def test_a_whole_answer_has_its_bytes_and_its_times_in_order():
    keep = bytearray()
    async with served(speak) as client:
        record = await client.speak(JOB, keep=keep)
    assert (record.outcome, record.status, record.error) == ("ok", 200, None)
    assert bytes(keep) == 3 * FRAME
    assert record.audio_s == pytest.approx(0.24)
    assert 0 < record.ttfa_s <= record.audible_s < record.total_s
    assert [num_bytes for _, num_bytes in record.arrivals][-1] == len(keep)
    assert record.arrivals == sorted(record.arrivals)
    assert record.server_s == {"prepared": 0.0015, "first_audio": 0.02}


async def test_what_has_come_is_read_and_no_block_is_waited_for():
    """known_faults row 48: the server goes on only when its last frame was read, so TTFA is that of the first."""
    keep, written_at = bytearray(), []

    async def trickle(request):
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(3):
            written_at.append(time.perf_counter())
            await response.write(FRAME)
            await until(lambda so_far=number + 1: len(keep) == so_far * BYTES_PER_FRAME, timeout_s=20)
        return response

    async with served(trickle) as client:
        record = await client.speak(JOB, keep=keep)
    assert (record.outcome, record.num_bytes) == ("ok", 3 * BYTES_PER_FRAME)
    assert written_at[0] < record.sent_at + record.ttfa_s < written_at[1]


async def test_a_stream_that_is_cut_is_a_failure():
    async with served(cut) as client:
        record = await client.speak(JOB)
    assert record.outcome == "failed"
    assert record.error
    assert record.num_bytes == BYTES_PER_FRAME


async def test_events_that_lack_their_end_are_a_failure():
    async with served(say_no_end, events=True) as client:
        record = await client.speak(JOB)
    assert record.outcome == "failed"
    assert "speech.audio.done" in record.error


async def test_a_503_is_a_refusal_with_its_retry_after():
    async with served(refuse) as client:
        record = await client.speak(JOB)
    assert (record.outcome, record.status, record.retry_after) == ("refused", 503, "1")
    assert "overloaded" in record.error


async def test_an_empty_answer_is_a_failure():
    async with served(say_nothing) as client:
        record = await client.speak(JOB)
    assert (record.outcome, record.error) == ("failed", "no audio")


async def test_a_server_that_never_answers_is_a_failure_in_the_end():
    async with served(never, timeout_s=0.2) as client:
        record = await client.speak(JOB)
    assert record.outcome == "failed"
    assert "0.2 s" in record.error


async def test_nobody_there_is_a_failure():
    async with SpeechClient(Target("http://127.0.0.1:1")) as client:
        record = await client.speak(JOB)
    assert record.outcome == "failed"
    assert record.error


@pytest.mark.parametrize(("handler", "leave"), [(never, Leave(after_s=0.05)), (speak, Leave(after_reads=1))])
async def test_a_client_that_leaves_has_left(handler, leave):
    async with served(handler) as client:
        record = await client.speak(JOB, leave)
    assert record.outcome == "left"
    assert record.num_bytes < 3 * BYTES_PER_FRAME


async def test_a_record_for_a_file_counts_from_the_pass():
    async with served(speak) as client:
        record = await client.speak(JOB)
    written = record.as_json(record.sent_at - 2)
    assert written["sent_s"] == pytest.approx(2)
    assert written["audio_s"] == pytest.approx(seconds_of(3 * BYTES_PER_FRAME))


def test_server_timings_are_read_in_seconds():
    assert read_server_timing('a;dur=2, b;dur=3.5;desc="x", c') == {"a": 0.002, "b": 0.0035}
    assert read_server_timing("") == {}
