"""Formats, sample rates and speed over HTTP, on the whole chain with fake engines that sing a tone.

Rows are those of the list of known faults: 21 headers, 22 WAV sizes, 23 flushing, 25 speed.
"""

import base64
import io
import json
import re
import threading
import wave

import numpy as np
import pytest

import tests.fakes
from qwen3tts_core.audio import compressed
from qwen3tts_core.audio.encoding import MEDIA_TYPES, Encoder
from tests.fakes import Script, until
from tests.outside_decoder import decode, peak_hz, tone

NUM_FRAMES = 37
NUM_SAMPLES = NUM_FRAMES * 1920
MODES = {"whole": {}, "streamed": {"stream": True}, "sse": {"stream_format": "sse"}}
TONE = np.frombuffer(tone(100 * 1920), "<i2").reshape(100, 1920)


def sing(codes, samples_per_frame):
    """Each frame is its own piece of one long 440 Hz tone; the frame's number is in its codes."""
    numbers = [
        (int(code) - 3 * 7) * pow(31, -1, 2048) % 2048 for code in codes[:, 0]
    ]  # of fake_codes(seed=3)
    return TONE[numbers].tobytes()


@pytest.fixture(autouse=True)
def singing(monkeypatch):
    monkeypatch.setattr(tests.fakes, "fake_pcm", sing)


def speak(chain, **fields):
    body = json.dumps({"input": "Hello there.", "seed": 3, **fields}).encode()
    return chain.call("POST", "/v1/audio/speech", body, content_type="application/json")


def audio_of(call):
    if not call.headers["content-type"].startswith("text/event-stream"):
        return call.body
    data = [line.removeprefix(b"data: ") for line in call.body.split(b"\n") if line.startswith(b"data: ")]
    return b"".join(base64.b64decode(json.loads(line).get("audio", "")) for line in data)


def surplus(audio_format):
    """(least, most) more samples than were spoken, at 24 kHz: the table in compressed.py."""
    return {"mp3": (0, 576), "aac": (1024, 2048)}.get(audio_format, (0, 0))


@pytest.mark.parametrize("mode", ["whole", "streamed"])
@pytest.mark.parametrize(
    ("audio_format", "media_type", "magic"),
    [
        ("wav", "audio/wav", rb"RIFF....WAVE"),
        ("pcm", "audio/pcm", b""),
        ("mp3", "audio/mpeg", rb"\xff[\xf3\xfb]"),
        ("opus", "audio/ogg; codecs=opus", rb"OggS.*OpusHead"),
        ("aac", "audio/aac", rb"\xff\xf1"),
        ("flac", "audio/flac", rb"fLaC"),
    ],
)
async def test_the_content_type_is_what_the_bytes_are(open_chain, audio_format, media_type, magic, mode):
    async with open_chain(talker=Script(num_frames=9)) as chain:
        call = await speak(chain, response_format=audio_format, **MODES[mode]).finish()
    assert call.headers["content-type"] == media_type
    assert re.match(magic, call.body, re.DOTALL)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("audio_format", MEDIA_TYPES)
async def test_rows_23_and_25_every_format_is_whole_at_its_speed(open_chain, tmp_path, audio_format, mode):
    async with open_chain(talker=Script(num_frames=NUM_FRAMES)) as chain:
        for speed in (1, 2):
            call = await speak(chain, response_format=audio_format, speed=speed, **MODES[mode]).finish()
            assert (call.status, call.is_complete) == (200, True)
            data = audio_of(call)
            if audio_format == "pcm":
                samples, rate = np.frombuffer(data, "<i2"), 24_000
            else:
                samples, rate = decode(data, tmp_path)
            least, most = surplus(audio_format)
            assert least <= len(samples) * 24_000 / rate - NUM_SAMPLES / speed <= most
            assert peak_hz(samples, rate) == pytest.approx(440, abs=2)
            if mode == "whole":
                assert float(call.headers["x-audio-seconds"]) == pytest.approx(2.96 / speed)
                assert int(call.headers["content-length"]) == len(data)


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 48_000])
@pytest.mark.parametrize("mode", ["whole", "streamed"])
async def test_row_22_sizes_and_rates_are_true_at_every_rate(open_chain, tmp_path, rate, mode):
    async with open_chain(talker=Script(num_frames=NUM_FRAMES)) as chain:
        call = await speak(chain, sample_rate=rate, **MODES[mode]).finish()
    assert call.headers["x-sample-rate-hz"] == str(rate)
    num_samples = NUM_SAMPLES * rate // 24_000
    samples, told_rate = decode(call.body, tmp_path)
    assert (len(samples), told_rate) == (num_samples, rate)
    if mode == "whole":
        with wave.open(io.BytesIO(call.body)) as reader:
            assert (reader.getnframes(), reader.getframerate()) == (num_samples, rate)
    else:
        assert call.body[4:8] == call.body[40:44] == b"\xff" * 4


@pytest.mark.parametrize("audio_format", ["wav", "flac"])
@pytest.mark.parametrize("mode", ["streamed", "sse"])
async def test_row_21_one_header_at_byte_0(open_chain, audio_format, mode):
    async with open_chain(talker=Script(num_frames=60)) as chain:
        call = await speak(
            chain, response_format=audio_format, sample_rate=16_000, speed=1.5, **MODES[mode]
        ).finish()
    magic = {"wav": b"RIFF", "flac": b"fLaC"}[audio_format]
    assert audio_of(call).startswith(magic)
    assert audio_of(call).count(magic) == 1


@pytest.mark.parametrize("audio_format", ["mp3", "opus", "aac", "flac"])
async def test_encoded_bytes_leave_before_the_last_frame_is_made(open_chain, audio_format):
    script = Script(num_frames=60, permits=threading.Semaphore(3))  # of six
    async with open_chain(talker=script) as chain:
        call = speak(chain, response_format=audio_format, speed=0.9, stream=True)
        await call.wait_for_parts(1)
        assert not call.is_complete
        script.permits.release(3)
        await call.finish()
    assert len(call.parts) >= 4


@pytest.mark.parametrize("mode", MODES)
async def test_the_same_request_gives_the_same_bytes(open_chain, mode):
    async with open_chain(talker=Script(num_frames=9)) as chain:
        calls = [await speak(chain, response_format="opus", **MODES[mode]).finish() for _ in range(2)]
    assert audio_of(calls[0]) == audio_of(calls[1])


@pytest.mark.parametrize("mode", MODES)
async def test_a_format_without_its_encoder_is_refused_and_never_wav(open_chain, monkeypatch, mode):
    monkeypatch.setitem(compressed._KINDS, "opus", compressed._KINDS["opus"]._replace(codec="libnosuch"))
    async with open_chain() as chain:
        call = await speak(chain, response_format="opus", **MODES[mode]).finish()
        assert call.status == 400
        error = json.loads(call.body)["error"]
        assert (error["code"], error["param"]) == ("encoder_unavailable", "response_format")
        assert "libnosuch" in error["message"]
        assert chain.talker_engine.requests == []


@pytest.mark.parametrize("mode", ["whole", "streamed"])
async def test_leaving_frees_the_encoder_with_the_rest(open_chain, monkeypatch, mode):
    closed, close = threading.Event(), Encoder.close
    monkeypatch.setattr(Encoder, "close", lambda self: (close(self), closed.set()))
    slow = Script(num_frames=2_000, permits=threading.Semaphore(6))  # of the tone there are 100 frames
    async with open_chain(talker=slow) as chain:
        call = speak(chain, response_format="mp3", speed=1.5, **MODES[mode])
        if mode == "streamed":
            await call.wait_for_parts(2)
        else:
            await until(lambda: chain.num_held > 0)
        await call.leave()
        await until(lambda: closed.is_set() and chain.num_held == 0)
