"""Stand-ins for what is slow or far: the engines, Serve's handles, and an HTTP client's patience.

The engines speak the real protocol through the real outbox, from their own thread; codes and PCM
are made up but traceable, so that a lost, doubled or swapped frame shows. A handle runs each call
eagerly in a task of its own, as Serve does, and pickles whatever crosses.
"""

import asyncio
import inspect
import json
import math
import pickle
import threading
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import numpy as np

from qwen3tts_core.engine.memo import Memo
from qwen3tts_core.errors import EngineFault, InvalidCodes, Overloaded
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.types import AudioChunk, FrameBatch, ReferenceVoice

NUM_GROUPS = 16


# ---------------------------------------------------------------- engines
def fake_codes(seed, first_frame, num_frames, piece=0):
    """[F, G] int16: a pure function of seed, piece and frame, like the real thing."""
    frames = np.arange(first_frame, first_frame + num_frames)[:, None]
    groups = np.arange(NUM_GROUPS)[None, :]
    return ((seed % 2048 * 7 + piece * 1013 + frames * 31 + groups * 3) % 2048).astype("<i2")


def fake_pcm(codes, samples_per_frame):
    """Every sample of a frame is its group-0 code."""
    return np.repeat(codes[:, 0], samples_per_frame).astype("<i2").tobytes()


@dataclass(frozen=True)
class FakeStats:
    num_active: int
    num_started: int


@dataclass
class Script:
    """What a fake engine does: frames per stream, seconds per item, room, and when to break.

    permits: each item takes one, and is not made before there is one; None makes them all.
    """

    num_frames: int = 9
    seconds_per_item: float = 0.0
    capacity: int = 1000
    fail_after_frames: int | None = None
    error: Exception = field(default_factory=lambda: EngineFault("secret detail: page 7 of 12"))
    permits: threading.Semaphore | None = None


class _Threaded:
    """A thread that works through (request, step) pairs while the request is active."""

    def __init__(self, outbox, script):
        self.script, self._outbox = script, outbox
        self._active, self._queue = {}, []
        self._num_started, self._stopping = 0, False
        self.most_active = 0
        self._wake, self._ended = threading.Condition(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self):
        self._thread.start()

    def stop(self):
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def check_health(self):
        if self._stopping or not self._thread.is_alive():
            raise EngineFault("secret detail: the thread is dead")

    def stats(self):
        return FakeStats(len(self._active), self._num_started)

    def _admit(self, request_id, state):
        with self._wake:
            if len(self._active) >= self.script.capacity:
                raise Overloaded("every slot and every place in the queue is taken", 2.5)
            if request_id in self._active:
                raise EngineFault(f"{request_id} is already active")
            self._active[request_id] = state
            self._num_started += 1
            self.most_active = max(self.most_active, len(self._active))

    def _drop(self, request_id):
        with self._wake:
            self._active.pop(request_id, None)

    def _push(self, request_id, work):
        with self._wake:
            self._queue.append((request_id, work))
            self._wake.notify()

    @property
    def is_idle(self):
        """All that it was given so far has been made, and given to the outbox."""
        return not self._queue

    def _run(self):
        while True:
            with self._wake:
                while not self._queue and not self._stopping:
                    self._wake.wait()
                if self._stopping:
                    return
                request_id, work = self._queue[0]
                state = self._active.get(request_id)
            if state is not None:
                if self._ended.wait(self.script.seconds_per_item) or not self._may_make():
                    return
                item = work(state)
                self._outbox.put(request_id, item if isinstance(item, Exception) else item.to_bytes())
                self._outbox.flush()
                self._made(state)
            with self._wake:
                self._queue.pop(0)

    def _made(self, state):
        """Called when an item has been given to the outbox."""

    def _may_make(self):
        """Once there is a permit; not when the engine was stopped before."""
        while (permits := self.script.permits) is not None and not permits.acquire(timeout=0.02):
            if self._ended.is_set():
                return False
        return True


class FakeTalkerEngine(_Threaded):
    """Frames of `fake_codes(seed)` in ramp-sized batches; stops at `num_frames` or the request's limit.

    num_decoded: of a request's frames, where somebody counts them. An error overtakes what is still being decoded: by the
    script's, everything before it is.
    """

    def __init__(self, outbox, script=None, ramp=None):
        super().__init__(outbox, script or Script())
        self._ramp = ramp or ChunkRamp()
        self.requests, self.num_decoded = [], None

    def submit(self, request):
        self._admit(request.request_id, request)
        self.requests.append(request)
        total = min(self.script.num_frames, request.max_frames)
        finish = "length" if self.script.num_frames > request.max_frames else "stop"
        first, num_chunks = (
            (request.resume.num_frames, len(request.resume.cuts)) if request.resume else (0, 0)
        )
        for size in self._ramp.sizes(num_chunks):
            last = min(first + size, total)
            self._push(request.request_id, self._work(first, last, finish if last == total else None))
            if last == total:
                break
            first = last

    def _work(self, first, last, finish):
        def work(request):
            limit = self.script.fail_after_frames
            if limit is not None and last > limit:
                self._let_be_decoded(request, first)
                return self.script.error
            codes = fake_codes(request.seed, first, last - first, request.piece)
            return FrameBatch(first, last - first, NUM_GROUPS, codes.tobytes(), finish)

        return work

    def _let_be_decoded(self, request, num_frames):
        if self.num_decoded is None or (request.resume and request.resume.num_frames == num_frames):
            return
        while self.num_decoded(request.request_id) < num_frames and request.request_id in self._active:
            if self._ended.wait(0.005):
                return
        self._ended.wait(0.02)  # and be passed on

    def cancel(self, request_id):
        self._drop(request_id)


class FakeCodecEngine(_Threaded):
    """PCM of `fake_pcm`; refuses frames out of order, as the real one must."""

    def __init__(self, outbox, script=None, samples_per_frame=1920):
        super().__init__(outbox, script or Script())
        self._samples_per_frame = samples_per_frame
        self.references, self.cuts_replayed = [], []
        self._num_decoded = {}

    def num_decoded(self, request_id):
        """Frames whose audio the outbox has."""
        return self._num_decoded.get(request_id, 0)

    def _made(self, state):
        self._num_decoded[state["id"]] = state["next"]

    def open(self, request_id, reference=None):
        self._admit(request_id, {"id": request_id, "next": 0})
        self.references.append(reference)

    def submit(self, request_id, frames):
        self._push(request_id, lambda state: self._decode(state, frames))

    def replay(self, request_id, codes, cuts=()):
        self._active[request_id]["next"] = len(codes) // (2 * NUM_GROUPS)
        self.cuts_replayed.append(tuple(cuts))

    def _decode(self, state, batch):
        if batch.first_frame != state["next"]:
            return InvalidCodes(f"expected frame {state['next']}, got {batch.first_frame}")
        limit = self.script.fail_after_frames
        state["next"] += batch.num_frames
        if limit is not None and state["next"] > limit:
            return self.script.error
        codes = np.frombuffer(batch.codes, "<i2").reshape(-1, NUM_GROUPS)
        pcm = fake_pcm(codes, self._samples_per_frame)
        return AudioChunk(batch.first_frame, batch.num_frames, NUM_GROUPS, pcm, batch.codes, batch.finish)

    def close(self, request_id):
        self._drop(request_id)


def open_fake_talker(script, settings, outbox):
    """With the script given, what a Talker opens, here or in a process."""
    return FakeTalkerEngine(outbox, script, settings.ramp)


def open_fake_codec(script, settings, outbox):
    return FakeCodecEngine(outbox, script)


class FakeReferenceEncoder:
    """Voices that are a pure function of clip, mode and weights, remembered as the real one's are.

    seconds: that an encode takes. num_frames: of the codes of a clip.
    """

    num_groups = NUM_GROUPS
    num_frames = 7

    def __init__(self, fingerprint="weights-1", seconds=0.0):
        self.fingerprint, self.seconds = fingerprint, seconds
        self._memo = Memo(1 << 20, lambda voice: len(voice.x_vector) + len(voice.codes))

    def encode(self, clip, in_context):
        key = clip.voice_key(in_context)
        return self._memo.get(key, lambda: self._run(clip, key, in_context))

    def _run(self, clip, key, in_context):
        time.sleep(self.seconds)
        seed = int(clip.digest[:6], 16)
        codes = fake_codes(seed, 0, self.num_frames).tobytes() if in_context else b""
        return ReferenceVoice(key, f"{self.fingerprint:<12}{clip.digest}".encode(), codes)  # 4 bytes a number

    def stats(self):
        return self._memo.stats()


# ---------------------------------------------------------------- Serve's handles
class FakeHandle:
    """`handle.options(...).method.remote(...)` on an object in this process."""

    def __init__(self, target, options=None, calls=None):
        self._target, self.options_seen = target, options if options is not None else []
        self.calls = calls if calls is not None else []  # names of methods, in order

    def options(self, **options):
        self.options_seen.append(options)
        return FakeHandle(self._target, self.options_seen, self.calls)

    def broadcast(self, method, *args):
        return _FakeBroadcast(getattr(self, method).remote(*args))

    def __getattr__(self, method):
        return _FakeMethod(self._target, method, self.calls)


class _FakeMethod:
    def __init__(self, target, name, calls):
        self._target, self._name, self._calls = target, name, calls

    def remote(self, *args):
        self._calls.append(self._name)
        method = getattr(self._target, self._name)
        result = method(*pickle.loads(pickle.dumps(args)))
        return FakeStream(result) if inspect.isasyncgen(result) else FakeResponse(result)


def mortal(method, *ends, before=None):
    """A streaming method whose next calls each die after so many items, as with their replica; then it lives on.

    before: awaited before each death.
    """
    from ray.exceptions import ActorDiedError  # here: the processes of fake engines need no Ray

    left = list(ends)

    async def dying(*args):
        num_items = left.pop(0) if left else math.inf
        async with aclosing(method(*args)) as items:
            async for item in items:
                if num_items == 0:
                    if before is not None:
                        await before()
                    raise ActorDiedError
                num_items -= 1
                yield item

    return dying


class _FakeBroadcast:
    """Of a deployment with one replica."""

    def __init__(self, response):
        self._response = response

    async def results_async(self, *, return_exceptions=False):
        return await asyncio.gather(self._response, return_exceptions=return_exceptions)


class FakeResponse:
    def __init__(self, coroutine):
        self._task = asyncio.ensure_future(coroutine)

    def __await__(self):
        return self._task.__await__()

    def cancel(self):
        self._task.cancel()


class FakeStream:
    """A call in flight: runs ahead of its reader without limit; `cancel` cancels the callee's task."""

    def __init__(self, generator):
        self._items = asyncio.Queue()
        self.was_cancelled = False
        self._task = asyncio.create_task(self._pump(generator))

    async def _pump(self, generator):
        try:
            async for item in generator:
                assert isinstance(item, bytes)
                self._items.put_nowait(item)
            self._items.put_nowait(StopAsyncIteration())
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader gets it, as in Serve
            self._items.put_nowait(pickle.loads(pickle.dumps(error)))
        finally:
            await generator.aclose()

    def __aiter__(self):
        return self

    async def __anext__(self):
        item = await self._items.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self):
        self.was_cancelled = True
        self._task.cancel()


# ---------------------------------------------------------------- an HTTP client
class AsgiCall:
    """One request straight into an ASGI app: what was sent when, and what the app raised.

    httpx's own transport hands over a response only when it is whole, which hides all that is
    interesting about a stream.
    """

    def __init__(self, app, method, path, body=b"", headers=()):
        self.started_at = time.perf_counter()
        self.status, self.headers, self.parts, self.is_complete, self.error = None, {}, [], False, None
        self._request = [{"type": "http.request", "body": body, "more_body": False}]
        self._arrived = asyncio.Event()
        raw = [(name.lower().encode(), value.encode()) for name, value in headers]
        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1",
            "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "scheme": "http", "headers": raw, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {},
        }  # fmt: skip
        self.task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app, scope):
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:  # noqa: BLE001 - the server's part: tests look at what came up
            self.error = error
        finally:
            self._arrived.set()

    async def _receive(self):
        if self._request:
            return self._request.pop()
        return await asyncio.Future()

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            if message.get("body"):
                self.parts.append((time.perf_counter() - self.started_at, message["body"]))
            self.is_complete = not message.get("more_body", False)
        self._arrived.set()

    @property
    def body(self):
        return b"".join(part for _, part in self.parts)

    async def wait_for_parts(self, count, timeout_s=60):
        async with asyncio.timeout(timeout_s):
            while len(self.parts) < count and not self.task.done():
                self._arrived.clear()
                await self._arrived.wait()

    async def finish(self, timeout_s=60):
        async with asyncio.timeout(timeout_s):
            await self.task
        return self

    async def leave(self):
        """The client goes away: Serve cancels the app's task."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


class AsgiSocket:
    """One WebSocket straight into an ASGI app. Each message of the app's is an item of `messages`: a dict for JSON,
    bytes for audio; `arrived_at` has their times. on_message: awaited with each, by the sender."""

    def __init__(self, app, path, headers=(), extensions=("websocket.http.response",), on_message=None):
        self.arrived_at, self.on_message = [], on_message
        self.messages, self.status, self.close_code, self.reason, self.body = [], None, None, None, b""
        self._incoming, self._arrived = asyncio.Queue(), asyncio.Event()
        self._incoming.put_nowait({"type": "websocket.connect"})
        scope = {
            "type": "websocket", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1",
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "ws",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "subprotocols": [], "state": {},
            "extensions": {name: {} for name in extensions},
        }  # fmt: skip
        self.task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app, scope):
        try:
            await app(scope, self._incoming.get, self._take)
        finally:
            self._arrived.set()

    async def _take(self, message):
        kind = message["type"]
        if kind == "websocket.send":
            text = message.get("text")
            self.messages.append(message["bytes"] if text is None else json.loads(text))
            self.arrived_at.append(time.perf_counter())
            if self.on_message is not None:
                await self.on_message(self.messages[-1])
        elif kind == "websocket.close":
            self.close_code, self.reason = message.get("code", 1000), message.get("reason")
        elif kind == "websocket.http.response.start":
            self.status = message["status"]
        elif kind == "websocket.http.response.body":
            self.body += message["body"]
        self._arrived.set()

    def send(self, kind, **fields):
        self.send_raw(json.dumps({"type": kind, **fields}))

    def send_raw(self, raw):
        key = "bytes" if isinstance(raw, bytes) else "text"
        self._incoming.put_nowait({"type": "websocket.receive", key: raw})

    def told(self, kind):
        """The JSON messages of that type so far."""
        return [message for message in self.messages if isinstance(message, dict) and message["type"] == kind]

    def audio(self, utterance=None):
        """The bytes so far, of all sentences or of one utterance's."""
        parts, current = [], None
        for message in self.messages:
            if isinstance(message, bytes):
                parts += [message] if utterance in (None, current) else []
            elif message["type"] == "audio.start":
                current = message["utterance_index"]
        return b"".join(parts)

    async def wait_for(self, kind, count=1, timeout_s=60):
        """The latest, once there are so many; the app's own end ends the wait."""
        async with asyncio.timeout(timeout_s):
            while len(self.told(kind)) < count and not self.task.done():
                self._arrived.clear()
                await self._arrived.wait()
        told = self.told(kind)
        assert len(told) >= count, f"{kind} didn't come: {self.messages[-3:]}, closed with {self.close_code}"
        return told[-1]

    async def wait_until_over(self, timeout_s=60):
        async with asyncio.timeout(timeout_s):
            await self.task
        return self

    async def leave(self):
        """The client goes away; what it would still have been sent is lost."""
        self._incoming.put_nowait({"type": "websocket.disconnect", "code": 1006})
        await self.wait_until_over()


async def until(predicate, timeout_s=30.0):
    """Poll until true. The deadline ends a test that waits in vain, and is no promise: a busy machine stands still for
    seconds. What may not end by itself meanwhile takes longer than that.
    """
    async with asyncio.timeout(timeout_s):
        while not predicate():  # noqa: ASYNC110 - engines live on threads of their own
            await asyncio.sleep(0.005)
