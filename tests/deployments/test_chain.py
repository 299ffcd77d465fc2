"""Talker and Codec as deployments: what they forward, and what they give back."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from qwen3tts_core.errors import EngineDown, EngineFault, Overloaded
from qwen3tts_core.types import (
    AudioChunk,
    DrawParams,
    FrameBatch,
    PrefillPlan,
    Resume,
    Sampling,
    SpeechRequest,
)
from tests.fakes import NUM_GROUPS, Script, fake_codes, mortal, until


def request(request_id="r1", seed=3, max_frames=10**6):
    plan = PrefillPlan((1,), (2,), (3,))
    sampling = Sampling(DrawParams(), DrawParams())
    return SpeechRequest(request_id, plan, sampling, seed, max_frames, model="tiny")


def codes_of(items):
    return np.concatenate([np.frombuffer(item.codes, "<i2").reshape(-1, NUM_GROUPS) for item in items])


async def collect(stream, kind):
    return [kind.from_bytes(item) async for item in stream]


def other_tasks():
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_frames_come_in_ramp_sizes_and_the_last_item_says_why(open_either):
    async with open_either(talker=Script(num_frames=60)) as chain:
        batches = await collect(chain.talker.generate(request()), FrameBatch)
        assert [batch.num_frames for batch in batches] == [1, 3, 8, 16, 25, 7]
        assert [batch.finish for batch in batches] == [None] * 5 + ["stop"]
        assert (codes_of(batches) == fake_codes(3, 0, 60)).all()


async def test_audio_carries_every_frame_once_and_its_codes(open_either):
    async with open_either(talker=Script(num_frames=60)) as chain:
        chunks = await collect(chain.codec.decode(request()), AudioChunk)
        assert (codes_of(chunks) == fake_codes(3, 0, 60)).all()
        pcm = np.frombuffer(b"".join(chunk.pcm for chunk in chunks), "<i2")
        assert (pcm == np.repeat(fake_codes(3, 0, 60)[:, 0], 1920)).all()
        assert chunks[-1].finish == "stop"


async def test_the_talker_link_uses_the_transport_it_was_given(open_chain):
    async with open_chain() as chain:
        assert {"stream": True, "_by_reference": True} in chain.talker_handle.options_seen
        assert {"stream": True, "_by_reference": False} in chain.codec_handle.options_seen


@pytest.mark.parametrize("num_items", [0, 1, 3])
async def test_a_reader_who_leaves_frees_slot_and_row_at_once(open_either, num_items):
    tasks_before = other_tasks()
    async with open_either(talker=Script(num_frames=20_000, seconds_per_item=0.01)) as chain:
        async with aclosing(chain.codec.decode(request())) as audio:
            for _ in range(num_items):
                await anext(audio)
        await chain.until_held(0)
    await until(lambda: other_tasks() == tasks_before)


async def test_a_cancelled_reader_frees_slot_and_row(open_either):
    async with open_either(talker=Script(num_frames=20_000, seconds_per_item=0.01)) as chain:
        reading = asyncio.create_task(collect(chain.codec.decode(request()), AudioChunk))
        await chain.until_held(2)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await chain.until_held(0)


async def test_a_finished_stream_holds_nothing(open_chain):
    async with open_chain() as chain:
        await collect(chain.codec.decode(request()), AudioChunk)
        await until(lambda: chain.num_held == 0)


async def test_frames_do_not_wait_for_the_reader_of_the_audio(open_either):
    async with open_either(talker=Script(num_frames=60)) as chain:
        async with aclosing(chain.codec.decode(request())) as audio:
            await anext(audio)
            await chain.until_held(1)
            rest = await collect(audio, AudioChunk)
        assert sum(chunk.num_frames for chunk in rest) == 59


@pytest.mark.parametrize("full", ["talker", "codec"])
async def test_a_refusal_reaches_the_caller_as_itself_and_leaves_nothing_behind(open_either, full):
    scripts = {"talker": Script(num_frames=20_000, seconds_per_item=0.01), "codec": Script()}
    scripts[full].capacity = 1
    async with open_either(**scripts) as chain:
        async with aclosing(chain.codec.decode(request("first"))) as first:
            await anext(first)
            with pytest.raises(Overloaded) as caught:
                await collect(chain.codec.decode(request("second")), AudioChunk)
            assert caught.value.retry_after_s == 2.5
            await chain.until_held(2)
        await chain.until_held(0)
        await collect(chain.codec.decode(request("third", max_frames=5)), AudioChunk)


@pytest.mark.parametrize("broken", ["talker", "codec"])
async def test_a_fault_in_either_engine_reaches_the_reader_after_the_good_audio(open_either, broken):
    async with open_either(
        **{"talker": Script(num_frames=60), broken: Script(num_frames=60, fail_after_frames=12)}
    ) as chain:
        chunks = []

        async def read_all():
            async for item in chain.codec.decode(request()):
                chunks.append(AudioChunk.from_bytes(item))  # noqa: PERF401 - kept also when it breaks

        with pytest.raises(EngineFault, match="page 7"):
            await read_all()
        assert all(chunk.finish is None for chunk in chunks)
        assert sum(chunk.num_frames for chunk in chunks) <= 12
        await chain.until_held(0)


@pytest.mark.parametrize("num_chunks", range(1, 6))
async def test_a_chain_that_is_opened_again_goes_on_after_the_frames_it_is_given(open_chain, num_chunks):
    async with open_chain(talker=Script(num_frames=60)) as chain:
        whole = await collect(chain.codec.decode(request("first")), AudioChunk)
        sent = whole[:num_chunks]
        resume = Resume(b"".join(c.codes for c in sent), tuple(c.num_frames for c in sent))
        again = replace(request("again"), resume=resume)
        assert await collect(chain.codec.decode(again), AudioChunk) == whole[num_chunks:]
        assert chain.codec_engine.cuts_replayed == [()]


async def test_where_bytes_count_the_codec_is_told_the_cuts(open_chain):
    async with open_chain(talker=Script(num_frames=60)) as chain:
        chain.codec._keeps_bytes = True
        again = replace(request(), resume=Resume(fake_codes(3, 0, 4).tobytes(), (1, 3)))
        await collect(chain.codec.decode(again), AudioChunk)
        assert chain.codec_engine.cuts_replayed == [(1, 3)]


async def test_a_dead_talker_is_told_as_such_and_not_in_the_name_of_a_replica(open_chain):
    """Ray's router would take the name for that of the codec's replica, and stop calling it."""
    async with open_chain(talker=Script(num_frames=60)) as chain:
        chain.talker.generate = mortal(chain.talker.generate, 1)
        with pytest.raises(EngineDown, match="ActorDiedError"):
            await collect(chain.codec.decode(request()), AudioChunk)


async def test_a_talker_that_stops_without_a_word_is_a_fault(open_chain):
    async with open_chain() as chain:

        async def generate(_):
            yield FrameBatch(0, 1, NUM_GROUPS, fake_codes(0, 0, 1).tobytes()).to_bytes()

        chain.talker.generate = generate
        with pytest.raises(EngineFault, match="without a finish"):
            await collect(chain.codec.decode(request()), AudioChunk)


async def test_health_is_the_engines(open_either):
    async with open_either() as chain:
        assert await chain.talker.ready()
        assert await chain.codec.ready()
        chain.stop()
        for deployment in (chain.talker, chain.codec):
            with pytest.raises(EngineFault):
                deployment.check_health()
            with pytest.raises(EngineFault):
                await deployment.ready()
