"""Bodies that come in another form, slowly, or never."""

import asyncio

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from deployments.bodies import BodyReader
from deployments.http_errors import describe


def request_of(messages, **headers):
    """messages: what `receive` gives, one after the other; a number waits, and after the last nothing comes."""
    waiting = list(messages)

    async def receive():
        while waiting:
            message = waiting.pop(0)
            if not isinstance(message, float):
                return message
            await asyncio.sleep(message)
        return await asyncio.Future()

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive)


def part(body, more=True):
    return {"type": "http.request", "body": body, "more_body": more}


async def read(reader, request, max_bytes=1_000):
    async with reader.hold(request, max_bytes) as parts:
        return b"".join([part async for part in parts])


async def test_a_body_in_parts_comes_whole():
    request = request_of([part(b"a"), 0.01, part(b"b"), part(b"c", more=False)])
    assert await read(BodyReader(), request) == b"abc"


@pytest.mark.parametrize(
    "messages", [[], [part(b"a")], [message for _ in range(60) for message in (part(b"a"), 0.01)]]
)
async def test_a_body_that_does_not_come_is_given_up(own_time, messages):
    reader = BodyReader(silence_s=0.05, total_s=0.3)
    async with asyncio.timeout(2):
        with pytest.raises(HTTPException) as caught:
            await read(reader, request_of(messages))
    assert caught.value.status_code == 408
    assert describe(caught.value).headers == {"Connection": "close"}
    assert describe(caught.value).error["code"] == "body_timeout"


async def test_a_client_that_leaves_is_no_timeout():
    with pytest.raises(ClientDisconnect):
        await read(BodyReader(), request_of([part(b"a"), {"type": "http.disconnect"}]))


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "utf-8"])
async def test_an_encoded_body_is_refused(encoding):
    with pytest.raises(HTTPException) as caught:
        await read(BodyReader(), request_of([part(b"a", more=False)], content_encoding=encoding))
    assert caught.value.status_code == 415


@pytest.mark.parametrize("encoding", ["identity", "", "Identity"])
async def test_identity_is_no_encoding(encoding):
    assert await read(BodyReader(), request_of([part(b"a", more=False)], content_encoding=encoding)) == b"a"
