"""From a text and a voice to the rows of the talker's prompt.

The result is a plan in ids: which text feature and which codec embedding each row is the sum of.
Embeddings are looked up where the weights are; here nothing is model-sized. Knows every layout of
the three kinds of checkpoint, and refuses what a checkpoint can't do with the API's field name.

    instruction   role   language   speaker   begin   | text ...                      <- layouts
    text only     text   PAD +      PAD +     BOS +   | "full":      all of it, then one row to
    1 per token   only   think ids  vector    pad     |              start; "streaming": its first
                  3      3 or 4     0 or 1    1       |              token, the rest frame by frame
Source: spec section 3; qwen-tts 0.1.1, core/models/modeling_qwen3_tts.py, `generate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from qwen3tts_core.config import CheckpointConfig, ModelType
from qwen3tts_core.errors import InvalidRequest
from qwen3tts_core.text.tokenizer import TextTokenizer
from qwen3tts_core.text.voices import find_language, find_speaker
from qwen3tts_core.types import NO_ID, PrefillPlan

TextLayout = Literal["full", "streaming"]
Row = tuple[int, int]

_DEFAULT_LAYOUT: dict[ModelType, TextLayout] = {
    "custom_voice": "full",
    "voice_design": "full",
    "base": "streaming",
}
_WITHOUT_INSTRUCTIONS = "0b6"
_TAKES_INSTRUCTIONS = "1.7B CustomVoice and VoiceDesign checkpoints take them"
_NUM_ROLE_TOKENS = 3


@dataclass(frozen=True, slots=True)
class CloneReference:
    """What a prompt must know of a reference clip (Base checkpoints).

    num_frames: of the clip's codes, for in-context cloning; 0 takes its x-vector alone.
    transcript: what is said in the clip; in-context only.
    """

    num_frames: int = 0
    transcript: str = ""

    @property
    def is_in_context(self) -> bool:
        return self.num_frames > 0


@dataclass(frozen=True, slots=True)
class SpeechText:
    """What is to be spoken and how, as the caller named it.

    voice: a built-in speaker, in any case; None or "" speaks without one.
    language: see `voices.list_languages`; None means "Auto".
    instructions: how to speak, or (VoiceDesign) the voice's description; None or "" means none.
    layout: where the text sits; None takes the reference's default for the checkpoint.
    """

    text: str
    voice: str | None = None
    language: str | None = None
    instructions: str | None = None
    reference: CloneReference | None = None
    layout: TextLayout | None = None


def check_speech(config: CheckpointConfig, speech: SpeechText) -> None:
    """Raise what is wrong with `speech` on this checkpoint, before any work is done for it.

    Raises InvalidRequest, UnknownVoice or UnknownLanguage; `param` is the API's field.
    """
    _require_words(speech.text, "input")
    find_language(config, speech.language)
    if speech.voice:
        if config.model_type != "custom_voice":
            raise InvalidRequest(
                f"{_name(config)} has no built-in voices, so voice can't be {speech.voice!r}", "voice"
            )
        find_speaker(config, speech.voice)
    if speech.instructions:
        _check_instructions(config, speech.instructions)
    _check_reference(config, speech.reference)


def build_plan(config: CheckpointConfig, tokenizer: TextTokenizer, speech: SpeechText) -> PrefillPlan:
    """The prompt's rows and the text that trails behind them. Raises as `check_speech` does.

    The last row's hidden state predicts frame 0.
    """
    check_speech(config, speech)
    role, body = _spoken_turn(tokenizer, speech.text)
    tail = _full_tail if _layout(config, speech) == "full" else _streaming_tail
    rows = _Rows()
    if speech.instructions:
        rows.add_text(_instruction_turn(tokenizer, speech.instructions))
    rows.add_text(role)
    speaker_row = _add_voice_head(rows, config, speech)
    if speech.reference is None or not speech.reference.is_in_context:
        trailing = tail(rows, config, body)
        return rows.plan(trailing, speaker_row)
    _, transcript = _spoken_turn(tokenizer, speech.reference.transcript)
    ...


def text_tokens(tokenizer: TextTokenizer, text: str) -> tuple[int, ...]:
    """Ids of the text to be spoken, as its prompt holds them: what limits and usage count."""
    return _spoken_turn(tokenizer, text)[1]
