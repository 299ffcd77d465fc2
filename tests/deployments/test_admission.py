"""Beyond what the engines hold: refused at once, or given up at the deadline; the rest doesn't notice."""

import json
import threading

import pytest

from tests.clips import as_base64, wav_clip
from tests.deployments.conftest import settled
from tests.fakes import FakeReferenceEncoder, Script, until

SPEECH = "/v1/audio/speech"
NUM_ADMITTED = 40


def speak(chain, **fields):
    body = json.dumps({"input": "Hello there.", "seed": 3, "response_format": "pcm", **fields}).encode()
    return chain.call("POST", SPEECH, body, content_type="application/json")


def error_of(call):
    return json.loads(call.body)["error"]


# ---------------------------------------------------------------- beyond slots and queue
async def test_a_burst_beyond_the_limit_is_refused_at_once_and_frees_everything(open_chain):
    """known_faults row 26: no queue without a bound; health and running streams don't notice."""
    slow = Script(num_frames=2000, seconds_per_item=0.02, capacity=8)
    async with open_chain(talker=slow) as chain:
        await until(lambda: not chain.ingress._readiness.problems())
        running = [speak(chain, stream=True, max_new_tokens=2000) for _ in range(8)]
        await until(lambda: chain.talker_engine.stats().num_active == 8)
        burst = [speak(chain, stream=bool(number % 2)) for number in range(100)]
        health = chain.call("GET", "/health")
        for call in burst:
            await call.finish()
            assert (call.status, error_of(call)["code"]) == (503, "overloaded")
            assert int(call.headers["retry-after"]) >= 1
        assert not any(call.task.done() for call in running), "the refused waited for room"
        assert (await health.finish()).status == 200
        whole = await running[0].finish()
        assert (whole.status, len(whole.body)) == (200, 2000 * 3840)
        for call in running[1:]:
            await call.leave()
        await until(lambda: chain.num_held == 0)
        assert (await speak(chain, max_new_tokens=5).finish()).status == 200


class HeldSecond(FakeReferenceEncoder):
    """Encodes the first clip; every other waits for ever."""

    def __init__(self):
        super().__init__()
        self.released, self.clips = threading.Event(), set()

    def _run(self, clip, key, in_context):
        self.clips.add(clip.digest)
        assert len(self.clips) == 1 or self.released.wait(60)
        return super()._run(clip, key, in_context)


async def test_while_engines_are_full_nothing_is_done_for_a_request(open_base):
    """No clip is encoded and no engine asked; until a stream ends."""
    known, other = (
        {"ref_audio": as_base64(wav_clip(seconds)), "x_vector_only_mode": True} for seconds in (1.5, 2.0)
    )
    encoder, slow = HeldSecond(), Script(num_frames=2000, seconds_per_item=0.3, capacity=1)  # 24 s by itself
    async with open_base(encoder=encoder, talker=slow) as chain:
        chain.ingress._models.default.chains.admission._clock = lambda: 100.0
        running = speak(chain, **known, stream=True, max_new_tokens=2000)
        await running.wait_for_parts(1)  # its first audio, come after a refusal, would open the door again
        for clip in (known, known, known, other, known, other):
            assert (await speak(chain, **clip).finish()).status == 503
        assert len(chain.talker_engine.requests) == 1
        assert len(encoder.clips) == 1
        await running.leave()
        await until(lambda: chain.num_held == 0)
        assert (await speak(chain, **known, max_new_tokens=5).finish()).status == 200
        encoder.released.set()


async def test_as_many_as_the_limit_are_all_served(open_chain):
    """known_faults row 27: what is advertised is served, without one error."""
    async with open_chain(talker=Script(num_frames=5, capacity=NUM_ADMITTED)) as chain:
        for _ in range(3):
            calls = [speak(chain, seed=seed, stream=bool(seed % 2)) for seed in range(NUM_ADMITTED)]
            assert {(await call.finish()).status for call in calls} == {200}
            await until(lambda: chain.num_held == 0)


# ---------------------------------------------------------------- the deadline
@pytest.mark.parametrize("slow", ["talker", "codec"])
@pytest.mark.parametrize("mode", [{}, {"stream": True}, {"stream_format": "sse"}])
async def test_no_audio_by_the_deadline_is_a_504_that_frees_everything(open_chain, slow, mode):
    never = Script(num_frames=60, seconds_per_item=3600)
    async with open_chain(**{slow: never}, first_audio_timeout_s=0.15) as chain:
        call = await speak(chain, **mode).finish()
        assert (call.status, error_of(call)["code"]) == (504, "first_audio_timeout")
        assert "0.15 s" in error_of(call)["message"]
        assert error_of(call)["type"] == "server_error"
        await until(lambda: chain.num_held == 0)


@pytest.mark.parametrize("mode", [{}, {"stream": True}])
async def test_the_deadline_is_for_the_first_audio_alone(open_chain, skip, mode):
    slow, passed_on = Script(num_frames=60, permits=threading.Semaphore(1)), []
    async with open_chain(talker=slow, first_audio_timeout_s=300.0) as chain:
        decode = chain.codec.decode

        async def noted(request):
            async for item in decode(request):
                yield item
                passed_on.append(item)

        chain.codec.decode = noted
        call = speak(chain, **mode)
        await until(lambda: passed_on)
        await settled()
        skip(301)
        await settled()
        slow.permits.release(5)
        await call.finish()
        assert (call.status, len(call.body)) == (200, 60 * 3840)


class HeldEncoder(FakeReferenceEncoder):
    """Encodes nothing before it is released."""

    def __init__(self):
        super().__init__()
        self.has_begun, self.released = threading.Event(), threading.Event()

    def _run(self, clip, key, in_context):
        self.has_begun.set()
        assert self.released.wait(60)
        return super()._run(clip, key, in_context)


async def test_a_clip_that_is_encoded_too_long_meets_the_same_deadline(open_base, skip):
    encoder = HeldEncoder()
    clone = {"ref_audio": as_base64(wav_clip()), "x_vector_only_mode": True}
    async with open_base(encoder=encoder, first_audio_timeout_s=300.0) as chain:
        call = speak(chain, **clone)
        await until(encoder.has_begun.is_set)
        skip(301)
        await call.finish()
        assert (call.status, error_of(call)["code"]) == (504, "first_audio_timeout")
        assert chain.talker_engine.requests == []
        encoder.released.set()
        assert (await speak(chain, **clone).finish()).status == 200, "what was encoded meanwhile is kept"


async def test_one_clock_runs_over_all_the_waits(open_base, skip):
    """Neither the clip nor the first frame takes longer than is given, and both together do."""
    encoder = HeldEncoder()
    clone = {"ref_audio": as_base64(wav_clip()), "x_vector_only_mode": True}
    slow = Script(num_frames=1, permits=threading.Semaphore(0))
    async with open_base(encoder=encoder, talker=slow, first_audio_timeout_s=300.0) as chain:
        call = speak(chain, **clone)
        await until(encoder.has_begun.is_set)
        skip(200)
        encoder.released.set()
        await until(lambda: len(chain.talker_engine.requests) == 1)
        skip(200)
        assert (await call.finish()).status == 504
        await until(lambda: chain.num_held == 0)
        call = speak(chain, **clone)
        await until(lambda: len(chain.talker_engine.requests) == 2)
        skip(200)
        await settled()
        slow.permits.release(2)
        assert (await call.finish()).status == 200, "the clip is remembered"


async def test_0_is_no_deadline(open_chain):
    async with open_chain(talker=Script(seconds_per_item=0.2), first_audio_timeout_s=0) as chain:
        assert (await speak(chain).finish()).status == 200
