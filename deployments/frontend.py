"""A parsed body to SpeechRequests, one for each piece of its text: names to ids, text to prompts, limits, sampling.

Small enough to run in the ingress: ids leave here, embeddings are looked up where the weights are.
Knows the checkpoint's JSON and tokenizer; nothing of HTTP, of Ray, or of tensors.
"""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from deployments.schemas import SpeechBody
from deployments.tasks import check_task
from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.errors import InvalidRequest, TextTooLong, UnknownLanguage, UnknownVoice
from qwen3tts_core.text.limits import frame_limit, frame_room, text_token_limit
from qwen3tts_core.text.prompt import (
    CloneReference,
    SpeechText,
    TextLayout,
    build_plan,
    check_speech,
    check_tokenizer,
    has_words,
    text_tokens,
)
from qwen3tts_core.text.sentences import LongText, cut_again, cut_text
from qwen3tts_core.text.tokenizer import TextTokenizer
from qwen3tts_core.text.voices import list_languages, list_speakers
from qwen3tts_core.types import DrawParams, PrefillPlan, ReferenceVoice, Sampling, SpeechRequest

_LOWEST_TEMPERATURE = 1e-3
_LONG_TEXT = LongText()


@dataclass(frozen=True, slots=True)
class Clone:
    """A voice from a clip. name: of an uploaded voice, or "". transcript: what is said in the clip, in context;
    None takes the voice alone."""

    name: str
    voice: ReferenceVoice
    transcript: str | None


@dataclass(frozen=True, slots=True)
class PreparedSpeech:
    """requests: for the Talker, one for each piece of the text, with one seed and voice. voice: its name, or "".
    num_text_tokens: of the input alone. max_frames: of all pieces together; None: only each one's own limit."""

    requests: tuple[SpeechRequest, ...]
    voice: str
    num_text_tokens: int
    max_frames: int | None = None

    @property
    def request(self) -> SpeechRequest:
        """The first piece's; the only one of a short text."""
        return self.requests[0]


class _Utterance(NamedTuple):
    plan: PrefillPlan
    max_frames: int
    num_text_tokens: int


class Frontend:
    """One checkpoint's text side. max_positions: prompt rows + frames the talker holds for a request."""

    def __init__(
        self,
        config: CheckpointConfig,
        tokenizer: TextTokenizer,
        *,
        model_name: str,
        max_positions: int,
        long_text: LongText = _LONG_TEXT,
    ) -> None:
        check_tokenizer(config, tokenizer)
        self.config = config
        self.model_name = model_name
        self._tokenizer = tokenizer
        self._max_positions = max_positions
        self._long_text = long_text

    @classmethod
    def from_checkpoint(
        cls, folder: Path, *, model_name: str, max_positions: int, long_text: LongText = _LONG_TEXT
    ) -> Frontend:
        """Raises CheckpointMismatch."""
        config = CheckpointConfig.from_checkpoint(folder)
        tokenizer = TextTokenizer.from_checkpoint(folder)
        return cls(config, tokenizer, model_name=model_name, max_positions=max_positions, long_text=long_text)

    @property
    def voices(self) -> tuple[str, ...]:
        return list_speakers(self.config) if self.config.model_type == "custom_voice" else ()

    @property
    def default_voice(self) -> str:
        """The checkpoint's first speaker; "" where it has none."""
        return next(iter(self.voices), "")

    @property
    def languages(self) -> tuple[str, ...]:
        return list_languages(self.config)

    def check(self, body: SpeechBody) -> None:
        """Refuse what needs no clip to be refused. Raises InvalidRequest and its kinds."""
        self._check_length(body)
        check_task(body, self.model_name, self.config.model_type)
        reference = None
        if self.config.model_type == "base":
            reference = CloneReference(None if body.x_vector_only_mode else body.ref_text or None)
        check_speech(self.config, self._speech(body, reference))

    def prepare(self, body: SpeechBody, clone: Clone | None = None) -> PreparedSpeech:
        """clone: the voice of a body that was checked, on Base checkpoints.

        Raises InvalidRequest and its kinds; nothing has been started by then.
        """
        self._check_length(body)
        reference = None
        if clone is None:
            check_task(body, self.model_name, self.config.model_type)
        else:
            num_frames = len(clone.voice.codes) // (2 * self.config.talker.num_code_groups)
            reference = CloneReference(clone.transcript, num_frames)
        speech = self._speech(body, reference)
        check_speech(self.config, speech)
        # A piece may be made of characters that can't be said, though the text as a whole can.
        texts = [text for text in self._cut(speech.text) if has_words(text)]
        is_long = len(texts) > 1
        pieces = [self._plan(replace(speech, text=text), body.max_new_tokens, is_long) for text in texts]
        request_id = uuid.uuid4().hex  # never the client's own id: two requests may share that
        sampling = _sampling(body, self.config.sampling)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        requests = [
            SpeechRequest(
                request_id=f"{request_id}.{number}" if number else request_id,
                plan=piece.plan,
                sampling=sampling,
                seed=seed,
                max_frames=piece.max_frames,
                piece=number,
                reference=None if clone is None else clone.voice,
                model=self.model_name,
            )
            for number, piece in enumerate(pieces)
        ]
        return PreparedSpeech(
            requests=tuple(requests),
            voice=(speech.voice or "").lower() if clone is None else clone.name,
            num_text_tokens=sum(piece.num_text_tokens for piece in pieces),
            max_frames=body.max_new_tokens if is_long else None,
        )

    def _check_length(self, body: SpeechBody) -> None:
        length, limit = len(body.input), self._long_text.max_chars
        if length > limit:
            raise TextTooLong(length, limit, "input", "characters")

    def _cut(self, text: str) -> list[str]:
        """The text's pieces, none of more tokens than the talker takes at once."""
        limit = text_token_limit(self.config, self._max_positions)
        texts, waiting = [], list(reversed(cut_text(text, self._long_text)))
        while waiting:
            piece = waiting.pop()
            # A token is a byte or more, so most pieces needn't be looked at.
            is_small = len(piece.encode()) <= limit or len(text_tokens(self._tokenizer, piece)) <= limit
            if is_small or len(piece) == 1:
                texts.append(piece)
            else:
                waiting += reversed(cut_again(piece))
        return texts

    def _plan(self, speech: SpeechText, max_new_tokens: int | None, is_piece: bool) -> _Utterance:
        """is_piece: the caller's limit is for the whole text, so no piece needs room for all of it."""
        num_text_tokens = len(text_tokens(self._tokenizer, speech.text))
        plan = build_plan(self.config, self._tokenizer, speech)
        if is_piece and max_new_tokens is not None:
            room = frame_room(self.config, plan.num_rows, self._max_positions)
            max_new_tokens = min(max_new_tokens, room)
        max_frames = frame_limit(
            self.config,
            num_text_tokens=num_text_tokens,
            num_rows=plan.num_rows,
            max_positions=self._max_positions,
            max_new_tokens=max_new_tokens,
        )
        return _Utterance(plan, max_frames, num_text_tokens)

    def _speech(self, body: SpeechBody, reference: CloneReference | None) -> SpeechText:
        is_base = self.config.model_type == "base"  # whose voices are no speakers
        if body.language == "":  # the core takes "" for none; a client that sends it means something
            raise UnknownLanguage("", self.languages)
        if body.voice_name == "" and not is_base:
            raise UnknownVoice("", self.voices)
        return SpeechText(
            text=body.input,
            voice=None if is_base else body.voice_name or self.default_voice,  # "" where there is none
            language=body.language,
            instructions=body.instructions,
            reference=reference,
            layout=_layout(body.non_streaming_mode),
        )


def _layout(non_streaming_mode: bool | None) -> TextLayout | None:
    if non_streaming_mode is None:
        return None
    return "full" if non_streaming_mode else "streaming"


def _sampling(body: SpeechBody, default: Sampling) -> Sampling:
    """The checkpoint's own settings, overridden field by field."""
    return Sampling(
        talker=_draw(default.talker, "", body.do_sample, body.temperature, body.top_k, body.top_p),
        subtalker=_draw(
            default.subtalker,
            "subtalker_",
            body.subtalker_dosample,
            body.subtalker_temperature,
            body.subtalker_top_k,
            body.subtalker_top_p,
        ),
        repetition_penalty=(
            default.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
        ),
    )


def _draw(
    default: DrawParams,
    prefix: str,
    do_sample: bool | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
) -> DrawParams:
    """Temperature 0 is greedy, whatever `do_sample` says."""
    do_sample = default.do_sample if do_sample is None else do_sample
    if temperature == 0:
        do_sample, temperature = False, None
    if temperature is not None and temperature < _LOWEST_TEMPERATURE:
        raise InvalidRequest(
            f"{prefix}temperature must be 0 (greedy) or from {_LOWEST_TEMPERATURE} to 10, got {temperature}",
            f"{prefix}temperature",
        )
    return DrawParams(
        do_sample=do_sample,
        temperature=default.temperature if temperature is None else temperature,
        top_k=default.top_k if top_k is None else top_k,
        top_p=default.top_p if top_p is None else top_p,
    )
