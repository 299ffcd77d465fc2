"""No room for an uploaded voice: the client is told so, nothing half-written stays, and the server goes on.

The room is taken away from the ingress alone, by the kernel's limit on the size of a file (RLIMIT_FSIZE), which
needs no rights and fills nobody's disk; a write beyond it fails as one on a full disk does, with another number.
"""

from __future__ import annotations

import io
import math
import resource
import struct
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from load_tests.drills.listening import Heard, body, listen
from load_tests.drills.report import DrillResult, drilling
from load_tests.drills.server import App

VOICES = "v1/audio/voices"
_RATE_HZ = 24_000
_MAX_FILE_BYTES = 128 << 10  # more than any of the ingress's logs, less than a clip of four seconds
_INSUFFICIENT_STORAGE = 507


async def full_disk(app: App, folder: Path, *, count: int) -> DrillResult:
    """folder: of the app's voices. count: of uploads without room, some of names that are there."""
    with drilling("full disk") as result:
        clip = _clip(seconds=4)
        async with app.client() as client:
            (await _upload(client, "ada", clip)).raise_for_status()
            before = _contents(folder)
            with _without_room(app.pids("Ingress")):
                for number in range(count):
                    answer = await _upload(client, "ada" if number % 2 else f"new{number}", clip)
                    if answer.status_code != _INSUFFICIENT_STORAGE:
                        result.fail(f"an upload without room: {answer.status_code} {answer.text[:200]}")
                spoken = [await _speak(client) for _ in range(2)]
            result.requests = count + len(spoken)
            if _contents(folder) != before:
                result.problem(f"what lies in the folder has changed: {sorted(_contents(folder) ^ before)}")
            for heard in spoken:
                if heard.status != 200 or not heard.is_whole or not heard.pcm:
                    result.fail(f"a voice that was there doesn't speak: {heard}")
            if (answer := await _upload(client, "bob", clip)).status_code != 200:
                result.problem(f"with room again: {answer.status_code} {answer.text[:200]}")
            if (health := await client.get("health")).status_code != 200:
                result.problem(f"/health said {health.status_code}")
        result.leaks(await app.held_at_rest())
        result.notes = {"507s": count - result.failed, "files before and after": len(before)}
    return result


async def _upload(client: httpx.AsyncClient, name: str, clip: bytes) -> httpx.Response:
    form: dict[str, Any] = {"audio_sample": (f"{name}.wav", clip, "audio/wav")}
    return await client.post(VOICES, data={"name": name, "ref_text": "What is said."}, files=form)


async def _speak(client: httpx.AsyncClient) -> Heard:
    return await listen(client, body(1, 20, voice="ada"))


@contextmanager
def _without_room(pids: list[int]) -> Iterator[None]:
    old = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    try:
        for pid, (_, hard) in old.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, hard))
        yield
    finally:
        for pid, limits in old.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def _contents(folder: Path) -> set[tuple[str, int]]:
    return {(path.name, path.stat().st_size) for path in folder.iterdir()}


def _clip(seconds: float) -> bytes:
    """A tone, as a WAV file."""
    samples = [
        round(8_000 * math.sin(2 * math.pi * 220 * n / _RATE_HZ)) for n in range(int(seconds * _RATE_HZ))
    ]
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(_RATE_HZ)
        writer.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return file.getvalue()
