"""The ReferenceEncoder deployment over a fake engine: where the decoding happens."""

import asyncio
import pickle
import threading

import numpy as np
import pytest

from deployments.reference_encoder import EncoderSettings, ReferenceEncoder
from qwen3tts_core.audio.clip import ReferenceLimits, read_clip
from qwen3tts_core.errors import EngineFault, InvalidReferenceAudio
from tests.clips import wav_clip
from tests.fakes import FakeReferenceEncoder, until


def open_deployment(engine, **limits):
    return ReferenceEncoder(EncoderSettings("unused", ReferenceLimits(**limits)), lambda _: engine)


async def test_a_file_and_the_clip_read_from_it_are_the_same_voice():
    engine = FakeReferenceEncoder()
    deployment = open_deployment(engine)
    from_file = await deployment.encode(wav_clip(), True, True)
    again = await deployment.encode(pickle.loads(pickle.dumps(from_file.clip)), True)
    assert from_file.voice == again.voice
    assert from_file.encoder == await deployment.fingerprint() == engine.fingerprint
    assert (from_file.num_groups, again.clip) == (16, None)
    assert (await deployment.stats())["num_runs"] == 1


async def test_a_clip_survives_the_way_between_processes():
    clip = read_clip(wav_clip())
    copy = pickle.loads(pickle.dumps(clip))
    assert copy.digest == clip.digest
    np.testing.assert_array_equal(copy.samples, clip.samples)


async def test_the_loop_is_free_while_clips_are_read_and_encoded():
    begun, free = threading.Event(), threading.Event()

    class Held(FakeReferenceEncoder):
        def encode(self, clip, in_context):
            begun.set()
            assert free.wait(60), "the loop stood still"
            return super().encode(clip, in_context)

    deployment = open_deployment(Held())
    encoding = asyncio.create_task(deployment.encode(wav_clip(), False))
    await until(begun.is_set)
    assert await deployment.ready()
    assert not encoding.done()
    free.set()
    await encoding


async def test_reading_and_encoding_happen_on_threads_of_their_own():
    names = []

    class Watched(FakeReferenceEncoder):
        def encode(self, clip, in_context):
            names.append(threading.current_thread().name)
            return super().encode(clip, in_context)

    await open_deployment(Watched()).encode(wav_clip(), False)
    assert names[0].startswith("reference-encoder")


async def test_the_limits_are_the_settings():
    deployment = open_deployment(FakeReferenceEncoder(), max_seconds=3.0)
    await deployment.encode(wav_clip(seconds=2.9), False)
    with pytest.raises(InvalidReferenceAudio, match="expected 1 to 3 s"):
        await deployment.encode(wav_clip(seconds=3.1), False)


async def test_a_clip_that_hangs_in_a_thread_is_unhealthy_and_a_quiet_deployment_never():
    now, leave = [0.0], threading.Event()

    class Hanging(FakeReferenceEncoder):
        def encode(self, clip, in_context):
            assert leave.wait(60)
            return super().encode(clip, in_context)

    deployment = ReferenceEncoder(
        EncoderSettings("unused", ReferenceLimits()), lambda _: Hanging(), clock=lambda: now[0]
    )
    now[0] = 1e6
    deployment.check_health()
    encoding = asyncio.create_task(deployment.encode(wav_clip(), False))
    await until(lambda: deployment._began_at)
    now[0] += 119
    assert await deployment.ready()
    now[0] += 2
    with pytest.raises(EngineFault, match="121 s"):
        deployment.check_health()
    with pytest.raises(EngineFault):
        await deployment.ready()
    leave.set()
    await encoding
    deployment.check_health()


async def test_a_clip_that_was_refused_is_no_longer_in_work():
    deployment = open_deployment(FakeReferenceEncoder())
    with pytest.raises(InvalidReferenceAudio):
        await deployment.encode(b"no audio", False)
    assert not deployment._began_at
