"""An engine in a process of its own: what crosses, in which order, and that neither process outlives the other.

test_chain.py has the deployments with it; test_engine_home.py the real engines.
"""

import asyncio
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments import engine_process
from deployments.engine_process import TalkerProcess
from deployments.engine_wire import FrameReader, Kind, header_of
from load_tests.drills.processes import descendants, is_alive
from qwen3tts_core.engine.outbox import AsyncOutbox
from qwen3tts_core.errors import (
    CheckpointMismatch,
    EngineDown,
    EngineFault,
    InvalidCodes,
    InvalidRequest,
    Overloaded,
    TextTooLong,
)
from tests.deployments import process_engines as engines
from tests.deployments.process_engines import Order, PuppetStats
from tests.fakes import until

ERRORS = [
    Overloaded("every slot is taken", 2.5),
    InvalidRequest("no such thing", "voice"),
    TextTooLong(5210, 4096),
    InvalidCodes("frame 7 has a code 9000"),
    EngineFault("page 7"),
    EngineDown("the loop died"),
]


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A process that waits for a processor is no stuck one."""
    monkeypatch.setattr(engine_process, "_ANSWER_WITHIN_S", 60.0)


class Process(TalkerProcess):
    """What a replica has, and its outbox."""

    def __init__(self, open_engine=engines.open_puppet, settings=None, **others):
        self.outbox = AsyncOutbox(asyncio.get_running_loop())
        super().__init__("Talker", open_engine, settings, self.outbox, **others)

    @contextmanager
    def asked(self, request_id, do, **arguments):
        """The reading end of a request that was just submitted."""
        with self.outbox.stream(request_id) as items:
            try:
                self.submit(Order(request_id, partial(do, **arguments)))
                yield items
            finally:
                self.cancel(request_id)


@asynccontextmanager
async def opened(*arguments, **others):
    process = Process(*arguments, **others)
    try:
        yield process
    finally:
        process.stop()
        await until(lambda: process._link.is_closed)


def exists(pid):
    """Zombies do."""
    return os.path.exists(f"/proc/{pid}")


async def read(items, count, timeout_s=60):
    async with asyncio.timeout(timeout_s):
        return [await anext(items) for _ in range(count)]


async def gone(pid):
    await until(lambda: not exists(pid))


async def halt(pid):
    """Stop a process until it gets SIGCONT; returns when the last of its threads has stopped."""

    def states():
        found = set()
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                found.add((task / "stat").read_text().rpartition(")")[2].split()[0])
        return found

    os.kill(pid, signal.SIGSTOP)
    await until(lambda: states() == {"T"})


# ---------------------------------------------------------------- what crosses
class Trickle:
    """A socket that has so many bytes at each read, and then the rest."""

    def __init__(self, data, sizes):
        self._data, self._sizes = data, iter(sizes)

    def recv_into(self, buffer):
        part = self._data[: min(len(buffer), next(self._sizes, len(buffer)))]
        buffer[: len(part)], self._data = part, self._data[len(part) :]
        return len(part)


@given(
    contents=st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.binary(max_size=40))),
    cuts=st.lists(st.integers(1, 30)),
)
def test_frames_are_whole_however_they_were_cut(contents, cuts):
    data = b"".join(header_of(kind, payload, stream) + payload for kind, stream, payload in contents)
    reader = FrameReader(Trickle(data, cuts), num_bytes=16)
    frames = []
    while (some := reader.read()) is not None:
        frames += some
    assert frames == contents


async def test_a_thousand_items_of_a_step_come_in_order_beside_another_stream():
    async with opened() as process:
        with (
            process.asked("a", engines.count, num_items=1000, per_flush=1000) as a,
            process.asked("b", engines.count, num_items=300, per_flush=7) as b,
        ):
            from_a, from_b = await asyncio.gather(read(a, 1000), read(b, 300))
    assert [int.from_bytes(item, "little") for item in from_a] == list(range(1000))
    assert [int.from_bytes(item, "little") for item in from_b] == list(range(300))
    assert {type(item) for item in from_a} == {bytes}  # Ray takes nothing else as it is


async def test_a_step_never_waits_for_the_replica_s_event_loop(tmp_path):
    """The loop stands still until the engine has written far more than a socket holds."""
    done = tmp_path / "done"
    async with opened() as process:
        order = {"num_items": 200, "per_flush": 20, "num_bytes": 96_000, "done": str(done)}
        with process.asked("a", engines.count, **order) as items:
            deadline = time.monotonic() + 60
            while not done.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)  # noqa: ASYNC251 - that it blocks is the point
            got = await read(items, 200)
    assert [int.from_bytes(item[:8], "little") for item in got] == list(range(200))
    assert {len(item) for item in got} == {96_000}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_errors_arrive_as_themselves_whether_raised_or_put(error):
    async with opened() as process:
        with (
            process.asked("refused", engines.refuse, error=error) as items,
            pytest.raises(type(error)) as raised,
        ):
            await read(items, 1)
        with process.asked("put", engines.speak, items=[b"good", error]) as items:
            assert await anext(items) == b"good"
            with pytest.raises(type(error)) as put:
                await read(items, 1)
    for caught in (raised.value, put.value):
        assert (type(caught), caught.args, vars(caught)) == (type(error), error.args, vars(error))


async def test_an_error_that_no_pickle_holds_arrives_by_its_words():
    def unpicklable(error):
        with pytest.raises(TypeError):
            pickle.loads(pickle.dumps(error))
        return True

    assert unpicklable(engines.Unpicklable("this", "that"))
    async with opened() as process:
        with (
            process.asked("a", engines.raise_unpicklable) as items,
            pytest.raises(EngineFault, match="Unpicklable: this and that"),
        ):
            await read(items, 1)


async def test_a_refused_request_holds_nothing_and_its_id_may_come_again():
    async with opened() as process:
        with process.asked("a", engines.refuse, error=Overloaded("full")) as items, pytest.raises(Overloaded):
            await read(items, 1)
        await process.refresh()
        assert process.stats() == PuppetStats(known=0, open=(), cancelled=())
        with process.asked("a", engines.speak, items=[b"now"]) as items:
            assert await read(items, 1) == [b"now"]


async def test_a_reader_who_leaves_is_told_to_the_engine():
    async with opened() as process:
        with process.asked("a", engines.nothing):
            await process.refresh()
            assert process.stats() == PuppetStats(known=1, open=("a",), cancelled=())
        await process.refresh()
        assert process.stats() == PuppetStats(known=0, open=(), cancelled=("a",))
        process.cancel("a")
        process.cancel("never heard of")
        await process.refresh()
        assert process.stats().cancelled == ("a",)


async def test_what_was_on_its_way_to_a_reader_who_left_goes_to_nobody_else():
    async with opened() as process:
        with process.asked("a", engines.speak, items=[b"old"] * 50):
            pass  # the loop has read nothing yet
        with process.asked("a", engines.speak, items=[b"new"]) as items:
            assert await read(items, 1) == [b"new"]


async def test_an_id_that_is_open_is_refused_and_the_stream_goes_on():
    async with opened() as process:
        with process.asked("a", engines.speak, items=[b"1", b"2"]) as items:
            with pytest.raises(EngineFault, match="already running"):
                process.submit(Order("a", engines.nothing))
            assert await read(items, 2) == [b"1", b"2"]


async def test_its_log_lines_are_the_replica_s(caplog):
    with caplog.at_level(logging.INFO, "qwen3tts_core"):
        async with opened() as process:
            with process.asked("a", engines.log):
                await process.refresh()
            (line,) = [record for record in caplog.records if record.name == "qwen3tts_core.engine"]
            assert (line.levelname, line.process) == ("ERROR", process.pid)
            assert line.getMessage().startswith("request a: odd\nTraceback")
            assert "ZeroDivisionError: in a step" in line.getMessage()


# ---------------------------------------------------------------- opening
@pytest.mark.parametrize(
    "error",
    [
        CheckpointMismatch("model.safetensors", ["talker.norm.weight: tensor is missing"]),
        ValueError("dtype must be auto or float32, got 'float7'"),
        EngineFault("the talker doesn't fit the GPU's memory: lower talker.num_slots"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_at_opening_is_the_constructor_s(monkeypatch, error):
    spawn, spawned = engine_process._spawn, []

    def noted(name):
        process, link = spawn(name)
        spawned.append(process)
        return process, link

    monkeypatch.setattr(engine_process, "_spawn", noted)
    with pytest.raises(type(error)) as caught:
        Process(engines.open_failing, error)
    assert (caught.value.args, str(caught.value)) == (error.args, str(error))
    (process,) = spawned
    assert not exists(process.pid)


async def test_an_engine_that_can_t_warm_up_isn_t_ready():
    """known_faults rows 35 and 36: ready means captured."""
    with pytest.raises(MemoryError, match="80 GiB"):
        Process(engines.open_failing_start)


async def test_a_process_that_dies_at_opening_is_a_fault_that_tells_how():
    with pytest.raises(EngineFault, match="Talker engine's process ended with 3 before it was ready"):
        Process(engines.open_dying, 3)


# ---------------------------------------------------------------- life and death
async def test_a_killed_process_takes_its_streams_down_and_leaves_no_zombie():
    async with opened() as process:
        with process.asked("a", engines.speak, items=[b"first"]) as items:
            assert await read(items, 1) == [b"first"]
            await halt(process.pid)
            refreshing = asyncio.create_task(process.refresh())
            await asyncio.sleep(0)
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(EngineDown, match="process has ended"):
                await read(items, 1)
        with pytest.raises(EngineDown):
            await refreshing
        for ask in (process.check_health, partial(process.submit, Order("b", engines.nothing))):
            with pytest.raises(EngineDown):
                ask()
        with pytest.raises(EngineDown):
            await process.refresh()
        await gone(process.pid)


@pytest.mark.parametrize(
    ("do", "complaint"),
    [
        (engines.talk_nonsense, "255 is not a valid Kind"),
        (engines.put_unknown, "no attribute 'Unheard'|get attribute 'Unheard'"),
    ],
)
async def test_one_that_can_t_be_understood_is_given_up(caplog, do, complaint):
    async with opened() as process:
        with (
            process.asked("a", do) as items,
            caplog.at_level(logging.ERROR, "asyncio"),
            pytest.raises(EngineDown),
        ):
            await read(items, 1)
        assert re.search(complaint, caplog.text)
        await gone(process.pid)


async def test_stop_ends_the_process_and_open_streams():
    async with opened() as process:
        with process.asked("a", engines.nothing) as items:
            process.stop()
            assert not exists(process.pid)
            with pytest.raises(EngineDown, match="stopped"):
                await read(items, 1)
        with pytest.raises(EngineDown, match="stopped"):
            process.check_health()
        process.stop()


async def test_an_engine_that_doesn_t_stop_is_killed(monkeypatch):
    monkeypatch.setattr(engine_process, "_END_WITHIN_S", 0.1)
    async with opened(engines.open_stubborn) as process:
        process.stop()
        assert not exists(process.pid)


async def test_a_process_whose_socket_ends_goes_by_itself():
    """What a replica's death looks like where nothing else tells of it."""
    async with opened() as process:
        with process.asked("a", engines.hang, with_interpreter=False) as items:
            await read(items, 1)
            process._link._socket.shutdown(2)
            await gone(process.pid)


PARENT = """
import asyncio
from functools import partial
from tests.deployments import process_engines as engines
from tests.deployments.test_engine_process import Process, read

async def main():
    process = Process()
    with process.asked("a", {do}) as items:
        await read(items, 1)
        print(process.pid, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "do",
    [
        "engines.speak, items=[b'idle']",
        "engines.hang, with_interpreter=False",
        "engines.hang, with_interpreter=True",
    ],
    ids=["idle", "hangs in a call", "hangs with the interpreter"],
)
def test_a_replica_that_is_killed_leaves_no_process(do):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", PARENT.format(do=do)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, env=environment) as parent:
        try:
            pid = int(parent.stdout.readline())
            (child,) = [process for process in descendants(parent.pid) if process.pid == pid]
        finally:
            parent.kill()
    deadline = time.monotonic() + 60
    while is_alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


OPENING = """
import asyncio
from tests.deployments import process_engines as engines
from tests.deployments.test_engine_process import Process

async def main():
    Process(engines.open_slowly)

asyncio.run(main())
"""


def test_nor_does_one_that_is_killed_while_it_opens():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", OPENING], env=environment) as parent:
        deadline = time.monotonic() + 120
        try:
            while not (children := descendants(parent.pid)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            parent.kill()
    while any(map(is_alive, children)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------- health and bounds
async def test_an_engine_s_own_complaint_is_the_replica_s():
    async with opened() as process:
        process.check_health()
        with process.asked("a", engines.fall_ill, error=EngineFault("one turn for 61 s")):
            await process.refresh()
            for _ in range(2):
                with pytest.raises(EngineFault, match="61 s"):
                    process.check_health()


async def test_complaints_and_counts_come_without_being_asked_for(monkeypatch):
    monkeypatch.setattr(engine_process, "_ASK_EVERY_S", 0.01)

    def is_ill():
        try:
            process.check_health()
        except EngineFault:
            return True
        return False

    async with opened() as process:
        with process.asked("a", engines.fall_ill, error=EngineFault("stuck")):
            await until(is_ill)
            await until(lambda: process.stats().open == ("a",))


async def test_a_process_that_doesn_t_answer_is_stuck_until_it_does(monkeypatch):
    monkeypatch.setattr(engine_process, "_ANSWER_WITHIN_S", 0.05)
    now = 1000.0
    async with opened(clock=lambda: now) as process:
        await halt(process.pid)
        try:
            with pytest.raises(EngineFault, match="doesn't answer"):
                await process.refresh()
            now += 59
            process.check_health()
            now += 2
            with pytest.raises(EngineFault, match="61 s"):
                process.check_health()
        finally:
            os.kill(process.pid, signal.SIGCONT)
        await until(lambda: not process._questions)
        process.check_health()


def num_taken(process, orders):
    """Before it takes no more."""
    for number, order in enumerate(orders):
        try:
            process.submit(order)
        except EngineDown:
            return number
    return len(orders)


async def test_a_process_that_takes_nothing_is_given_up_before_memory_is(monkeypatch):
    monkeypatch.setattr(engine_process, "_MOST_UNSENT", 1 << 20)
    async with opened() as process:
        await halt(process.pid)
        try:
            orders = [
                Order(str(number), partial(engines.speak, items=[bytes(100_000)])) for number in range(1000)
            ]
            number = num_taken(process, orders)  # a loop that waited for room would never come back
            assert 10 < number < 1000  # more than the bound by what a socket holds here
            with pytest.raises(EngineDown, match="unread"):
                process.check_health()
            for order in orders[:number]:
                process.cancel(order.request_id)  # is still told
        finally:
            os.kill(process.pid, signal.SIGCONT)
        await until(lambda: not process._link.num_unsent)
        await process.refresh()
        assert process.stats().open == ()
        assert len(process.stats().cancelled) == number
        process.check_health()
