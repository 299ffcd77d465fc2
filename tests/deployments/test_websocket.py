"""`/v1/audio/speech/stream` around fake engines: what is said, in which order, and what is left when it ends."""

import asyncio
import base64
import io
import json
import logging
import threading
import wave

import pytest
from starlette.websockets import WebSocket

from deployments.websocket import SocketLimits, SpeechSocket
from deployments.websocket_messages import LOOK_AHEAD_S, MAX_TEXT_MESSAGE_BYTES
from qwen3tts_core.text.sentences import LongText
from tests.clips import form, wav_clip
from tests.deployments.conftest import GOLDEN, TINY
from tests.deployments.test_api_keys import KEYS, hashes_of
from tests.fakes import AsgiSocket, FakeReferenceEncoder, Script, fake_codes, fake_pcm, until

SAMPLES_PER_FRAME, FRAME_S = 1920, 0.08
STREAM = {"stream_audio": True, "response_format": "pcm", "seed": 7}
TWO = "The first sentence is here. And this is the second one."


def pcm_of(num_frames, seed=7, piece=0):
    return fake_pcm(fake_codes(seed, 0, num_frames, piece), SAMPLES_PER_FRAME)


async def configured(chain, *, on_message=None, **fields):
    socket = chain.socket(on_message=on_message)
    socket.send("session.config", **{**STREAM, **fields})
    await socket.wait_for("session.configured")
    return socket


def say(socket, text=TWO):
    socket.send("input.text", text=text)
    socket.send("input.done")


def kinds(socket):
    """Types in the order they came, runs of audio as one."""
    found = []
    for message in socket.messages:
        kind = "audio" if isinstance(message, bytes) else message["type"]
        if kind != "audio" or found[-1] != "audio":
            found.append(kind)
    return found


async def is_free(chain):
    await until(lambda: chain.num_held == 0)


# ---------------------------------------------------------------- what is said
async def test_two_sentences_are_spoken_in_order_with_one_voice_and_one_seed(open_chain):
    async with open_chain(talker=Script(num_frames=9)) as chain:
        socket = await configured(chain, voice="vivian")
        say(socket)
        done = await socket.wait_for("session.done")
        requests = chain.talker_engine.requests
        socket.send("session.close")
        await socket.wait_until_over()
    assert kinds(socket) == [
        "session.configured",
        *["audio.start", "audio", "audio.done"] * 2,
        "session.done",
    ]
    assert socket.audio() == pcm_of(9) + pcm_of(9, piece=1)
    assert [(request.seed, request.piece) for request in requests] == [(7, 0), (7, 1)]
    starts, ends = socket.told("audio.start"), socket.told("audio.done")
    assert [start["sentence_text"] for start in starts] == TWO.replace(". ", ".|").split("|")
    assert [(s["utterance_index"], s["sentence_index"]) for s in starts] == [(0, 0), (0, 1)]
    assert {(s["format"], s["sample_rate"], s["channels"]) for s in starts} == {("pcm", 24000, 1)}
    assert [end["total_bytes"] for end in ends] == [len(pcm_of(9))] * 2
    assert [(end["error"], end["finish_reason"], end["num_frames"]) for end in ends] == [
        (False, "stop", 9)
    ] * 2
    assert (done["total_sentences"], done["num_frames"]) == (2, 18)
    assert (done["error"], done["cancelled"]) == (False, False)
    assert done["audio_seconds"] == pytest.approx(18 * FRAME_S)
    assert done["usage"]["output_tokens"] == 18
    assert socket.close_code == 1000


async def test_row_33_there_is_no_gap_between_two_sentences(open_chain):
    """known_faults row 33: with engines that take 50 ms an item, a player that starts at the first chunk and
    plays at its pace never waits for longer than a chunk; the second sentence is begun before the first has been sent.
    The shortest of a few waits counts: a machine may stand still for longer."""
    worst_s = [await two_sentences(open_chain)]
    while len(worst_s) < 5 and min(worst_s) >= 25 * FRAME_S:
        worst_s.append(await two_sentences(open_chain))
    assert min(worst_s) < 25 * FRAME_S


async def two_sentences(open_chain):
    """The longest wait of a player, in seconds; the order of events is checked here."""
    num_frames = 1 + 3 + 8 + 16 + 25
    slow = Script(num_frames=num_frames, seconds_per_item=0.05)
    begun = []

    async def look(message):
        if isinstance(message, bytes):
            if len(begun) == 4:  # the first one's last chunk: it isn't taken until the second is on its way
                await until(lambda: len(chain.talker_engine.requests) == 2)
            begun.append(len(chain.talker_engine.requests))

    async with open_chain(talker=slow, codec=Script(seconds_per_item=0.05)) as chain:
        socket = await configured(chain, on_message=look)
        say(socket)
        await socket.wait_for("session.done")
    assert begun == [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]  # and no earlier: a session holds one place
    whole = pcm_of(num_frames) + pcm_of(num_frames, piece=1)
    assert socket.audio() == whole  # not a sample more or less at the joint
    audio = [(i, at) for i, at in enumerate(socket.arrived_at) if isinstance(socket.messages[i], bytes)]
    heard_s, worst_s = 0.0, 0.0
    for i, at in audio:
        worst_s = max(worst_s, at - audio[0][1] - heard_s)
        heard_s += len(socket.messages[i]) / 2 / 24_000
    assert heard_s == pytest.approx(2 * num_frames * FRAME_S)
    return worst_s


async def test_a_sentence_is_spoken_before_the_text_goes_on(open_chain):
    async with open_chain() as chain:
        socket = await configured(chain)
        for letter in "Hello there. How":
            socket.send("input.text", text=letter)
        assert (await socket.wait_for("audio.done"))["sentence_index"] == 0
        assert len(chain.talker_engine.requests) == 1
        socket.send("input.text", text=" are you?")
        socket.send("input.done")
        await socket.wait_for("session.done")
    assert [s["sentence_text"] for s in socket.told("audio.start")] == ["Hello there.", "How are you?"]


@pytest.mark.parametrize(
    ("granularity", "sentences"),
    [("sentence", 2), ("clause", 3), ("none", 1), (None, 2)],
)
async def test_where_the_text_is_cut(open_chain, granularity, sentences):
    async with open_chain() as chain:
        socket = await configured(chain, split_granularity=granularity)
        say(socket, "Since it rains today, we stay at home. Perhaps tomorrow.")
        assert (await socket.wait_for("session.done"))["total_sentences"] == sentences


async def test_a_long_text_in_one_is_cut_as_over_http(open_chain):
    text = "Hello there, how are you today? " * 30
    async with open_chain(talker=Script(num_frames=5)) as chain:
        socket = await configured(chain, split_granularity="none")
        say(socket, text)
        done = await socket.wait_for("session.done")
        pieces = [request.piece for request in chain.talker_engine.requests]
    assert pieces == list(range(len(pieces)))
    assert len(pieces) >= 3
    assert (done["total_sentences"], done["num_frames"]) == (1, 5 * len(pieces))
    assert socket.audio() == b"".join(pcm_of(5, piece=piece) for piece in pieces)


async def test_what_has_no_words_is_passed_over(open_chain):
    async with open_chain() as chain:
        socket = await configured(chain)
        say(socket, " \n\n ")
        assert (await socket.wait_for("session.done"))["total_sentences"] == 0
        say(socket, "")
        assert (await socket.wait_for("session.done", 2))["utterance_index"] == 1
        assert chain.talker_engine.requests == []


async def test_an_utterance_sounds_the_same_each_time_and_its_seed_is_told(open_chain):
    async with open_chain() as chain:
        socket = await configured(chain, seed=None)
        say(socket)
        say(socket)
        await socket.wait_for("session.done", 2)
        seeds = {request.seed for request in chain.talker_engine.requests}
    assert seeds == {socket.told("session.configured")[0]["seed"]}
    assert socket.audio(utterance=0) == socket.audio(utterance=1) != b""


async def test_without_stream_audio_each_sentence_is_one_file(open_chain):
    async with open_chain(talker=Script(num_frames=30)) as chain:
        socket = await configured(chain, stream_audio=None, response_format=None)
        say(socket)
        await socket.wait_for("session.done")
    files = [message for message in socket.messages if isinstance(message, bytes)]
    assert len(files) == 2
    for file in files:
        with wave.open(io.BytesIO(file)) as reader:
            assert (reader.getframerate(), reader.getnframes()) == (24000, 30 * SAMPLES_PER_FRAME)


@pytest.mark.parametrize("audio_format", ["wav", "mp3", "flac"])
async def test_encoded_audio_is_flushed_at_the_end_of_each_sentence(open_chain, audio_format):
    async with open_chain(talker=Script(num_frames=30)) as chain:
        socket = await configured(chain, response_format=audio_format, sample_rate=16000, speed=2)
        say(socket)
        done = await socket.wait_for("session.done")
    assert {start["sample_rate"] for start in socket.told("audio.start")} == {16000}
    assert done["audio_seconds"] == pytest.approx(2 * 30 * FRAME_S / 2, abs=1e-3)
    sizes = [end["total_bytes"] for end in socket.told("audio.done")]
    assert sum(sizes) == len(socket.audio())
    assert min(sizes) > 1000


async def test_the_fields_may_come_in_an_object_of_their_own(open_chain):
    async with open_chain() as chain:
        socket = chain.socket()
        socket.send("session.config", session={**STREAM, "voice": "vivian"})
        told = await socket.wait_for("session.configured")
        say(socket)
        await socket.wait_for("session.done")
    assert (told["response_format"], told["stream_audio"], told["split_granularity"]) == (
        "pcm",
        True,
        "sentence",
    )
    assert (told["voice"], told["seed"], told["model"], told["sample_rate"]) == ("vivian", 7, "tiny", 24000)


# ---------------------------------------------------------------- how far ahead
async def test_only_the_next_sentence_is_ever_begun_ahead(open_chain):
    begun = {}

    async def note(message):
        if isinstance(message, dict) and message["type"] in ("audio.start", "audio.done"):
            begun[message["type"], message["sentence_index"]] = len(chain.talker_engine.requests)

    async with open_chain(talker=Script(num_frames=1)) as chain:  # its first chunk is its last
        socket = await configured(chain, on_message=note)
        say(socket, "Here we go. " * 6)
        await socket.wait_for("session.done")
    assert [begun["audio.start", n] for n in range(6)] == [1, 2, 3, 4, 5, 6]
    assert all(begun["audio.done", n] <= n + 2 for n in range(6))


async def test_a_sentence_waits_while_a_listener_has_enough_to_hear(open_chain):
    async with open_chain(talker=Script(num_frames=1500)) as chain:  # 120 s each
        socket = await configured(chain, look_ahead_s=130, max_new_tokens=1500)
        say(socket, "One more. " * 5)
        await socket.wait_for("audio.done", 2)
        with pytest.raises(TimeoutError):
            await socket.wait_for("audio.start", 3, timeout_s=0.5)
        assert len(chain.talker_engine.requests) == 2
        socket.send("input.cancel")  # ends an utterance of its own, too
        assert (await socket.wait_for("session.done"))["cancelled"]
        say(socket, "Now.")  # nobody listens to the rest any more: this one waits for nothing
        await socket.wait_for("session.done", 3)
        assert [request.seed for request in chain.talker_engine.requests] == [7] * 3
    assert LOOK_AHEAD_S > 30


# ---------------------------------------------------------------- cancelling, configuring, leaving
async def test_cancel_frees_all_at_once_and_the_next_utterance_is_spoken(open_chain):
    async with open_chain(talker=Script(num_frames=3000, seconds_per_item=0.3)) as chain:
        socket = await configured(chain, max_new_tokens=3000)
        say(socket)
        socket.send("input.text", text="A third. A fou")
        await socket.wait_for("audio.start")
        socket.send("input.cancel")
        await socket.wait_for("session.done", 2)
        await is_free(chain)
        assert len(socket.audio()) < len(pcm_of(3000)) / 2
        chain.talker_engine.script.num_frames, chain.talker_engine.script.seconds_per_item = 9, 0.0
        before = len(socket.audio())
        say(socket, "Again.")
        last = await socket.wait_for("session.done", 3)
    done = socket.told("session.done")
    assert [d["cancelled"] for d in done] == [True, True, False]
    assert [d["utterance_index"] for d in done] == [0, 1, 2]
    assert [end.get("cancelled", False) for end in socket.told("audio.done")] == [True, False]
    assert last["total_sentences"] == 1
    assert socket.audio()[before:] == pcm_of(9)
    assert [s["sentence_text"] for s in socket.told("audio.start")][-1] == "Again."


async def test_cancel_of_nothing_is_an_utterance_without_a_sentence(open_chain):
    async with open_chain() as chain:
        socket = await configured(chain)
        socket.send("input.cancel")
        done = await socket.wait_for("session.done")
        assert (done["cancelled"], done["total_sentences"]) == (True, 0)


async def test_a_new_config_counts_from_the_next_utterance_on(open_chain):
    async with open_chain(talker=Script(num_frames=9, seconds_per_item=0.02)) as chain:
        socket = await configured(chain, voice="vivian")
        say(socket, "One.")
        socket.send("session.config", **{**STREAM, "seed": 8, "response_format": "wav"})
        say(socket, "Two.")
        await socket.wait_for("session.done", 2)
        assert [request.seed for request in chain.talker_engine.requests] == [7, 8]
    assert socket.audio(utterance=0) == pcm_of(9)
    assert socket.audio(utterance=1)[44:] == pcm_of(9, seed=8)
    assert [told["seed"] for told in socket.told("session.configured")] == [7, 8]


async def test_within_an_utterance_a_config_is_refused_and_the_old_one_stays(open_chain):
    async with open_chain() as chain:
        socket = await configured(chain)
        socket.send("input.text", text="Hello")
        socket.send("session.config", **{**STREAM, "seed": 8})
        assert (await socket.wait_for("error"))["error"]["param"] == "type"
        socket.send("input.done")
        await socket.wait_for("session.done")
        assert [request.seed for request in chain.talker_engine.requests] == [7]


@pytest.mark.parametrize(
    ("after", "num_frames"), [("session.configured", 3000), ("audio.start", 3000), ("audio.done", 60)]
)
async def test_leaving_frees_everything_whenever_it_happens(open_chain, after, num_frames):
    async with open_chain(talker=Script(num_frames=num_frames, seconds_per_item=0.1)) as chain:
        socket = await configured(chain, max_new_tokens=3000)
        say(socket, "Here we go again. " * 8)
        await socket.wait_for(after)
        await socket.leave()
        await is_free(chain)
        assert chain.talker_engine.stats().num_started <= 3
        assert len(socket.audio()) < len(pcm_of(9)) + len(pcm_of(3000)) / 2  # it did not just end in time
        assert socket.close_code is None


async def test_close_comes_once_all_is_said(open_chain):
    async with open_chain(talker=Script(num_frames=60, seconds_per_item=0.02)) as chain:
        socket = await configured(chain)
        say(socket)
        socket.send("session.close")
        await socket.wait_until_over()
        assert (socket.close_code, len(socket.told("audio.done"))) == (1000, 2)
        assert kinds(socket)[-1] == "session.done"
        await is_free(chain)


@pytest.mark.parametrize("granularity", ["sentence", "none"])
async def test_closing_within_an_utterance_ends_it_and_drops_nothing(open_chain, granularity):
    async with open_chain() as chain:
        socket = await configured(chain, split_granularity=granularity)
        socket.send("input.text", text="Hello there")
        socket.send("session.close")
        await socket.wait_until_over()
        assert [start["sentence_text"] for start in socket.told("audio.start")] == ["Hello there"]
        assert (socket.close_code, kinds(socket)[-1]) == (1000, "session.done")


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"voice": "nope"}, "voice", "unknown_voice"),
        ({"speaker": "nope"}, "speaker", "unknown_voice"),
        ({"model": "nope"}, "model", "model_not_found"),
        ({"language": "nope"}, "language", "unknown_language"),
        ({"response_format": "m4a"}, "response_format", "invalid_value"),
        ({"temperature": 0.00001}, "temperature", "invalid_value"),
        ({"task_type": "Base"}, "task_type", "invalid_value"),
        ({"seed": "7"}, "seed", "invalid_value"),
        ({"stream_audio": 1}, "stream_audio", "invalid_value"),
        ({"split_granularity": "word"}, "split_granularity", "invalid_value"),
        ({"look_ahead_s": 0}, "look_ahead_s", "invalid_value"),
        ({"input": "Hello"}, "input", "invalid_value"),
        ({"stream": True}, "stream", "invalid_value"),
        ({"colour": "red"}, "colour", "invalid_value"),
        ({"session": 3}, "session", "invalid_value"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
async def test_a_config_that_is_refused_ends_the_session_and_names_the_field(
    open_chain, fields, param, code, is_first
):
    async with open_chain() as chain:
        socket = chain.socket() if is_first else await configured(chain)
        if "session" in fields:
            socket.send("session.config", **fields)
        else:
            socket.send("session.config", **{**STREAM, **fields})
        say(socket)
        await socket.wait_until_over()
        assert chain.talker_engine.requests == []
    (error,) = socket.told("error")
    assert (error["error"]["param"], error["error"]["code"]) == (param, code)
    assert error["message"] == error["error"]["message"]
    assert socket.close_code == 1008
    assert socket.reason[:20] == error["message"][:20]


NOT_MESSAGES = [
    ("{", None, "not valid JSON"),
    ("[1]", None, "must be a JSON object"),
    (b"\x00", None, "got a binary one"),
    ('{"type": "input.text", "text": "a", "text": "b"}', "text", "is there twice"),
    ('{"type": "nope"}', "type", "must be one of session.config, input.text"),
    ('{"text": "Hello"}', "type", "got null"),
    ('{"type": ["input.text"]}', "type", "must be one of"),
    ('{"type": "input.text"}', "text", "must be a string, got null"),
    ('{"type": "input.text", "text": 3}', "text", "got 3"),
    ('{"type": "input.text", "text": "\\ud800"}', None, "not valid JSON"),
    ('{"type": "input.text", "text": "a", "voice": "b"}', "voice", "unknown field"),
    ('{"type": "input.done", "text": "a"}', "text", "none beside type"),
]


@pytest.mark.parametrize(("raw", "param", "words"), NOT_MESSAGES)
async def test_a_message_that_is_none_is_told_and_the_session_goes_on(open_chain, raw, param, words):
    async with open_chain() as chain:
        socket = await configured(chain)
        socket.send_raw(raw)
        error = await socket.wait_for("error")
        assert error["error"]["param"] == param
        assert words in error["message"]
        say(socket)
        assert (await socket.wait_for("session.done"))["total_sentences"] == 2


@pytest.mark.parametrize("raw", [raw for raw, _, _ in NOT_MESSAGES] + ['{"type": "input.done"}'])
async def test_before_there_is_a_config_anything_else_ends_the_session(open_chain, raw):
    async with open_chain() as chain:
        socket = chain.socket()
        socket.send_raw(raw)
        await socket.wait_until_over()
        assert (socket.close_code, len(socket.told("error"))) == (1008, 1)


async def test_a_message_that_is_too_large_ends_the_session(open_chain):
    text = "x" * MAX_TEXT_MESSAGE_BYTES
    async with open_chain() as chain:
        socket = await configured(chain)
        socket.send("input.text", text=text)
        await socket.wait_until_over()
        assert socket.close_code == 1009
        assert f"the limit is {MAX_TEXT_MESSAGE_BYTES:,}" in socket.told("error")[0]["message"]


async def test_more_text_than_may_wait_is_refused_and_can_be_sent_later(open_chain):
    async with open_chain(talker=Script(num_frames=2, seconds_per_item=0.02)) as chain:
        socket = await configured(chain)
        fits = "Here we go. " * 1600
        socket.send("input.text", text=fits)
        socket.send("input.text", text=fits)
        error = (await socket.wait_for("error"))["error"]
        assert (error["code"], error["param"]) == ("text_too_long", "text")
        socket.send("input.cancel")
        await socket.wait_for("session.done")
        say(socket, "Here we go.")
        assert (await socket.wait_for("session.done", 2))["total_sentences"] == 1


async def test_more_turns_than_may_wait_are_refused(open_chain):
    async with open_chain(talker=Script(num_frames=3000, seconds_per_item=0.3)) as chain:
        socket = await configured(chain)
        say(socket)
        for _ in range(70):
            socket.send("input.done")
        error = await socket.wait_for("error", 7)
        assert error["error"]["param"] == "type"
        assert "64 utterances" in error["message"]
        socket.send("input.cancel")
        await socket.wait_for("session.done", 65)


# ---------------------------------------------------------------- faults
async def test_a_sentence_that_fails_ends_its_utterance_and_not_the_session(open_chain):
    failing = Script(num_frames=60, seconds_per_item=0.05, fail_after_frames=12)
    async with open_chain(talker=failing) as chain:
        socket = await configured(chain)
        socket.send("input.text", text=TWO + " A thi")
        error = await socket.wait_for("error")
        socket.send("input.text", text="rd. And more. ")
        socket.send("input.done")
        done = await socket.wait_for("session.done")
        await is_free(chain)
        assert len(chain.talker_engine.requests) == 1
        chain.talker_engine.script.fail_after_frames = None
        say(socket)
        assert (await socket.wait_for("session.done", 2))["total_sentences"] == 2
    assert (done["error"], done["total_sentences"], done["cancelled"]) == (True, 0, False)
    assert (error["utterance_index"], error["sentence_index"], error["action"]) == (0, 0, "discard")
    assert error["error"]["code"] == "internal_error"
    assert "secret" not in json.dumps(socket.told("error"))
    assert socket.told("audio.done")[0]["error"]


async def test_a_full_server_refuses_the_first_sentence_at_once_and_later_ones_wait(open_chain):
    async def take_the_place(message):
        if isinstance(message, bytes):  # of the first sentence: as if another had taken the place
            chain.talker_engine.script.capacity = 0

    async with open_chain(talker=Script(num_frames=60, permits=threading.Semaphore(1))) as chain:
        script = chain.talker_engine.script
        script.capacity = 0
        socket = await configured(chain, on_message=take_the_place)
        say(socket)
        error = await socket.wait_for("error")
        assert error["error"]["code"] == "overloaded"
        assert (await socket.wait_for("session.done"))["error"]
        assert socket.told("audio.start") == []
        script.capacity = 1
        say(socket)
        await until(lambda: socket.audio())
        script.permits.release(100)
        await socket.wait_for("audio.done")
        with pytest.raises(TimeoutError):
            await socket.wait_for("audio.start", 2, timeout_s=0.3)
        socket.on_message, script.capacity = None, 1
        assert (await socket.wait_for("session.done", 2))["total_sentences"] == 2


# ---------------------------------------------------------------- a client that doesn't read
async def spoken_to(chain, reads):
    """A socket that audio is being sent to, whose client takes none before `reads` is set."""

    async def wait(message):
        if isinstance(message, bytes):
            await reads.wait()

    socket = await configured(chain, on_message=wait)
    say(socket)
    await until(lambda: any(isinstance(message, bytes) for message in socket.messages))
    return socket


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_a_client_says_is_heard_while_it_does_not_read(open_chain, leaves):
    """Also when it has to be told of an error: what is sent waits for the client to read, and how far that has come
    is heard from the client's side alone."""
    reads = asyncio.Event()
    async with open_chain(talker=Script(num_frames=60, seconds_per_item=0.02)) as chain:
        socket = await spoken_to(chain, reads)
        for _ in range(3):
            socket.send("nonsense")
        await asyncio.sleep(0.05)
        if leaves:
            await socket.leave()
        else:
            socket.send("input.cancel")
            await until(lambda: chain.num_held == 0)
            reads.set()
            await until(lambda: len(socket.told("error")) == 3)
            socket.send("session.close")
            await socket.wait_until_over()
            assert socket.close_code == 1000
        await until(lambda: chain.num_held == 0)


async def test_complaints_that_nobody_reads_end_the_session(open_chain):
    async with open_chain(talker=Script(num_frames=60, seconds_per_item=0.02)) as chain:
        socket = await spoken_to(chain, reads=asyncio.Event())
        for _ in range(80):
            socket.send("nonsense")
        await until(lambda: chain.num_held == 0)
        await socket.wait_until_over()
        assert socket.close_code == 1008


async def test_a_complaint_comes_before_the_end(open_chain):
    arrived = []

    async def arrive(message):
        if message["type"] == "error":
            await asyncio.sleep(0.1)
            arrived.append(message)

    async with open_chain() as chain:
        socket = await configured(chain, on_message=arrive)
        socket.send("nonsense")
        socket.send("session.close")
        await socket.wait_until_over()
        assert arrived == socket.told("error")
        assert len(arrived) == 1
        assert socket.close_code == 1000


# ---------------------------------------------------------------- silence
def socket_with(chain, **limits):
    """A socket of the same server whose patience is short."""

    async def app(scope, receive, send):
        websocket = WebSocket(scope, receive, send)
        await SpeechSocket(chain.ingress._parts, websocket, "s", LongText(), SocketLimits(**limits)).run()

    return AsgiSocket(app, "/")


async def test_who_sends_no_config_is_told_and_closed(open_chain):
    async with open_chain() as chain:
        socket = await socket_with(chain, config_timeout_s=0.1).wait_until_over()
        assert socket.close_code == 1008
        assert "no session.config came" in socket.told("error")[0]["message"]


async def test_silence_ends_a_session_but_not_while_it_speaks(open_chain):
    async with open_chain(talker=Script(num_frames=60, seconds_per_item=0.1)) as chain:
        socket = socket_with(chain, idle_timeout_s=0.25)
        socket.send("session.config", **STREAM)
        say(socket)  # a second and more of work
        await socket.wait_until_over()
        assert (await socket.wait_for("session.done"))["total_sentences"] == 2
        assert socket.close_code == 1001
        assert kinds(socket)[-2:] == ["session.done", "error"]


# ---------------------------------------------------------------- as over HTTP
async def test_api_keys_are_asked_for_in_the_handshake(open_chain):
    async with open_chain(api_key_hashes=hashes_of(*KEYS)) as chain:
        for headers in ({}, {"authorization": "Bearer nope"}):
            socket = await chain.socket(**headers).wait_until_over()
            assert socket.status == 401
            assert json.loads(socket.body)["error"]["code"] == "invalid_api_key"
        bare = AsgiSocket(chain.app, "/v1/audio/speech/stream", extensions=())
        await bare.wait_until_over()
        assert (bare.status, bare.close_code) == (None, 1008)
        socket = chain.socket(authorization=f"Bearer {KEYS[0]}")
        socket.send("session.config", **STREAM)
        await socket.wait_for("session.configured")


async def test_there_is_no_other_websocket(open_chain):
    async with open_chain() as chain:
        socket = await AsgiSocket(chain.app, "/v1/audio/speech").wait_until_over()
        assert socket.close_code is not None
        assert socket.messages == []


async def test_voice_aliases_and_voice_design_work_as_over_http(open_chain):
    models = {"tiny": TINY, "design": str(GOLDEN / "voice_design")}
    async with open_chain(models=models, voice_aliases={"alloy": "vivian"}) as chain:
        socket = await configured(chain, voice="alloy")
        say(socket, "Hello.")
        await socket.wait_for("session.done")
        socket.send("session.config", **STREAM, model="design", instructions="A low, calm voice.")
        say(socket, "Hello.")
        await socket.wait_for("session.done", 2)
        told = socket.told("session.configured")
        plans = [engine.requests[0].plan for engine in chain.talker_engines.values()]
    assert [t["voice"] for t in told] == ["vivian", ""]
    assert [t["model"] for t in told] == ["tiny", "design"]
    assert plans[0] != plans[1]


async def test_a_clip_is_encoded_once_for_the_session(open_base):
    encoder = FakeReferenceEncoder()
    clip = base64.b64encode(wav_clip()).decode()
    async with open_base(encoder) as chain:
        socket = await configured(chain, ref_audio=clip, ref_text="What it says.")
        say(socket)
        await socket.wait_for("session.done")
        voices = [request.reference for request in chain.talker_engine.requests]
        handle = chain.encoder_handles["base"]
    assert len(voices) == 2
    assert voices[0] == voices[1] is not None
    assert handle.calls.count("encode") == 1
    assert socket.audio() == pcm_of(9) + pcm_of(9, piece=1)


async def test_an_uploaded_voice_speaks_by_its_name_and_an_unusable_clip_ends_the_session(open_base):
    body, content_type = form(name="ada", ref_text="What it says.", audio_sample=wav_clip())
    async with open_base() as chain:
        upload = await chain.call("POST", "/v1/audio/voices", body, content_type=content_type).finish()
        assert upload.status == 200, upload.body
        socket = await configured(chain, voice="ADA")
        say(socket)
        assert (await socket.wait_for("session.done"))["total_sentences"] == 2
        other = chain.socket()
        other.send("session.config", **STREAM, ref_audio="AAAA", x_vector_only_mode=True)
        await other.wait_until_over()
        assert other.told("error")[0]["error"]["param"] == "ref_audio"
        assert other.close_code == 1008
        assert chain.ingress._bodies.num_held_bytes == 0


# ---------------------------------------------------------------- the log
async def test_each_sentence_and_the_session_are_a_line_of_the_log_without_the_text(open_chain, caplog):
    caplog.set_level(logging.INFO)
    async with open_chain() as chain:
        socket = chain.socket(x_request_id="mine-7")
        socket.send("session.config", **STREAM)
        say(socket)
        socket.send("session.close")
        await socket.wait_until_over()
    lines = [record.getMessage() for record in caplog.records]
    requests = [json.loads(line.removeprefix("request ")) for line in lines if line.startswith("request ")]
    assert [line["request_id"] for line in requests] == ["mine-7-0-0", "mine-7-0-1"]
    assert {line["outcome"] for line in requests} == {"ok"}
    (session,) = [json.loads(line.removeprefix("session ")) for line in lines if line.startswith("session ")]
    assert session == {"session_id": "mine-7", "close_code": 1000, "sentences": 2}
    assert "first sentence" not in "".join(lines)
