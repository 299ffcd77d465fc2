"""Connections that come and then say nothing more: silent, in the midst of a header, of a body, of an answer.

They may cost a file descriptor while they are there, and nothing else; others are served as ever.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from load_tests.drills.listening import SPEECH, body, compare_lengths, listen, references
from load_tests.drills.processes import num_open_files
from load_tests.drills.report import DrillResult, drilling
from load_tests.drills.server import App, DrillServer
from load_tests.drills.sockets import RawClient, request_bytes

_BODY_SILENCE_S = 20.0  # deployments/bodies.py: then the body that doesn't come is a 408
_OTHERS = [body(seed, 40) for seed in range(3)]
_FILES_SLACK = 8  # connections between Serve's processes come and go


async def half_open(server: DrillServer, app: App, *, count: int) -> DrillResult:
    """count: of connections, a quarter of each kind."""
    with drilling("half-open") as result:
        async with app.client() as client:
            whole = await references(client, _OTHERS)
            files_before = _num_files(server)
            request = request_bytes(app.url, SPEECH, body(1, 300, input="Nobody will hear this. " * 200))
            header_end = request.index(b"\r\n\r\n") + 4
            cuts = {"silent": 0, "header": header_end // 2, "body": header_end + 10, "answer": len(request)}
            async with AsyncExitStack() as stack:
                clients: dict[str, list[RawClient]] = {kind: [] for kind in cuts}
                for number in range(count):
                    kind = list(cuts)[number % len(cuts)]
                    one = await stack.enter_async_context(RawClient(app.url, receive_buffer=4096))
                    await one.send(request[: cuts[kind]])
                    clients[kind].append(one)
                files_during = _num_files(server)
                answers = asyncio.gather(*(_answer(one) for one in clients["body"]))
                num_others = 0
                while not answers.done():
                    heard = await listen(client, _OTHERS[num_others % len(_OTHERS)])
                    result.add(compare_lengths(heard, len(whole[num_others % len(_OTHERS)].pcm)), heard)
                    num_others += 1
                    if (health := await client.get("health")).status_code != 200:
                        result.problem(f"/health said {health.status_code}")
                for status in await answers:
                    if status != "408":
                        result.fail(f"a body that stays away was answered with {status or 'nothing'}")
            held = await app.held_at_rest()
            files_after = await _files_at_rest(server, files_before)
        if files_after > files_before + _FILES_SLACK:
            result.problem(f"{files_before} files were open before, {files_after} still are")
        result.requests = count + num_others
        result.leaks(held)
        result.notes = {
            "connections": count,
            "408s": len(clients["body"]),
            "files before/during/after": f"{files_before}/{files_during}/{files_after}",
        }
    return result


async def _answer(client: RawClient) -> str:
    """Its status; empty when none came in time."""
    try:
        async with asyncio.timeout(2 * _BODY_SILENCE_S):
            line = await client.receive(64)
    except (TimeoutError, ConnectionError):
        return ""
    return line.split(b" ")[1].decode() if line.startswith(b"HTTP/1.1 ") else repr(line)


def _num_files(server: DrillServer) -> int:
    return sum(num_open_files(process.pid) for process in server.processes)


async def _files_at_rest(server: DrillServer, before: int) -> int:
    for _ in range(50):
        if (now := _num_files(server)) <= before + _FILES_SLACK:
            break
        await asyncio.sleep(0.2)
    return now
