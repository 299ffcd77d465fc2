"""The speaking half of a WebSocket session: what was said, in order, each sentence begun before it is needed.

    queue     voice │ sentence 0 │ sentence 1 │ end │ …
    chain             1 3 8 16 25 … stop
                                     └ started ── 1 3 8 … kept ──> sent at once
    client                           ──────────────────────> one stream of audio

As with the pieces of a long text (`pieces.py`), the next sentence is started when the last chunk of the one before is
here, before that chunk is passed on: so a session holds one place in the engines, and the next audio is at hand long
before what was sent has been heard. Where more than `look_ahead_s` of audio is ahead of a listener, it waits until it
is less. Sentences of one utterance have one voice and one seed, and are told apart in the noise by their number.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

from starlette.websockets import WebSocketDisconnect

from deployments.deadline import FirstAudioDeadline
from deployments.frontend import PreparedSpeech
from deployments.http_errors import describe
from deployments.metrics import RequestRecord
from deployments.pieces import PATIENCE_S, join_pieces
from deployments.served_models import ServedModel
from deployments.speech import (
    SpeechParts,
    encoded,
    fields_as_sent,
    note_prepared,
    open_encoder,
    prepare_speech,
    prepend,
)
from deployments.tracing import traced_request
from deployments.websocket_messages import SessionConfig, error_message
from deployments.websocket_turns import End, Listener, Sentence, Utterance, Voice
from qwen3tts_core.errors import InvalidRequest
from qwen3tts_core.streaming.pcm import duration_s
from qwen3tts_core.types import AudioChunk

logger = logging.getLogger(__name__)


class Sender(Protocol):
    """Whole messages, one after the other; raises WebSocketDisconnect when the client has left."""

    async def json(self, fields: dict[str, Any]) -> None: ...

    async def audio(self, part: bytes) -> None: ...


class ConfigRefused(Exception):
    """A `session.config` can't be spoken with: its cause says why."""


class Speaker:
    """One session's. Its verbs return at once and may be called while `run` runs, on the same loop."""

    def __init__(self, parts: SpeechParts, send: Sender, session_id: str) -> None:
        self._parts, self._send, self._session_id = parts, send, session_id
        self._queue: deque[Voice | Sentence | Utterance | End] = deque()  # an Utterance: its end
        self._arrived = asyncio.Event()
        self._voice: Voice | None = None
        self._utterance = Utterance(0)
        self._unfinished: list[Utterance] = [self._utterance]
        self._begun: set[Sentence] = set()
        self._listener = Listener()
        self.idle_since: float | None = None  # on the loop's clock; None while there is something to do
        self.num_waiting_chars = 0  # of sentences that aren't begun
        self.num_waiting_turns = 0  # voices and ends of utterances in the queue
        self.num_sentences = 0  # spoken to the end

    # ------------------------------------------------------------ verbs
    def configure(self, config: SessionConfig) -> None:
        """The voice of what comes from now on. Raises Overloaded when others' clips are too much already."""
        held = ExitStack()
        held.enter_context(self._parts.bodies.count(config.num_bytes))
        if config.body.seed is None:
            config = config.with_body(seed=secrets.randbits(63))
        self._voice = Voice(config, held)
        self._put(self._voice)

    def say(self, text: str) -> None:
        assert self._voice is not None, "nothing is said before there is a voice"
        utterance = self._utterance
        if utterance.dropped is None:
            self._put(Sentence(self._voice, utterance, utterance.num_sentences, text))
            utterance.num_sentences += 1
            self.num_waiting_chars += len(text)

    def end_utterance(self) -> None:
        self._put(self._utterance)
        self._utterance = Utterance(self._utterance.index + 1)
        self._unfinished.append(self._utterance)

    def cancel(self) -> None:
        """End this utterance, and speak no more of anything that was said so far."""
        self.end_utterance()
        for utterance in self._unfinished[:-1]:
            self._drop(utterance, "cancelled")
        self._listener.forget()

    def close(self) -> None:
        """`run` returns once all is said."""
        self._put(End())

    def _put(self, item: Voice | Sentence | Utterance | End) -> None:
        self._queue.append(item)
        self.num_waiting_turns += not isinstance(item, Sentence)
        self._arrived.set()

    def _drop(self, utterance: Utterance, why: Literal["cancelled", "failed"]) -> None:
        utterance.dropped = utterance.dropped or why
        for sentence in self._begun:
            if sentence.utterance is utterance and sentence.task is not None:
                sentence.task.cancel()

    # ------------------------------------------------------------ the queue
    async def run(self) -> None:
        """Work until `close`. Raises ConfigRefused, WebSocketDisconnect. However it ends, all that it started ends."""
        try:
            while not isinstance(item := await self._next(), End):
                if isinstance(item, Voice):
                    await self._open_voice(item)
                elif isinstance(item, Sentence):
                    await self._speak(item)
                else:
                    await self._tell_done(item)
        finally:
            tasks = [sentence.task for sentence in self._begun if sentence.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for voice in (item for item in self._queue if isinstance(item, Voice)):
                voice.held.close()

    async def _next(self) -> Voice | Sentence | Utterance | End:
        while not self._queue:
            self.idle_since = asyncio.get_running_loop().time()
            self._arrived.clear()
            await self._arrived.wait()
        self.idle_since = None
        item = self._queue.popleft()
        self.num_waiting_turns -= not isinstance(item, Sentence)
        return item

    async def _open_voice(self, voice: Voice) -> None:
        try:
            name, sample_rate_hz = await self._find_voice(voice)
        except Exception as error:
            raise ConfigRefused from error
        finally:
            voice.held.close()
        config, model = voice.config, voice.model
        assert model is not None, "just found"
        await self._send.json(
            {
                "type": "session.configured",
                "session_id": self._session_id,
                "model": model.name,
                "voice": name,
                "seed": voice.body.seed,
                "response_format": voice.body.audio_format,
                "sample_rate": sample_rate_hz,
                "stream_audio": config.stream_audio,
                "split_granularity": config.split_granularity,
            }
        )

    async def _find_voice(self, voice: Voice) -> tuple[str, int]:
        """Its name and sample rate. Everything that could be wrong with a config is found here, before its text."""
        body = self._parts.voice_aliases.apply(voice.body)
        voice.model = model = self._parts.models.find(body.model)
        self._parts.sleepers.wake(model.wakes)
        if model.cloner is not None:
            with fields_as_sent(body):
                model.frontend.check(body)
                async with self._deadline(model).waiting():
                    voice.clone = await model.cloner.find(body)
            body = body.model_copy(update={"ref_audio": None})  # megabytes that nobody needs any more
        voice.config = replace(voice.config, body=body)
        prepared = await prepare_speech(model, body, voice.clone)
        async with open_encoder(model, voice.body) as encoder:
            return prepared.voice, encoder.sample_rate_hz

    def _deadline(self, model: ServedModel) -> FirstAudioDeadline:
        sleepers = self._parts.sleepers
        extra_s = partial(sleepers.extra_s, model.sleepers, sleepers.now())
        return FirstAudioDeadline(self._parts.first_audio_timeout_s, extra_s)

    # ------------------------------------------------------------ one sentence
    async def _speak(self, sentence: Sentence) -> None:
        if sentence.task is None:
            self._begin(sentence)
        if sentence.task is not None:
            sentence.may_send.set()
            await asyncio.wait({sentence.task})
            self._begun.discard(sentence)
            await self._tell_end(sentence, sentence.task)

    def _begin(self, sentence: Sentence) -> None:
        """Unless it was dropped meanwhile."""
        self.num_waiting_chars -= len(sentence.text)
        if sentence.utterance.dropped is None:
            sentence.task = asyncio.create_task(self._run(sentence))
            self._begun.add(sentence)

    def _begin_next(self) -> None:
        following = next((item for item in self._queue if not isinstance(item, Utterance)), None)
        if isinstance(following, Sentence) and following.task is None:
            self._begin(following)

    async def _run(self, sentence: Sentence) -> RequestRecord:
        """From the start of its chain to its last byte; what is sent waits for its turn."""
        voice, model, utterance = sentence.voice, sentence.voice.model, sentence.utterance
        assert model is not None, "the speaker comes to a voice before it comes to its sentences"
        await self._listener.wait_until_near(voice.config.look_ahead_s)
        about = sentence.fields(self._session_id)
        own_record = self._parts.record(about["id"], model.frontend.config.codec.sample_rate_hz)
        with traced_request(own_record) as record:
            is_first = utterance.num_pieces == 0
            body = voice.body.model_copy(update={"input": sentence.text})
            prepared = _numbered(await prepare_speech(model, body, voice.clone), utterance.num_pieces)
            utterance.num_pieces += len(prepared.requests)
            utterance.num_tokens += prepared.num_text_tokens
            note_prepared(record, model, body, prepared)
            joined = join_pieces(
                model.chains,
                prepared.requests,
                model.frontend.config.codec.samples_per_frame,
                prepared.max_frames,
                first_patience_s=0.0 if is_first else PATIENCE_S,
                on_death=record.resumed,
            )
            async with open_encoder(model, voice.body) as encoder, aclosing(joined) as chunks:
                async with self._deadline(model).waiting():
                    first = await anext(chunks)
                record.reached("first_audio")
                await sentence.may_send.wait()
                sentence.has_started = True
                await self._send.json(
                    {
                        "type": "audio.start",
                        **about,
                        "sentence_text": sentence.text,
                        "format": body.audio_format,
                        "sample_rate": encoder.sample_rate_hz,
                        "channels": 1,
                    }
                )
                audio = encoded(encoder, self._counted(record, prepend(first, chunks)))
                await self._send_audio(sentence, record, audio)
        return record

    async def _counted(
        self, record: RequestRecord, chunks: AsyncIterator[AudioChunk]
    ) -> AsyncGenerator[AudioChunk, None]:
        """The chunks; with the last of them the next sentence is begun."""
        async for chunk in chunks:
            record.add(chunk)
            self._listener.add(duration_s(len(chunk.pcm), record.sample_rate_hz) / record.speed)
            if chunk.finish is not None:
                self._begin_next()
            yield chunk

    async def _send_audio(
        self, sentence: Sentence, record: RequestRecord, audio: AsyncIterator[bytes]
    ) -> None:
        if not sentence.voice.config.stream_audio:
            audio = _as_one(audio)
        async for part in audio:
            await self._send.audio(part)
            sentence.num_bytes += len(part)
            record.wrote_audio()

    # ------------------------------------------------------------ what is told of it
    async def _tell_end(self, sentence: Sentence, task: asyncio.Task[RequestRecord]) -> None:
        about, utterance = sentence.fields(self._session_id), sentence.utterance
        end: dict[str, Any] = {"error": False}
        if task.cancelled():
            end["cancelled"] = True
        elif (error := task.exception()) is not None:
            await self._tell_failure(sentence, error)
            end["error"] = True
        else:
            record = task.result()
            self.num_sentences += 1
            utterance.num_spoken += 1
            utterance.num_frames += record.num_frames
            utterance.audio_s += record.audio_s
            end |= {
                "finish_reason": record.finish,
                "num_frames": record.num_frames,
                "audio_seconds": round(record.audio_s, 4),
            }
        if sentence.has_started:
            await self._send.json({"type": "audio.done", **about, "total_bytes": sentence.num_bytes, **end})

    async def _tell_failure(self, sentence: Sentence, error: BaseException) -> None:
        """The rest of the utterance would be heard with a hole in it: it is dropped."""
        self._drop(sentence.utterance, "failed")
        described = describe(error)
        if isinstance(error, WebSocketDisconnect) or described.status == 499:  # the client has left
            raise error
        if described.is_ours:
            logger.error("session %s: a sentence failed", self._session_id, exc_info=error)
        if isinstance(error, InvalidRequest) and error.param == "input":
            error.param = "text"
        partial_audio = {"partial_audio": True, "action": "discard"} if sentence.num_bytes else {}
        await self._send.json(error_message(error, **sentence.fields(self._session_id), **partial_audio))

    async def _tell_done(self, utterance: Utterance) -> None:
        self._unfinished.remove(utterance)
        num_in, num_out = utterance.num_tokens, utterance.num_frames
        await self._send.json(
            {
                "type": "session.done",
                "session_id": self._session_id,
                "utterance_index": utterance.index,
                "total_sentences": utterance.num_spoken,
                "error": utterance.dropped == "failed",
                "cancelled": utterance.dropped == "cancelled",
                "num_frames": num_out,
                "audio_seconds": round(utterance.audio_s, 4),
                "usage": {
                    "input_tokens": num_in,
                    "output_tokens": num_out,
                    "total_tokens": num_in + num_out,
                },
            }
        )


def _numbered(prepared: PreparedSpeech, first_piece: int) -> PreparedSpeech:
    """Its pieces counted on from those of the sentences before."""
    requests = tuple(replace(request, piece=first_piece + request.piece) for request in prepared.requests)
    return replace(prepared, requests=requests)


async def _as_one(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield b"".join([part async for part in parts])
