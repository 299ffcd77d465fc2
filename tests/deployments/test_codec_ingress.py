"""`ingress: codec`, in what it has of its own; files marked `both_shapes` hold what it shares with `separate`."""

import asyncio
import json
import threading

import pytest

from qwen3tts_core.errors import EngineDown, EngineFault, StreamLost
from tests.deployments.test_leases import through_leases
from tests.fakes import FakeStream, Script, until

ENDLESS = Script(num_frames=20_000, seconds_per_item=0.3)


@pytest.fixture
def shape():
    return "codec"


def speak(chain, **fields):
    body = json.dumps({"input": "Hello there.", "seed": 3, "response_format": "pcm", **fields}).encode()
    return chain.call("POST", "/v1/audio/speech", body, content_type="application/json")


async def test_serve_hears_of_either_half_that_cannot_go_on(open_chain):
    async with open_chain() as chain:
        await until(lambda: not chain.ingress._readiness.problems())
        chain.codec.check_health()
        watch = chain.ingress._watching[0]
        watch.cancel()
        await asyncio.wait([watch])
        with pytest.raises(EngineFault, match="ingress"):
            chain.codec.check_health()
    async with open_chain() as chain:
        chain.codec_engine.stop()
        with pytest.raises(EngineFault, match="thread"):
            chain.codec.check_health()


async def test_its_streams_are_its_load(open_chain):
    async with open_chain(talker=ENDLESS) as chain:
        calls = [speak(chain, stream=True, max_new_tokens=4000) for _ in range(3)]
        await until(lambda: chain.num_held == 6)
        load = chain.codec.record_autoscaling_stats()
        assert (load["streams"], load["queued"]) == (3.0, 0.0)
        for call in calls:
            await call.leave()
        await until(lambda: chain.num_held == 0)
        assert chain.codec.record_autoscaling_stats()["streams"] == 0.0


async def test_audio_outlives_any_lease_while_the_talkers_is_renewed(open_chain, skip):
    """Nobody but this process could miss the codec's stream; the Talker is told that it is waited for."""
    script = Script(num_frames=190, permits=threading.Semaphore(1))
    async with open_chain(talker=script, roll_call_period_s=20.0, first_audio_timeout_s=0) as chain:
        assert chain.codec._leases._lease_s == 0
        call = await through_leases(chain, [chain.talker], skip)
        assert call.headers["x-num-frames"] == "190"
        assert len(chain.talker_engine.requests) == 1


async def test_a_talker_whose_cancellation_is_lost_is_given_up_by_name(open_chain, monkeypatch):
    monkeypatch.setattr(
        FakeStream, "cancel", lambda self: None
    )  # of the Talker's stream; the codec's is none of Serve's
    async with open_chain(talker=ENDLESS) as chain:
        calls = [speak(chain, stream=True, max_new_tokens=4000) for _ in range(20)]
        await until(lambda: chain.num_held == 40)
        for call in calls:
            await call.leave()
        await until(lambda: chain.codec_engine.stats().num_active == 0)
        await until(lambda: chain.num_held == 0)


async def test_models_that_share_the_codec_are_told_apart(open_chain, make_checkpoint):
    models = {name: make_checkpoint(name, "custom_voice_large") for name in ("one", "two")}
    async with open_chain(models=models) as chain:
        for name in models:
            call = await speak(chain, model=name).finish()
            assert (call.status, call.headers["x-num-frames"]) == (200, "9")
            (request,) = chain.talker_engines[name].requests
            assert request.model == name


async def test_without_its_own_engine_streams_are_cut_and_requests_refused_at_once(open_chain, monkeypatch):
    """No other codec can be reached from here, and Serve replaces a replica only when its calls are over."""
    for_ever = {"resume_timeout_s": 3600.0, "first_audio_timeout_s": 3600.0}
    async with open_chain(talker=ENDLESS, **for_ever) as chain:

        def dead(*_):
            raise EngineDown("the Codec engine's process has ended")

        call = speak(chain, stream=True, max_new_tokens=4000)
        await call.wait_for_parts(2)
        monkeypatch.setattr(chain.codec_engine, "check_health", dead)
        monkeypatch.setattr(chain.codec_engine, "open", dead)
        (request,) = chain.talker_engine.requests
        chain.codec._outbox.put(request.request_id, EngineDown("the Codec engine's process has ended"))
        chain.codec._outbox.flush()
        async with asyncio.timeout(30):
            await call.task
            refused = await speak(chain).finish()
        assert isinstance(call.error, StreamLost)
        assert not call.is_complete
        assert (refused.status, json.loads(refused.body)["error"]["code"]) == (503, "unavailable")
        await until(lambda: chain.talker_engine.stats().num_active == 0)


async def test_a_talker_that_died_is_still_another_matter(open_chain):
    """The same error, with the codec's own engine alive: another Talker goes on."""
    async with open_chain(talker=ENDLESS, resume_timeout_s=3600.0) as chain:
        call = speak(chain, stream=True, max_new_tokens=4000)
        await call.wait_for_parts(2)
        (request,) = chain.talker_engine.requests
        chain.codec._outbox.put(request.request_id, EngineDown("the talker is gone"))
        chain.codec._outbox.flush()
        await until(lambda: len(chain.talker_engine.requests) == 2)
        assert chain.talker_engine.requests[1].resume is not None
        await call.leave()
