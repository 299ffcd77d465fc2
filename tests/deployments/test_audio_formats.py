"""What leaves a response: encoders that keep off the event loop, and server-sent events."""

import asyncio
import base64
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments import audio_formats
from deployments.audio_formats import response_encoder, sse_delta, sse_event
from qwen3tts_core.audio import compressed
from qwen3tts_core.audio.encoding import Encoder
from qwen3tts_core.errors import InvalidRequest
from tests.deployments.conftest import settled
from tests.fakes import until
from tests.outside_decoder import tone


# ---------------------------------------------------------------- encoders
@pytest.mark.parametrize(("audio_format", "speed"), [("mp3", 1), ("wav", 2), ("pcm", 1), ("wav", 1)])
async def test_work_leaves_the_event_loop_and_no_work_stays(audio_format, speed, monkeypatch):
    threads, feed = [], Encoder.feed
    monkeypatch.setattr(Encoder, "feed", lambda *a: (threads.append(threading.current_thread()), feed(*a))[1])
    async with response_encoder(audio_format, 24_000, None, speed, is_streaming=True) as encoder:
        await encoder.feed(tone(1_920))
    is_plain = audio_format in ("wav", "pcm") and speed == 1
    assert (threads[0] is threading.main_thread()) == is_plain


async def test_a_cancelled_stream_gives_its_encoder_back_after_the_call_in_progress(monkeypatch):
    order, entered, may_leave = [], threading.Event(), threading.Event()
    feed, close = Encoder._check_open, Encoder.close

    def slow(self):
        entered.set()
        assert may_leave.wait(60)
        order.append("fed")
        feed(self)

    def closing(self):
        close(self)
        order.append("closed")

    monkeypatch.setattr(Encoder, "_check_open", slow)
    monkeypatch.setattr(Encoder, "close", closing)

    async def stream():
        async with response_encoder("opus", 24_000, 48_000, 1.5, is_streaming=True) as encoder:
            await encoder.feed(tone(1_920))

    task = asyncio.create_task(stream())
    await until(entered.is_set)
    task.cancel()
    await settled()
    assert order == []
    may_leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert order == ["fed", "closed"]


async def test_an_encoder_that_can_t_be_opened_is_an_error_at_once():
    with pytest.raises(InvalidRequest, match="sample_rate"):
        async with response_encoder("mp3", 24_000, 44_100, 1, is_streaming=True):
            pytest.fail("opened")


async def test_opening_is_work_too(monkeypatch):
    threads, opened = [], audio_formats.open_encoder

    def noted(*args, **kwargs):
        threads.append(threading.current_thread())
        return opened(*args, **kwargs)

    monkeypatch.setattr(audio_formats, "open_encoder", noted)
    async with response_encoder("aac", 24_000, None, 1, is_streaming=False) as encoder:
        assert await encoder.feed(tone(1_920)) == b""
        assert (await encoder.finish()).startswith(b"\xff\xf1")
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize(("codec", "num_lines"), [("libnosuch", 1), ("libopus", 0)])
async def test_an_ingress_says_as_it_starts_which_formats_it_will_refuse(
    open_chain, monkeypatch, caplog, codec, num_lines
):
    monkeypatch.setitem(compressed._KINDS, "opus", compressed._KINDS["opus"]._replace(codec=codec))
    async with open_chain():
        lines = [record.message for record in caplog.records if record.name == "deployments.audio_formats"]
    assert lines == ["requests for opus will be refused: no encoder on this machine"] * num_lines


# ---------------------------------------------------------------- server-sent events
@given(st.binary(max_size=100))
def test_a_delta_carries_its_bytes_in_one_event(audio):
    lines = sse_delta(audio).decode().split("\n")
    assert lines[0] == "event: speech.audio.delta"
    assert lines[2:] == ["", ""]
    data = json.loads(lines[1].removeprefix("data: "))
    assert data["type"] == "speech.audio.delta"
    assert base64.b64decode(data["audio"], validate=True) == audio


def test_a_newline_in_a_field_stays_inside_its_event():
    assert sse_event("speech.audio.error", {"error": "a\n\nb"}).count(b"\n") == 3
