"""Voice clone through the whole stack but Ray: the HTTP app, real deployments, real engines on the tiny Base.

One stack per mode, for all tests of this file.
"""

import asyncio
import dataclasses
import json

import numpy as np
import pytest
import torch

from deployments.codec import Codec
from deployments.engines import CodecSettings, TalkerSettings
from deployments.ingress import Ingress, IngressModel, IngressSettings
from deployments.reference_encoder import EncoderSettings, ReferenceEncoder
from deployments.reference_fetch import FetchPolicy
from deployments.talker import Talker
from qwen3tts_core.audio.clip import ReferenceLimits
from qwen3tts_core.config import CheckpointConfig, CodecEngineConfig, TalkerEngineConfig
from qwen3tts_core.model.codec_decoder import open_codec_decoder
from qwen3tts_core.streaming.chunk_ramp import ChunkRamp
from tests.clips import as_base64, audio_file, wav_clip
from tests.deployments.conftest import GOLDEN
from tests.fakes import AsgiCall, FakeHandle, mortal

BASE = GOLDEN / "base"
CASE = "icl_auto_stream_textshort"
TALKER = TalkerEngineConfig(num_slots=2, max_queued=8, max_positions=512)
CODEC = CodecEngineConfig(num_rows=10)
MODES = {
    "incremental": (TALKER, CODEC),
    "deterministic": (
        dataclasses.replace(TALKER, decode_buckets=(), deterministic=True),
        dataclasses.replace(CODEC, batch_buckets=(), deterministic=True),
    ),
    "window": (TALKER, dataclasses.replace(CODEC, mode="window", left_context_frames=5)),
}
ONE = {"ref_audio": as_base64(wav_clip(pitch_hz=150.0)), "ref_text": "Good morning."}
OTHER = {"ref_audio": as_base64(wav_clip(pitch_hz=400.0)), "ref_text": "Good evening to all of you."}

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Stack:
    def __init__(self, mode, voices_folder):
        talker_config, codec_config = MODES[mode]
        checkpoint = str(BASE)
        self.talker = Talker(
            TalkerSettings(
                checkpoint=checkpoint, engine=talker_config, ramp=ChunkRamp(), device="cpu", dtype="float32"
            )
        )
        talker = FakeHandle(self.talker)
        self.codec = Codec(
            CodecSettings(checkpoint=checkpoint, engine=codec_config, device="cpu", dtype="float32"),
            {"base": talker},
            "object_ref",
        )
        self.encoder = ReferenceEncoder(EncoderSettings(checkpoint, ReferenceLimits()))
        model = IngressModel(checkpoint, "base", talker_config.max_positions, encoder="ReferenceEncoder")
        handles = {
            "Talker": talker,
            "Codec": FakeHandle(self.codec),
            "ReferenceEncoder": FakeHandle(self.encoder),
        }
        self.app = Ingress(
            IngressSettings((model,), voices_folder, FetchPolicy()), handles, "value"
        ).build_http_app()

    def speak(self, **fields):
        body = {"input": "Hello there.", "seed": 7, "max_new_tokens": 30, "response_format": "pcm", **fields}
        headers = [("content-type", "application/json")]
        return AsgiCall(self.app, "POST", "/v1/audio/speech", json.dumps(body).encode(), headers).finish(60)

    def stop(self):
        self.talker._engine.stop()
        self.codec._engine.stop()


@pytest.fixture(scope="module")
def stacks(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    opened = {}

    def get(mode):
        if mode not in opened:
            opened[mode] = Stack(mode, tmp_path_factory.mktemp("voices"))
        return opened[mode]

    yield get
    for stack in opened.values():
        stack.stop()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def golden():
    with np.load(BASE.with_suffix(".npz")) as arrays:
        return {name: arrays[name] for name in arrays.files if name.startswith(("enc/", "wrapper/", "case/"))}


@pytest.fixture(scope="module")
def icl_case(golden):
    """The golden in-context case as a request."""
    spec = json.loads(str(golden[f"case/{CASE}/spec_json"]))
    clip = audio_file(golden["enc/clip_int16"], subtype="PCM_16")
    return {
        "input": spec["text"],
        "language": spec["language"],
        "ref_audio": as_base64(clip),
        "ref_text": spec["ref_text"],
        "non_streaming_mode": not spec["streaming"],
        "temperature": 0,
        "subtalker_temperature": 0,
        "max_new_tokens": len(golden[f"case/{CASE}/greedy_codes"]),
    }


def samples(call):
    assert call.status == 200, call.body
    return np.frombuffer(call.body, "<i2").astype(np.int32)


def assert_near(call, expected):
    found = samples(call) / 32767
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-4 + 0.5 / 32767


@pytest.mark.parametrize("mode", ["incremental", "deterministic"])
async def test_the_golden_in_context_case_sounds_as_the_reference_s(stacks, golden, icl_case, mode):
    """known_faults row 8: every chunk, not just the first."""
    expected = golden[f"wrapper/{CASE}_wav"]
    for _ in range(2):  # primed by decoding its frames, then from the state that was kept
        assert_near(await stacks(mode).speak(**icl_case), expected)


async def test_window_mode_decodes_the_last_reference_frames_before_the_first(stacks, golden, icl_case):
    """known_faults row 8: the reference's tail is the left context."""
    call = await stacks("window").speak(**icl_case)
    reference, frames = golden["enc/codes"], golden[f"case/{CASE}/greedy_codes"]
    left = MODES["window"][1].left_context_frames
    assert len(reference) > left
    assert_near(call, in_windows(reference, frames, left))
    without = in_windows(reference[:0], frames, left)
    assert np.abs(samples(call) / 32767 - without).max() > 1e-2, "the reference makes no difference here"


def in_windows(reference, frames, left):
    """The frames' audio, cut as the ramp cuts them, each piece decoded behind its left context."""
    decoder = open_codec_decoder(BASE, CheckpointConfig.from_checkpoint(BASE).codec)
    codes = torch.tensor(np.concatenate([reference, frames]))
    pieces, first = [], len(reference)
    for size in ChunkRamp().sizes():
        end, start = min(first + size, len(codes)), max(0, first - left)
        pieces.append(decoder.decode(codes[None, start:end])[0, (first - start) * 1920 :].numpy())
        first = end
        if end == len(codes):
            return np.concatenate(pieces)
    raise AssertionError("the ramp has no end")


@pytest.mark.parametrize("mode", ["incremental", "deterministic", "window"])
async def test_two_clones_at_once_sound_as_each_alone(stacks, mode):
    """known_faults row 10: no crosstalk."""
    stack = stacks(mode)
    alone = [samples(await stack.speak(**fields)) for fields in (ONE, OTHER)]
    assert len(alone[0]) != len(alone[1]) or np.abs(alone[0] - alone[1]).max() > 100
    together = [samples(call) for call in await asyncio.gather(stack.speak(**ONE), stack.speak(**OTHER))]
    for apart, joined in zip(alone, together, strict=True):
        assert len(joined) == len(apart)
        assert np.abs(joined - apart).max() <= (0 if mode == "deterministic" else 1)


@pytest.mark.parametrize("mode", ["incremental", "window"])
async def test_five_clones_on_two_slots_all_finish_as_themselves(stacks, mode):
    """known_faults row 11: who waits keeps its reference."""
    stack = stacks(mode)
    bodies = [{**(ONE, OTHER)[i % 2], "seed": i, "x_vector_only_mode": i == 4} for i in range(5)]
    alone = [samples(await stack.speak(**body)) for body in bodies]
    together = [samples(call) for call in await asyncio.gather(*[stack.speak(**body) for body in bodies])]
    for apart, joined in zip(alone, together, strict=True):
        assert len(joined) == len(apart)
        assert np.abs(joined - apart).max() <= 1


async def test_each_clip_and_mode_is_encoded_once(stacks):
    stack = stacks("incremental")
    clip = as_base64(wav_clip(pitch_hz=260.0))
    before = (await stack.encoder.stats())["num_runs"]
    bodies = [{"ref_audio": clip, "ref_text": "Hi.", "x_vector_only_mode": i % 2 == 0} for i in range(8)]
    for call in await asyncio.gather(*[stack.speak(**body, max_new_tokens=2) for body in bodies]):
        assert call.status == 200
    assert (await stack.encoder.stats())["num_runs"] - before == 2


async def test_streamed_and_whole_clones_are_the_same_bytes(stacks):
    stack = stacks("incremental")
    whole, streamed = [await stack.speak(**ONE, stream=stream) for stream in (False, True)]
    assert whole.body == streamed.body
    assert len(streamed.parts) > 2


@pytest.mark.parametrize("victim", ["talker", "codec"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_clone_whose_engines_die_goes_on_as_itself(stacks, monkeypatch, mode, victim):
    """Twice, at its fourth frame and its twelfth: prompt and codec row are made again, the reference first."""
    stack = stacks(mode)
    expected = samples(await stack.speak(**ONE))
    name = "generate" if victim == "talker" else "decode"
    deployment = getattr(stack, victim)
    monkeypatch.setattr(deployment, name, mortal(getattr(deployment, name), 2, 1))
    found = samples(await stack.speak(**ONE, stream=True))
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= (0 if mode == "deterministic" else 1)
