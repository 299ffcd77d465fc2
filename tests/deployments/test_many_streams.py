"""Many streams at once, over fake engines."""

import asyncio
import json
from itertools import accumulate

import numpy as np
import pytest

from qwen3tts_core.types import AudioChunk, FrameBatch
from tests.fakes import Script, fake_codes, until

pytestmark = pytest.mark.both_shapes

NUM_STREAMS = 64
CHUNKS = [1, 3, 8, 16, 25, 25]


async def test_64_streams_pass_on_each_chunk_at_once_as_one_message_a_hop(open_chain):
    """known_faults row 32: no talker goes on before all 64 clients have heard the last chunk. Counts, not times."""
    talked, decoded = [], []
    may_go_on = [asyncio.Event() for _ in CHUNKS]
    async with open_chain(talker=Script(num_frames=sum(CHUNKS))) as chain:
        generate, decode = chain.talker.generate, chain.codec.decode

        async def in_step(request):
            number = 0
            async for item in generate(request):
                talked.append(FrameBatch.from_bytes(item).num_frames)
                await may_go_on[number].wait()
                number += 1
                yield item

        async def counted(request):
            async for item in decode(request):
                decoded.append(AudioChunk.from_bytes(item).num_frames)
                yield item

        chain.talker.generate, chain.codec.decode = in_step, counted
        calls = [speak(chain, seed) for seed in range(NUM_STREAMS)]
        for event, num_frames in zip(may_go_on, accumulate(CHUNKS), strict=True):
            event.set()
            await until(lambda so_far=num_frames: all(heard(c) == 3840 * so_far for c in calls), timeout_s=60)
        for seed, call in enumerate(calls):
            assert (await call.finish()).body == expected_pcm(seed)
    assert sorted(talked) == sorted(decoded) == sorted(CHUNKS * NUM_STREAMS)


def speak(chain, seed):
    body = {"input": "Hello there.", "seed": seed, "stream": True, "response_format": "pcm"}
    return chain.call("POST", "/v1/audio/speech", json.dumps(body).encode(), content_type="application/json")


def heard(call):
    return sum(len(part) for _, part in call.parts)


def expected_pcm(seed):
    return np.repeat(fake_codes(seed, 0, sum(CHUNKS))[:, 0], 1920).astype("<i2").tobytes()
