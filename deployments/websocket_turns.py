"""What a session has been told and hasn't spoken yet: its voices, utterances and sentences; and who listens."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from deployments.frontend import Clone
from deployments.metrics import RequestRecord
from deployments.schemas import SpeechBody
from deployments.served_models import ServedModel
from deployments.websocket_messages import SessionConfig


@dataclass(eq=False, slots=True)
class Voice:
    """held: the bytes of its message, until its clip is a voice. model, clone: once the speaker has come to it."""

    config: SessionConfig
    held: ExitStack
    model: ServedModel | None = None
    clone: Clone | None = None

    @property
    def body(self) -> SpeechBody:
        return self.config.body


@dataclass(eq=False, slots=True)
class Utterance:
    """What lies between two `input.done`. dropped: why the rest of it is not spoken."""

    index: int
    num_sentences: int = 0
    num_pieces: int = 0
    num_spoken: int = 0
    num_tokens: int = 0
    num_frames: int = 0
    audio_s: float = 0.0
    dropped: Literal["cancelled", "failed"] | None = None


@dataclass(eq=False, slots=True)
class Sentence:
    """task: its life, from the start of its chain. may_send: it is its turn."""

    voice: Voice
    utterance: Utterance
    index: int
    text: str
    may_send: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[RequestRecord] | None = None
    num_bytes: int = 0
    has_started: bool = False

    def fields(self, session_id: str) -> dict[str, Any]:
        """What every message about it says."""
        number = f"{self.utterance.index}-{self.index}"
        return {
            "id": f"{session_id}-{number}",
            "utterance_index": self.utterance.index,
            "sentence_index": self.index,
        }


class End:
    """Of the session."""


class Listener:
    """Somebody who hears the audio as it comes, and when they will have heard it all."""

    def __init__(self) -> None:
        self._silent_from = 0.0

    def add(self, audio_s: float) -> None:
        self._silent_from = max(self._silent_from, asyncio.get_running_loop().time()) + audio_s

    def forget(self) -> None:
        """They hear nothing of it any more."""
        self._silent_from = 0.0

    async def wait_until_near(self, look_ahead_s: float) -> None:
        """Until no more than this is left to be heard."""
        too_early_s = self._silent_from - asyncio.get_running_loop().time() - look_ahead_s
        await asyncio.sleep(max(0.0, too_early_s))
