"""A slow reader holds up nobody's memory, and one that has gone is noticed: in both of Serve's ways to a socket."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
import uvicorn
from websockets.client import ClientProtocol
from websockets.uri import parse_uri

from deployments.reader_pace import PART_BYTES, REPORT_BYTES, WINDOW_BYTES, ReaderCredits, ReaderPace
from qwen3tts_core.errors import SlowReader
from tests.fakes import until

SOCKET_SCOPE = {"type": "websocket", "headers": [(b"host", b"here"), (b"x-request-id", b"its-id")]}
SCOPE = {"type": "http", "headers": [(b"host", b"here"), (b"x-request-id", b"its-id")]}


class Socket:
    """uvicorn's side: takes what `allow` has allowed; `send` waits beyond that."""

    def __init__(self):
        self.taken, self.messages = 0, []
        self._allowed, self._changed = 0, asyncio.Condition()
        self._left = asyncio.Event()

    async def allow(self, num_bytes):
        async with self._changed:
            self._allowed += num_bytes
            self._changed.notify_all()

    def leave(self):
        self._left.set()

    async def send(self, message):
        size = len(message.get("body", b""))
        async with self._changed:
            await self._changed.wait_for(lambda: not size or self.taken + size <= self._allowed)
        self.taken += size
        self.messages.append(message)

    async def receive(self):
        await self._left.wait()
        return {"type": "http.disconnect"}


class Queues:
    """Serve between proxy and replica: takes everything at once, and passes it on as it can."""

    def __init__(self, app):
        self._app = app
        self.num_waiting = self.most_waiting = 0

    async def __call__(self, scope, receive, send):
        messages, received = asyncio.Queue(), asyncio.Queue()

        async def enqueue(message):
            self.num_waiting += len(message.get("body") or message.get("bytes") or b"")
            self.most_waiting = max(self.most_waiting, self.num_waiting)
            messages.put_nowait(message)

        async def pull():
            while True:
                message = await receive()
                received.put_nowait(message)
                if message["type"].endswith(".disconnect"):
                    running.cancel()
                    return

        running = asyncio.create_task(self._app(scope, received.get, enqueue))
        pulling = asyncio.create_task(pull())
        running.add_done_callback(lambda _: messages.put_nowait(None))
        while (message := await messages.get()) is not None:
            await send(message)
            self.num_waiting -= len(message.get("body") or message.get("bytes") or b"")
        pulling.cancel()
        await asyncio.gather(running, return_exceptions=True)


def speaker(num_parts, size, log):
    async def app(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(num_parts):
                await send({"type": "http.response.body", "body": bytes(size), "more_body": True})
                log.append(size)
            await send({"type": "http.response.body", "body": b""})
        except BaseException as error:
            log.append(error)
            raise

    return app


@asynccontextmanager
async def stalled_client(app, log, greeting, **options):
    """A client of the server that Serve's proxy is, which has sent its greeting and read the first of the answer; once the
    app has heard that it takes nothing, and the server has nothing left of it. greeting: made of the port."""
    config = uvicorn.Config(
        app, port=0, host="127.0.0.1", lifespan="off", log_level="critical", loop="asyncio", **options
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, greeting(port))
        await loop.sock_recv(client, 100)
        await until(lambda: any(isinstance(entry, BaseException) for entry in log))
        await until(lambda: not server.server_state.connections)
        yield client
    server.should_exit = True
    await serving


async def read_to_the_end(client):
    while await asyncio.get_running_loop().sock_recv(client, 1 << 20):
        pass


async def settled():
    for _ in range(200):
        await asyncio.sleep(0)


async def test_on_a_socket_of_its_own_a_reader_that_takes_nothing_is_dropped(own_time, caplog):
    reader, log = Socket(), []
    await reader.allow(1000)
    app = ReaderPace(speaker(3, 1000, log), timeout_s=0.05)
    with pytest.raises(SlowReader):
        await app(SCOPE, reader.receive, reader.send)
    assert reader.taken == 1000
    assert log[0] == 1000
    assert isinstance(log[-1], SlowReader)
    assert [record.getMessage() for record in caplog.records] == [
        "request its-id: the client took nothing for 0.05 s; its stream was dropped"
    ]


async def test_a_slow_reader_that_takes_something_in_time_gets_everything(own_time):
    reader, log = Socket(), []
    app = ReaderPace(speaker(6, 1000, log), timeout_s=2)
    call = asyncio.create_task(app(SCOPE, reader.receive, reader.send))
    for _ in range(6):
        await asyncio.sleep(0.5)  # in all more than the timeout
        await reader.allow(1000)
    await call
    assert reader.taken == 6000
    assert reader.messages[-1] == {"type": "http.response.body", "body": b""}


async def test_nothing_more_is_tried_on_a_reader_that_has_stalled(own_time):
    reader, log = Socket(), []

    async def app(scope, receive, send):
        for _ in range(2):  # as server-sent events do: an error, then a word about it
            try:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
            except SlowReader as error:
                log.append(error)
                await reader.allow(10)

    await ReaderPace(app, timeout_s=0.05)(SCOPE, reader.receive, reader.send)
    assert len(log) == 2
    assert reader.taken == 0


async def test_a_whole_body_is_sent_in_parts_and_complete(own_time):
    reader, body = Socket(), bytes(range(256)) * (PART_BYTES // 100)
    await reader.allow(len(body))

    async def app(scope, receive, send):
        await send({"type": "http.response.body", "body": body})

    await ReaderPace(app, timeout_s=1)(SCOPE, reader.receive, reader.send)
    assert max(len(message["body"]) for message in reader.messages) <= PART_BYTES
    assert [message.get("more_body", False) for message in reader.messages].count(False) == 1
    assert not reader.messages[-1].get("more_body", False)
    assert b"".join(message["body"] for message in reader.messages) == body


async def test_behind_the_proxy_no_more_than_the_window_is_on_its_way(own_time):
    """Ten times the window, read slowly: all of it comes, and the queues between never held more than one window."""
    size, num_parts = REPORT_BYTES, 10 * WINDOW_BYTES // REPORT_BYTES
    reader, log = Socket(), []
    queues = Queues(ReaderPace(speaker(num_parts, size, log), timeout_s=5))
    call = asyncio.create_task(ReaderCredits(queues)(SCOPE, reader.receive, reader.send))
    await settled()
    assert len(log) * size <= WINDOW_BYTES + size
    for _ in range(num_parts):
        await reader.allow(size)
        await settled()
    await call
    assert reader.taken == num_parts * size
    assert WINDOW_BYTES // 2 < queues.most_waiting <= WINDOW_BYTES
    assert not reader.messages[-1].get("more_body", False)


async def test_a_reader_behind_the_proxy_that_takes_nothing_loses_its_connection():
    """On the server that Serve's proxy is: no sooner has it stalled than nothing of it is left, not even in the kernel."""
    log = []
    app = ReaderCredits(Queues(ReaderPace(speaker(100, 1 << 20, log), timeout_s=0.3)))
    async with stalled_client(app, log, lambda _: b"GET / HTTP/1.1\r\nHost: here\r\n\r\n") as client:
        assert isinstance(log[-1], BaseException)
        with pytest.raises(ConnectionResetError):
            await read_to_the_end(client)


async def test_what_the_two_ends_tell_each_other_reaches_neither_client_nor_app(own_time):
    reader, seen = Socket(), {}

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        for _ in range(4):
            await send({"type": "http.response.body", "body": bytes(REPORT_BYTES), "more_body": True})
        reader.leave()
        seen["message"] = await receive()
        await send({"type": "http.response.body", "body": b""})

    await reader.allow(4 * REPORT_BYTES)
    await ReaderCredits(ReaderPace(app, timeout_s=1))(SCOPE, reader.receive, reader.send)
    assert seen["message"]["type"] == "http.disconnect"
    assert reader.messages[0]["headers"] == [(b"a", b"b")]


async def test_a_client_that_claims_to_be_our_proxy_only_stops_itself(own_time):
    reader, log = Socket(), []
    await reader.allow(100 * WINDOW_BYTES)
    scope = {**SCOPE, "headers": [(b"x-reader-credits", b"1")]}
    app = ReaderPace(speaker(3, WINDOW_BYTES, log), timeout_s=0.05)
    with pytest.raises(SlowReader):
        await app(scope, reader.receive, reader.send)


# ---------------------------------------------------------------- a WebSocket
def talker(num_parts, size, log):
    """A session that receives in one task and sends in another, as ours do."""

    async def app(scope, receive, send):
        async def read():
            while (message := await receive())["type"] != "websocket.disconnect":
                if message["type"] == "websocket.receive":
                    log.append(message["text"])

        await send({"type": "websocket.accept", "headers": []})
        reading = asyncio.create_task(read())
        try:
            for _ in range(num_parts):
                await send({"type": "websocket.send", "bytes": bytes(size)})
                log.append(size)
            await send({"type": "websocket.close", "code": 1000})
        except BaseException as error:
            log.append(error)
            raise
        finally:
            reading.cancel()

    return app


class TalkingSocket(Socket):
    """Whose client also says something, now and then."""

    def __init__(self):
        super().__init__()
        self.said = asyncio.Queue()

    async def send(self, message):
        await super().send({**message, "body": message.get("bytes", b"")})

    async def receive(self):
        return {"type": "websocket.receive", "text": await self.said.get()}


@pytest.mark.parametrize("size", [REPORT_BYTES // 3, REPORT_BYTES, 2 * WINDOW_BYTES])
async def test_no_more_than_the_window_is_on_its_way_to_a_websocket(own_time, size):
    """Messages stay whole, also those larger than the window; what the client says meanwhile arrives, in order."""
    num_parts = max(4, 6 * WINDOW_BYTES // size)
    reader, log = TalkingSocket(), []
    queues = Queues(ReaderPace(talker(num_parts, size, log), timeout_s=5))
    call = asyncio.create_task(ReaderCredits(queues)(SOCKET_SCOPE, reader.receive, reader.send))
    await settled()
    assert log.count(size) * size <= WINDOW_BYTES + size
    for number in range(num_parts):
        await reader.said.put(number)
        await reader.allow(size)
        await settled()
    await call
    assert reader.taken == num_parts * size
    heard = [entry for entry in log if entry != size]
    assert heard == list(range(len(heard)))
    assert len(heard) >= num_parts // 2, "the rest was on its way when the session ended"
    assert [message["type"] for message in reader.messages].count("websocket.send") == num_parts
    assert reader.messages[0]["headers"] == []


async def test_on_a_websocket_of_its_own_a_client_that_takes_nothing_is_dropped(own_time):
    reader, log = TalkingSocket(), []
    await reader.allow(1000)
    with pytest.raises(SlowReader):
        await ReaderPace(talker(3, 1000, log), timeout_s=0.05)(SOCKET_SCOPE, reader.receive, reader.send)
    assert reader.taken == 1000


async def test_a_websocket_client_that_takes_nothing_loses_its_connection():
    """Also when uvicorn has given it up already, which on its own would keep all that it was sent."""
    log = []
    app = ReaderCredits(Queues(ReaderPace(talker(100, 1 << 20, log), timeout_s=0.5)))

    def handshake(port):
        protocol = ClientProtocol(parse_uri(f"ws://127.0.0.1:{port}/"))
        protocol.send_request(protocol.connect())
        return b"".join(protocol.data_to_send())

    keepalive = {"ws_ping_interval": 0.1, "ws_ping_timeout": 0.1}
    async with stalled_client(app, log, handshake, **keepalive) as client:
        with pytest.raises(ConnectionResetError):
            await read_to_the_end(client)
