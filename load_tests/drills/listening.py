"""Clients that listen: send one speech request, keep all bytes, and say what is missing or too much."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import httpx

SPEECH = "v1/audio/speech"
SAMPLES_PER_FRAME = 1920
BYTES_PER_FRAME = 2 * SAMPLES_PER_FRAME


def body(seed: int, num_frames: int, **fields: Any) -> dict[str, Any]:
    """A request for raw PCM as it is made."""
    return {
        "input": "Hello there.",
        "seed": seed,
        "max_new_tokens": num_frames,
        "response_format": "pcm",
        "stream": True,
        **fields,
    }


@dataclass(slots=True)
class Heard:
    """status: 0 when there was no answer. pcm: what came of it, decoded from events where there were any.
    is_whole: the body ended as a complete one. error: what the client library or the last event said."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    pcm: bytes = b""
    is_whole: bool = False
    error: str = ""
    first_s: float = 0.0
    total_s: float = 0.0
    code: str = ""

    @property
    def is_refused(self) -> bool:
        """As the API promises to refuse: 503, its code, and when to come back."""
        wait_s = self.headers.get("retry-after", "")
        return self.status == 503 and self.code == "overloaded" and wait_s.isdigit() and int(wait_s) > 0

    def __str__(self) -> str:
        return f"status {self.status} {self.code} {self.error}, {len(self.pcm):,} bytes"


async def listen(
    client: httpx.AsyncClient, request: Mapping[str, Any], heard_part: Callable[[], None] = lambda: None
) -> Heard:
    """Send and hear to the end, whatever that is. heard_part: called with every part that comes."""
    heard, began = Heard(), time.perf_counter()
    received = bytearray()
    try:
        async with client.stream("POST", SPEECH, json=request) as response:
            heard.status, heard.headers = response.status_code, response.headers
            async for part in response.aiter_raw():
                if not received:
                    heard.first_s = time.perf_counter() - began
                received += part
                heard_part()
        heard.is_whole = True
    except httpx.HTTPError as error:
        heard.error = repr(error)
    heard.total_s = time.perf_counter() - began
    if heard.status != 200:
        heard.code = _error_code(bytes(received))
    elif request.get("stream_format") == "sse":
        _read_events(heard, bytes(received))
    else:
        heard.pcm = bytes(received)
    return heard


def _error_code(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["code"])
    except (ValueError, LookupError, TypeError):
        return f"not an error object: {content[:80]!r}"


def _read_events(heard: Heard, content: bytes) -> None:
    """Whole only with `done` at its end, as the API has it."""
    *blocks, rest = content.split(b"\n\n")
    events = [json.loads(block.split(b"data: ", 1)[1]) for block in blocks]
    heard.pcm = b"".join(base64.b64decode(event["audio"]) for event in events if "audio" in event)
    last = events[-1]["type"] if events else "nothing"
    if last != "speech.audio.done" or rest:
        heard.is_whole = False
        heard.error = heard.error or f"the last event is {last}"


async def references(client: httpx.AsyncClient, requests: Sequence[Mapping[str, Any]]) -> list[Heard]:
    """The same requests undisturbed, one after the other: what they should sound like. Raises RuntimeError."""
    found = []
    for request in requests:
        heard = await listen(client, request)
        if heard.status != 200 or not heard.is_whole or not heard.pcm:
            raise RuntimeError(f"no reference for seed {request['seed']}: {heard}")
        found.append(heard)
    return found


class Difference(NamedTuple):
    """In samples. repeated: what came though it should not: again, or altered."""

    lost: int
    repeated: int


def compare(heard: bytes, reference: bytes) -> Difference:
    """What was heard next to what should have been, frame by frame."""
    if reference.startswith(heard):
        return Difference((len(reference) - len(heard)) // 2, 0)
    theirs, ours = _frames(heard), _frames(reference)
    same = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
    num_same = sum(len(frame) for block in same for frame in ours[block.a : block.a + block.size])
    return Difference((len(reference) - num_same) // 2, (len(heard) - num_same) // 2)


def compare_lengths(heard: Heard, num_bytes: int) -> Difference:
    """Where only the number of samples is promised: outside the deterministic mode the last bit may differ."""
    missing = (num_bytes - len(heard.pcm)) // 2
    return Difference(max(0, missing), max(0, -missing))


def _frames(pcm: bytes) -> list[bytes]:
    return [pcm[start : start + BYTES_PER_FRAME] for start in range(0, len(pcm), BYTES_PER_FRAME)]
