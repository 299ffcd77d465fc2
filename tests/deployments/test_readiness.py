import asyncio

import pytest
from ray.exceptions import ActorDiedError

from deployments.readiness import Readiness
from qwen3tts_core.errors import EngineFault
from tests.fakes import until


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Deployment:
    def __init__(self):
        self.error, self.hangs, self.num_asked = None, False, 0

    async def ready(self, stay_s=0.0):
        self.num_asked += 1
        await asyncio.sleep(stay_s)
        if self.hangs:
            await asyncio.Future()
        if self.error is not None:
            raise self.error


@pytest.fixture
def codec():
    return Deployment()


@pytest.fixture
def talker():
    return Deployment()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def readiness(codec, talker, clock):
    return Readiness(
        {"Codec": codec.ready, "Talker": talker.ready}, period_s=0.001, patience_s=0.01, clock=clock
    )


async def test_nothing_is_ready_before_everyone_has_answered(readiness, codec):
    assert set(readiness.problems()) == {"Codec", "Talker"}
    await readiness.ask_once("Codec", codec.ready)
    assert set(readiness.problems()) == {"Talker"}


async def test_watching_finds_the_ready_and_keeps_asking(readiness, codec, talker):
    watching = asyncio.create_task(readiness.watch())
    await until(lambda: not readiness.problems())
    await until(lambda: min(codec.num_asked, talker.num_asked) > 3)
    watching.cancel()


async def test_an_error_counts_at_once_and_is_forgotten_at_the_next_good_answer(readiness, codec):
    await readiness.ask_once("Codec", codec.ready)
    codec.error = EngineFault("secret")
    await readiness.ask_once("Codec", codec.ready)
    assert readiness.problems()["Codec"] == "EngineFault"
    codec.error = None
    await readiness.ask_once("Codec", codec.ready)
    assert "Codec" not in readiness.problems()


async def test_silence_counts_only_when_it_lasts(readiness, codec, clock):
    await readiness.ask_once("Codec", codec.ready)
    codec.hangs = True
    await readiness.ask_once("Codec", codec.ready)
    assert "Codec" not in readiness.problems()
    clock.now += 1
    assert "silent" in readiness.problems()["Codec"]


async def test_a_death_counts_soon_and_until_somebody_answers(readiness, codec, clock):
    await readiness.ask_once("Codec", codec.ready)
    codec.error = ActorDiedError()
    await readiness.ask_once("Codec", codec.ready)
    assert "Codec" not in readiness.problems(), "another replica may answer"
    codec.error, codec.hangs = None, True  # as Serve's router does without a replica
    clock.now += 1.1
    await readiness.ask_once("Codec", codec.ready)
    assert "replica" in readiness.problems()["Codec"]
    codec.hangs = False
    await readiness.ask_once("Codec", codec.ready)
    assert "Codec" not in readiness.problems()


async def test_deaths_in_a_row_do_not_start_the_grace_anew(readiness, codec, clock):
    await readiness.ask_once("Codec", codec.ready)
    codec.error = ActorDiedError()
    for _ in range(3):
        await readiness.ask_once("Codec", codec.ready)
        clock.now += 0.6
    assert "Codec" in readiness.problems()


async def test_a_question_is_always_with_the_replica(codec):
    readiness = Readiness({"Codec": codec.ready}, period_s=30)
    watching = asyncio.create_task(readiness.watch())
    await until(lambda: not readiness.problems())
    await until(lambda: codec.num_asked == 2)  # the second is kept, and is there to fail
    await asyncio.sleep(0.05)
    assert codec.num_asked == 2
    watching.cancel()


async def test_one_that_hangs_does_not_hide_the_other(readiness, codec, talker):
    codec.hangs = True
    watching = asyncio.create_task(readiness.watch())
    await until(lambda: "Talker" not in readiness.problems())
    talker.error = EngineFault("secret")
    await until(lambda: readiness.problems().get("Talker") == "EngineFault")
    watching.cancel()
