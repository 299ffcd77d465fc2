"""The real engines, on a thread of the replica and in a process of their own: the same bytes, counts and complaints."""

import dataclasses
from pathlib import Path

import pytest
import torch

from deployments.codec import Codec
from deployments.engines import CodecSettings, TalkerSettings
from deployments.talker import Talker
from qwen3tts_core.config import CodecEngineConfig, TalkerEngineConfig
from qwen3tts_core.errors import CheckpointMismatch, InvalidCodes, TextTooLong
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from qwen3tts_core.types import AudioChunk, PrefillPlan, Resume, Sampling, SpeechRequest
from tests.deployments.conftest import TINY
from tests.fakes import FakeHandle

REQUEST = SpeechRequest("r", PrefillPlan((1, 2, 3), (4, 5, 6), (7, 8)), Sampling(), 7, 40, model="tiny")
TALKER = TalkerEngineConfig(num_slots=4, max_queued=0, max_positions=256, deterministic=True)
CODEC = CodecEngineConfig(num_rows=4, deterministic=True)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """In both: a process takes it from the environment, as its replica does from Ray's."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Replicas:
    def __init__(self, home):
        self.talker = Talker(
            TalkerSettings(
                checkpoint=TINY, engine=TALKER, ramp=ChunkRamp(), device="cpu", dtype="float32", home=home
            )
        )
        self.codec = Codec(
            CodecSettings(checkpoint=TINY, engine=CODEC, device="cpu", dtype="float32", home=home),
            {"tiny": FakeHandle(self.talker)},
            "object_ref",
        )

    async def speak(self, request_id, resume=None):
        request = dataclasses.replace(REQUEST, request_id=request_id, resume=resume)
        return [item async for item in self.codec.decode(request)]

    async def counts(self):
        """What is the same wherever it runs."""
        told = {**await self.talker.stats(), **await self.codec.stats()}
        return {
            name: told[name] for name in ("requests", "frames", "prefill_rows", "chunks", "num_rows_in_use")
        }

    def stop(self):
        self.talker._engine.stop()
        self.codec._engine.stop()


async def test_a_seed_is_the_same_bytes_in_either_home():
    """known_faults row 18: asked for again, also in another process."""
    heard, counts = {}, {}
    for home in ("thread", "process"):
        replicas = Replicas(home)
        try:
            whole = await replicas.speak("whole")
            sent = [AudioChunk.from_bytes(item) for item in whole[:3]]
            resume = Resume(b"".join(chunk.codes for chunk in sent), tuple(c.num_frames for c in sent))
            heard[home] = whole, await replicas.speak("again", resume)
            counts[home] = await replicas.counts()
            long = dataclasses.replace(REQUEST, plan=PrefillPlan((1,) * 300, (1,) * 300, ()))
            with pytest.raises(TextTooLong) as refused:
                await anext(replicas.talker.generate(long))
            assert refused.value.limit < 300
            with pytest.raises(InvalidCodes):
                await replicas.speak("wrong", Resume(b"\xff\x7f" * 16, (1,)))
        finally:
            replicas.stop()
    assert heard["thread"] == heard["process"]
    whole, again = heard["process"]
    assert again == whole[3:]
    assert counts["thread"] == counts["process"]
    assert counts["process"]["requests"] == 2


@pytest.fixture
def without_weights(tmp_path):
    for path in Path(TINY).iterdir():
        if path.name != "model.safetensors":
            (tmp_path / path.name).symlink_to(path)
    return str(tmp_path)


async def test_files_that_do_not_fit_stop_the_start_by_name(without_weights):
    settings = TalkerSettings(
        checkpoint=without_weights,
        engine=TALKER,
        ramp=ChunkRamp(),
        device="cpu",
        dtype="float32",
        home="process",
    )
    with pytest.raises(CheckpointMismatch, match="safetensors"):
        Talker(settings)
