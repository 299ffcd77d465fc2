"""Deployments that may have no replica: nobody's question keeps them awake, a request wakes them and succeeds."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from ray.serve.schema import DeploymentStatus, ReplicaState

from deployments.deadline import FirstAudioDeadline
from deployments.sleepers import Sleepers
from qwen3tts_core.errors import EngineFault, FirstAudioTimeout
from tests.clips import as_base64, wav_clip
from tests.fakes import Script, until

ASLEEP, AWAKE = 0, 1


def status(num_running, status=DeploymentStatus.HEALTHY):
    return SimpleNamespace(status=status, replica_states={ReplicaState.RUNNING: num_running})


class Clock:
    now = 1_000.0

    def __call__(self):
        return self.now


class Serve:
    """What Serve says of the deployments, and who was asked to wake."""

    def __init__(self, **running):
        self.statuses = {name: status(count) for name, count in running.items()}
        self.woken, self.error, self.starts = [], None, asyncio.Event()

    async def ask(self):
        if self.error is not None:
            raise self.error
        return self.statuses

    def ready_of(self, name):
        async def ready(stay_s=0.0):
            self.woken.append(name)
            await self.starts.wait()
            self.statuses[name] = status(AWAKE)

        return ready


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def serve():
    return Serve(Talker=ASLEEP, Codec=AWAKE)


@pytest.fixture
def sleepers(serve, clock):
    asks = {name: serve.ready_of(name) for name in serve.statuses}
    return Sleepers(asks, cold_start_s=60, ask_serve=serve.ask, clock=clock)


async def test_asleep_is_healthy_and_broken_or_unknown_is_not(sleepers, serve, clock):
    assert set(sleepers.problems()) == {"Talker", "Codec"}, "not before Serve has spoken"
    await sleepers.look()
    assert sleepers.problems() == {}
    serve.statuses["Talker"] = status(0, DeploymentStatus.UNHEALTHY)
    await sleepers.look()
    assert "UNHEALTHY" in sleepers.problems()["Talker"]
    del serve.statuses["Talker"]
    await sleepers.look()
    assert set(sleepers.problems()) == {"Talker"}


async def test_a_silent_serve_is_a_problem_only_when_it_lasts(sleepers, serve, clock):
    await sleepers.look()
    serve.error = OSError("no controller")
    await sleepers.look()
    assert sleepers.problems() == {}
    clock.now += 31
    assert "31 s" in sleepers.problems()["Codec"]


async def test_looking_asks_no_deployment(sleepers, serve):
    for _ in range(3):
        await sleepers.look()
    assert serve.woken == []


async def test_only_what_sleeps_is_woken_and_once(sleepers, serve):
    await sleepers.look()
    for _ in range(3):
        sleepers.wake(["Talker", "Codec", "Ingress"])
        await asyncio.sleep(0)
    assert serve.woken == ["Talker"]
    serve.starts.set()
    await until(lambda: sleepers._is_awake("Talker"))
    await asyncio.sleep(0)
    sleepers.wake(["Talker"])
    await asyncio.sleep(0)
    assert serve.woken == ["Talker"]


async def test_a_failed_wake_may_be_tried_again(sleepers, serve):
    async def broken(stay_s):
        serve.woken.append("Talker")
        raise EngineFault("no room")

    sleepers._asks["Talker"] = broken
    await sleepers.look()
    for number in (1, 2):
        sleepers.wake(["Talker"])
        await until(lambda number=number: len(serve.woken) == number and not sleepers._waking)


async def test_only_a_request_that_found_one_asleep_waits_longer(sleepers, serve, clock):
    clock.now += 100
    await sleepers.look()
    began = clock.now
    assert sleepers.extra_s(["Talker", "Codec"], began) == 60
    assert sleepers.extra_s(["Codec"], began) == 0
    assert sleepers.extra_s(["Ingress"], began) == 0
    serve.statuses["Talker"] = status(AWAKE)
    clock.now += 5
    await sleepers.look()
    assert sleepers.extra_s(["Talker"], began) == 60, "it was asleep in this request's time"
    assert sleepers.extra_s(["Talker"], clock.now) == 0


# ---------------------------------------------------------------- the deadline
async def wait(deadline, seconds):
    async with deadline.waiting():
        await asyncio.sleep(seconds)


async def test_the_deadline_is_put_off_once_and_says_how_long_it_was(own_time):
    asked = []

    def put_off_by(seconds):
        asked.append(seconds)
        return seconds

    await wait(FirstAudioDeadline(0.1, lambda: put_off_by(20)), 0.2)
    with pytest.raises(FirstAudioTimeout, match=r"0\.3 s"):
        await wait(FirstAudioDeadline(0.1, lambda: put_off_by(0.2)), 60)
    assert asked == [20, 0.2]


async def test_it_is_asked_only_at_the_deadline_and_0_is_still_none(own_time):
    def never():
        raise AssertionError("asked")

    await wait(FirstAudioDeadline(5, never), 0.01)
    await wait(FirstAudioDeadline(0, never), 0.01)
    with pytest.raises(FirstAudioTimeout):
        await wait(FirstAudioDeadline(0.01), 10)


async def test_what_was_waited_before_counts_when_it_is_put_off(own_time):
    deadline = FirstAudioDeadline(0.4, lambda: 0.8)
    await wait(deadline, 0.6)
    with pytest.raises(FirstAudioTimeout):
        await wait(deadline, 1.0)


# ---------------------------------------------------------------- through the API
async def speak(chain, **fields):
    body = json.dumps({"input": "Hello there.", **fields}).encode()
    return await chain.call("POST", "/v1/audio/speech", body, content_type="application/json").finish()


@pytest.mark.parametrize(
    ("running", "cold_start_s", "expected"), [(ASLEEP, 60, 200), (ASLEEP, 0, 504), (AWAKE, 60, 504)]
)
async def test_a_request_that_finds_its_talker_asleep_gets_its_audio(
    open_chain, running, cold_start_s, expected
):
    """The first frames take longer than the usual deadline; that is fine for a cold start alone."""
    slow = Script(num_frames=3, seconds_per_item=0.6)
    async with open_chain(
        talker=slow, sleepers=("Talker",), first_audio_timeout_s=0.3, cold_start_s=cold_start_s
    ) as chain:
        sleepers, serve = chain.ingress._sleepers, Serve(Talker=running)
        sleepers._ask_serve = serve.ask
        sleepers._asleep_at["Talker"] -= 100
        await sleepers.look()
        call = await speak(chain)
        assert call.status == expected
        assert ("ready" in chain.talker_handle.calls) == (running == ASLEEP)


async def test_health_of_a_sleeping_app_is_good_and_wakes_nobody(open_chain):
    async with open_chain(sleepers=("Talker",)) as chain:
        chain.ingress._sleepers._ask_serve = Serve(Talker=ASLEEP).ask
        await chain.ingress._sleepers.look()
        await until(lambda: not chain.ingress._readiness.problems())
        assert (await chain.call("GET", "/health").finish()).status == 200
        assert "ready" not in chain.talker_handle.calls


async def test_a_voice_that_is_remembered_does_not_wake_its_encoder(open_base):
    clone = {"ref_audio": as_base64(wav_clip()), "x_vector_only_mode": True}
    async with open_base(sleepers=("Talker", "Encoder-base")) as chain:
        sleepers = chain.ingress._sleepers
        sleepers._ask_serve = Serve(**{"Talker": AWAKE, "Encoder-base": ASLEEP}).ask
        await sleepers.look()
        (encoder,) = chain.encoder_handles.values()
        assert (await speak(chain, **clone)).status == 200
        assert encoder.calls == ["encode"], "called, so that it wakes by that"
        assert (await speak(chain, **clone)).status == 200
        assert encoder.calls == ["encode"]
