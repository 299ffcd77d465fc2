"""Both clients against the real API: what they hand over is what the server sent, and leaving leaves nothing behind."""

import asyncio
import base64
import io
import itertools
import socket
import struct
import threading
import wave

import httpx
import pytest

from deployments.client import (
    AsyncClient,
    AudioDelta,
    Client,
    ServerError,
    SpeechDone,
    StreamCut,
)
from deployments.client.wire import SseReader, base_url, session_url
from tests.clips import wav_clip
from tests.deployments.test_api_keys import KEYS, hashes_of
from tests.deployments.test_websocket import pcm_of
from tests.fakes import Script, until

FIELDS = {"response_format": "pcm", "seed": 7}
SLOW = Script(num_frames=3000, seconds_per_item=0.5)  # a minute of work, if nobody leaves


class Both:
    """One client's verbs, as coroutines, whichever kind it is. Streams come as lists of their parts."""

    def __init__(self, kind, url, **others):
        self._is_async = kind == "async"
        self.client = (AsyncClient if self._is_async else Client)(url, **others)

    async def call(self, verb, *args, **kwargs):
        bound = getattr(self.client, verb)
        return await (bound(*args, **kwargs) if self._is_async else asyncio.to_thread(bound, *args, **kwargs))

    async def parts(self, verb, *args, take=None, told=None, **kwargs):
        """Of `stream`, `events`, or a session's `speak`; at most `take` of them, then it leaves."""
        texts = kwargs.pop("texts", None)
        pick = {
            "stream": iter,
            "events": lambda opened: opened.events(),
            "session": lambda s: s.speak(texts),
        }[verb]
        if not self._is_async:

            def run():
                with getattr(self.client, verb)(*args, **kwargs) as opened:
                    if told is not None:
                        told.append(opened)
                    return list(itertools.islice(pick(opened), take))

            return await asyncio.to_thread(run)
        pick = (lambda opened: opened) if verb == "stream" else pick
        found = []
        async with getattr(self.client, verb)(*args, **kwargs) as opened:
            if told is not None:
                told.append(opened)
            async for part in pick(opened):
                found.append(part)
                if len(found) == take:
                    break
        return found

    async def ask(self, verb, text, **fields):
        if verb == "speak":
            return await self.call("speak", text, **fields)
        return await self.parts(verb, *([] if verb == "session" else [text]), texts=text, **fields)

    async def close(self):
        await self.call("close")


@pytest.fixture(params=["sync", "async"])
def both(request):
    return lambda url, **others: Both(request.param, url, **others)


# ---------------------------------------------------------------- speech
async def test_whole_streamed_events_and_session_are_the_same_audio(serving, both):
    async with serving(talker=Script(num_frames=30)) as chain:
        client, told = both(chain.url), []
        whole = await client.call("speak", "Hello there.", voice="vivian", **FIELDS)
        streamed = await client.parts("stream", "Hello there.", voice="vivian", told=told, **FIELDS)
        *deltas, done = await client.parts("events", "Hello there.", voice="vivian", **FIELDS)
        spoken = await client.parts("session", voice="vivian", texts="Hello there.", told=told, **FIELDS)
        await client.close()
    assert whole.audio == b"".join(streamed) == b"".join(spoken) == pcm_of(30)
    assert b"".join(delta.audio for delta in deltas) == pcm_of(30)
    assert all(isinstance(delta, AudioDelta) for delta in deltas)
    assert len(streamed) > 1
    assert (whole.seed, whole.num_frames, whole.finish_reason, whole.sample_rate_hz) == (7, 30, "stop", 24000)
    assert isinstance(done, SpeechDone)
    assert (done.seed, done.num_frames, done.finish_reason) == (7, 30, "stop")
    assert done.audio_seconds == whole.audio_seconds == 2.4
    assert (told[0].seed, told[0].sample_rate_hz, told[1].configured["seed"]) == (7, 24000, 7)


async def test_a_whole_answer_is_a_file(serving, both, tmp_path):
    async with serving() as chain:
        client = both(chain.url)
        speech = await client.call("speak", "Hello there.")
        await client.close()
    speech.save(tmp_path / "hello.wav")
    with wave.open(str(tmp_path / "hello.wav")) as reader:
        assert reader.getnframes() == speech.num_frames * 1920
    assert speech.content_type == "audio/wav"


@pytest.mark.parametrize("verb", ["stream", "events", "session"])
async def test_leaving_early_frees_everything(serving, both, verb):
    async with serving(talker=SLOW) as chain:
        client = both(chain.url)
        assert (
            len(await client.ask(verb, "Hello there. How are you?", take=2, max_new_tokens=3000, **FIELDS))
            == 2
        )
        await client.close()
        await until(lambda: chain.num_held == 0)


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize("verb", ["speak", "stream", "events", "session"])
async def test_a_refusal_is_the_servers_words_with_the_field(serving, both, verb):
    async with serving() as chain:
        client = both(chain.url)
        with pytest.raises(ServerError, match="unknown voice 'nobody'; accepted: ") as caught:
            await client.ask(verb, "Hello.", voice="nobody")
        await client.close()
    assert (caught.value.param, caught.value.code) == ("voice", "unknown_voice")
    assert caught.value.status == (None if verb == "session" else 400)


async def test_the_key_comes_from_the_caller_or_the_environment(serving, both, monkeypatch):
    async with serving(api_key_hashes=hashes_of(*KEYS)) as chain:
        client = both(chain.url)
        for verb in ("models", "session"):
            with pytest.raises(ServerError) as caught:
                await (client.call("models") if verb == "models" else client.parts("session", texts="Hello."))
            assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
        await client.close()
        monkeypatch.setenv("QWEN3TTS_API_KEY", KEYS[0])
        for client in (both(chain.url, api_key=KEYS[1]), both(chain.url)):
            assert len(await client.call("models")) == 3
            assert await client.parts("session", texts="Hello.", **FIELDS)
            await client.close()


async def test_a_stream_that_is_cut_never_looks_whole(serving, both):
    breaking = Script(num_frames=60, seconds_per_item=0.05, fail_after_frames=12)
    async with serving(talker=breaking) as chain:
        client = both(chain.url)
        with pytest.raises(StreamCut):
            await client.parts("stream", "Hello there.", **FIELDS)
        for verb in ("events", "session"):
            with pytest.raises(ServerError, match="the server failed on this request"):
                await client.ask(verb, "Hello.", **FIELDS)
        await client.close()


@pytest.mark.parametrize("verb", ["stream", "events"])
async def test_a_connection_that_is_reset_is_a_cut_too(both, verb):
    """As by a machine that goes down."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/pcm\r\nx-sample-rate-hz: 24000\r\nx-seed: 1\r\n"
    told = []

    async def reset(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
        await writer.drain()
        await until(lambda: told)  # or the reset would overtake the header
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.transport.abort()

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        client = both(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(StreamCut):
            await client.ask(verb, "Hello.", told=told)
        await client.close()


async def test_a_full_server_says_when_to_try_again(serving, both):
    async with serving(talker=Script(capacity=0)) as chain:
        client = both(chain.url)
        with pytest.raises(ServerError) as caught:
            await client.call("speak", "Hello.")
        await client.close()
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "overloaded", 3.0)


async def test_nobody_there_is_httpx_s_own_error(both):
    client = both("http://127.0.0.1:1")
    with pytest.raises(httpx.ConnectError):
        await client.call("models")
    await client.close()


def test_events_end_with_the_last_one_or_not_at_all():
    reader = SseReader()
    lines = [
        "event: speech.audio.delta",
        'data: {"type": "speech.audio.delta",',
        'data: "audio": "AAA="}',
        "",
    ]
    assert [reader.feed(line) for line in lines] == [None, None, None, AudioDelta(b"\0\0")]
    with pytest.raises(StreamCut):
        reader.finish()
    with pytest.raises(ServerError, match="broken"):
        [
            reader.feed(line)
            for line in ('data: {"type": "speech.audio.error", "error": {"message": "broken"}}', "")
        ]


# ---------------------------------------------------------------- sessions
async def test_text_that_comes_bit_by_bit_is_spoken_while_it_comes(serving):
    async with serving() as chain, AsyncClient(chain.url) as client, client.session(**FIELDS) as session:
        heard = asyncio.Event()

        async def words():
            for letter in "Hello there. H":
                yield letter
            await heard.wait()  # not before the first sentence is heard
            yield "ow are you?"

        parts = []
        async for part in session.speak(words()):
            parts.append(part)
            heard.set()
    assert b"".join(parts) == pcm_of(9) + pcm_of(9, piece=1)


async def test_one_utterance_after_another_each_with_its_own_audio(serving, both):
    async with serving() as chain:

        def run():
            with Client(chain.url) as client, client.session(**FIELDS) as session:
                first = b"".join(session.speak(iter(["One. ", "Two."])))
                next(session.speak("Three. Four. " * 20))  # and leave
                session_again = b"".join(session.speak("Five."))
                session.configure(**{**FIELDS, "seed": 8})
                return first, session_again, b"".join(session.speak("Six."))

        first, again, other = await asyncio.to_thread(run)
        await until(lambda: chain.num_held == 0)
    assert first == pcm_of(9) + pcm_of(9, piece=1)
    assert again == pcm_of(9)
    assert other == pcm_of(9, seed=8)


async def test_what_the_text_raises_comes_up_and_the_session_can_go_on(serving, both):
    def words():
        yield "One. Tw"
        raise LookupError("no more words")

    async def words_async():
        for word in words():
            yield word

    async with serving() as chain:

        def run():
            with Client(chain.url) as client, client.session(**FIELDS) as session:
                with pytest.raises(LookupError, match="no more words"):
                    list(session.speak(words()))
                return b"".join(session.speak("Again."))

        assert await asyncio.to_thread(run) == pcm_of(9)
        async with AsyncClient(chain.url) as client, client.session(**FIELDS) as session:
            with pytest.raises(LookupError, match="no more words"):
                [part async for part in session.speak(words_async())]
            assert b"".join([part async for part in session.speak("Again.")]) == pcm_of(9)


async def test_a_session_that_the_server_ends_says_why(serving):
    async with serving() as chain, AsyncClient(chain.url) as client, client.session(**FIELDS) as session:
        with pytest.raises(ServerError, match="the limit is 131,072"):
            async for _ in session.speak("x" * 140_000):
                pass
        with pytest.raises(StreamCut) as caught:
            await session.receive()
        assert caught.value.code == "closed_1009"


# ---------------------------------------------------------------- voices, models
async def test_voices_and_models_are_listed_added_and_deleted(serving, both):
    async with serving() as chain:
        client = both(chain.url)
        assert [model["id"] for model in await client.call("models")] == ["tiny", "tiny-design", "tiny-base"]
        assert (await client.call("voices", "tiny"))["default"] == "dylan"
        told = await client.call("add_voice", "ada", wav_clip(), "What it says.")
        assert (told["id"], told["ref_text"]) == ("ada", "What it says.")
        assert "ada" in (await client.call("voices"))["voices"]
        speech = await client.call("speak", "Hello.", model="tiny-base", voice="ada", **FIELDS)
        assert speech.audio == pcm_of(9)
        await client.call("delete_voice", "ada")
        with pytest.raises(ServerError) as caught:
            await client.call("delete_voice", "ada")
        await client.close()
    assert caught.value.status == 404


async def test_a_clip_may_be_a_path_bytes_or_text(serving, both, tmp_path):
    clip = tmp_path / "ada.wav"
    clip.write_bytes(wav_clip())
    async with serving() as chain:
        client = both(chain.url)
        for given in (clip, wav_clip(), base64.b64encode(wav_clip()).decode()):
            fields = {"model": "tiny-base", "ref_audio": given, "x_vector_only_mode": True}
            assert (await client.call("speak", "Hello.", **fields)).num_frames == 9
        assert await client.parts("session", texts="Hello.", **{**fields, "ref_audio": clip})
        await client.close()
        references = {request.reference for request in chain.talker_engines["tiny-base"].requests}
    assert len(references) == 1


def test_addresses(monkeypatch):
    monkeypatch.delenv("QWEN3TTS_URL", raising=False)
    assert base_url(None) == "http://127.0.0.1:8000/"
    monkeypatch.setenv("QWEN3TTS_URL", "https://tts.example/prefix/")
    assert base_url(None) == "https://tts.example/prefix/"
    assert base_url("http://host:1/v1") == "http://host:1/"
    assert session_url("https://tts.example/prefix/") == "wss://tts.example/prefix/v1/audio/speech/stream"


# ---------------------------------------------------------------- OpenAI's client
async def test_openai_s_client_works_streaming_too(serving):
    from openai import AsyncOpenAI, BadRequestError, OpenAI

    async with serving(
        talker=Script(num_frames=60, permits=threading.Semaphore(6 + 1)), voice_aliases={"alloy": "vivian"}
    ) as chain:  # the first is whole, of the second the first item alone is made

        def run():
            with OpenAI(base_url=f"{chain.url}/v1", api_key="none") as client:
                whole = client.audio.speech.create(model="tiny", voice="alloy", input="Hello there.")
                names = [model.id for model in client.models.list()]
                with pytest.raises(BadRequestError) as caught:
                    client.audio.speech.create(model="tiny", voice="nobody", input="Hello.")
                return whole.content, names, caught.value

        whole, names, error = await asyncio.to_thread(run)
        async with AsyncOpenAI(base_url=f"{chain.url}/v1", api_key="none") as client:
            parts, begun = [], []
            async with client.audio.speech.with_streaming_response.create(
                model="tiny",
                voice="alloy",
                input="Hello there.",
                response_format="pcm",
                extra_body={"stream": True, "seed": 7},
            ) as response:
                async for part in response.iter_bytes():
                    parts.append(part)
                    begun.append(chain.num_held)
                    chain.talker_engine.script.permits.release(5)
                seed = response.headers["x-seed"]
    with wave.open(io.BytesIO(whole)) as reader:
        assert reader.getnframes() == 60 * 1920
    assert names == ["tiny", "tiny-design", "tiny-base"]
    assert (error.param, error.code, error.status_code) == ("voice", "unknown_voice", 400)
    assert b"".join(parts) == pcm_of(60)
    assert seed == "7"
    assert begun[0] > 0  # it was still being made as the first part came
