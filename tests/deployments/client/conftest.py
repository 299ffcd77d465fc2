"""The API around fake engines behind a real socket, for clients that want a server."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn

from tests.deployments.conftest import GOLDEN, TINY
from tests.fakes import FakeReferenceEncoder

MODELS = {"tiny": TINY, "tiny-design": str(GOLDEN / "voice_design"), "tiny-base": str(GOLDEN / "base")}


class CancelsWhoLeaves:
    """ASGI middleware that does what Serve does, and bare uvicorn doesn't: a client that leaves a request cancels it."""

    def __init__(self, app):
        self._app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages = asyncio.Queue()
        task = asyncio.current_task()

        async def listen():
            while (message := await receive())["type"] != "http.disconnect":
                messages.put_nowait(message)
            task.cancel()

        listening = asyncio.create_task(listen())
        try:
            with suppress(asyncio.CancelledError):
                await self._app(scope, messages.get, send)
        finally:
            listening.cancel()


@pytest.fixture
def serving(open_chain):
    """A chain of some models, `tiny-base` among them, and `url`, where it listens."""

    @asynccontextmanager
    async def opened(models=MODELS, **others):
        encoders = {"tiny-base": FakeReferenceEncoder()}
        async with open_chain(models=models, encoders=encoders, **others) as chain:
            config = uvicorn.Config(
                CancelsWhoLeaves(chain.app),
                port=0,
                lifespan="off",
                log_level="warning",
                ws="websockets-sansio",
            )
            server = uvicorn.Server(config)
            task = asyncio.create_task(server._serve())  # `serve` would take the process's signals
            while not server.started:  # noqa: ASYNC110 - it has no event for this
                await asyncio.sleep(0.005)
            port = server.servers[0].sockets[0].getsockname()[1]
            chain.url = f"http://127.0.0.1:{port}"
            try:
                yield chain
            finally:
                server.should_exit = server.force_exit = True
                with suppress(asyncio.CancelledError):
                    await task

    return opened
