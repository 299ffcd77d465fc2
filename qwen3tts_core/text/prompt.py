"""From a text and a voice to the rows of the talker's prompt.

The result is a plan in ids: which text feature and which codec embedding each row is the sum of.
Embeddings are looked up where the weights are; nothing here is model-sized. This module knows the
layouts of all three kinds of checkpoint, and refuses what a checkpoint can't do by the name of the
API's field.

    rows         instruction | role | language | speaker | begin |  text and codec tail
    text side    its tokens  |  3   |   PAD    |   PAD   | BOS   |  see `_tail`
    codec side       -       |  -   | think... | vector  | pad   |

Source: spec section 3; qwen-tts 0.1.1, core/models/modeling_qwen3_tts.py, `generate`.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Literal

from qwen3tts_core.config import CheckpointConfig, ModelType
from qwen3tts_core.errors import CheckpointMismatch, InvalidRequest
from qwen3tts_core.text.tokenizer import TextTokenizer
from qwen3tts_core.text.voices import find_language, find_speaker
from qwen3tts_core.types import NO_ID, PrefillPlan

TextLayout = Literal["full", "streaming"]

_Ids = tuple[int, ...]
_Row = tuple[int, int]

_DEFAULT_LAYOUT: dict[ModelType, TextLayout] = {
    "custom_voice": "full",
    "voice_design": "full",
    "base": "streaming",
}
_KIND_NAMES: dict[ModelType, str] = {
    "custom_voice": "CustomVoice",
    "voice_design": "VoiceDesign",
    "base": "Base",
}
_WORDS = "LNSP"  # initials of general categories: letters, numbers, symbols, punctuation
_BLANKS = "\u115f\u1160\u3164\uffa0\u2800\U0001d159"  # Hangul fillers, braille blank, musical null notehead
_NUM_ROLE_TOKENS = 3  # <|im_start|>, the role's name, newline
_SIZE_WITHOUT_INSTRUCTIONS = "0b6"


@dataclass(frozen=True, slots=True)
class CloneReference:
    """What a prompt must know of a reference clip (Base checkpoints).

    transcript: what is said in the clip, for in-context cloning; None takes the x-vector alone.
    num_frames: of the clip's codes; counts in-context only, and may be 0 until they are known.
    """

    transcript: str | None = None
    num_frames: int = 0


@dataclass(frozen=True, slots=True)
class SpeechText:
    """What is to be spoken and how, as the caller named it.

    voice: a built-in speaker, in any case; None or "" speaks without one.
    language: one of `voices.list_languages`, in any case; None means "Auto".
    instructions: how to speak, or (VoiceDesign) the voice's description; None or "" means none.
    layout: "full" has the whole text in the prompt, "streaming" its first token, the others
        following frame by frame; None takes the reference's default for the checkpoint.
    """

    text: str
    voice: str | None = None
    language: str | None = None
    instructions: str | None = None
    reference: CloneReference | None = None
    layout: TextLayout | None = None


def check_tokenizer(config: CheckpointConfig, tokenizer: TextTokenizer) -> None:
    """Raise CheckpointMismatch unless the tokenizer gives what prompts are cut by."""
    problems = [
        f"{turn!r} must be {count} tokens, got {len(tokenizer.encode(turn))}"
        for turn, count in {"assistant\n": 2, "user\n": 2, "\n": 1}.items()
        if len(tokenizer.encode(turn)) != count
    ]
    largest = max(tokenizer.largest_id, config.tts_pad_id, config.tts_bos_id, config.tts_eos_id)
    if largest >= config.talker.text_vocab_size:
        problems.append(f"id {largest} is beyond text_vocab_size, {config.talker.text_vocab_size}")
    if problems:
        raise CheckpointMismatch("tokenizer", problems)


def check_speech(config: CheckpointConfig, speech: SpeechText) -> None:
    """Raise what is wrong with `speech` on this checkpoint, before any work is done for it.

    Raises InvalidRequest, UnknownVoice or UnknownLanguage; `param` is the API's field.
    """
    _check_words(speech.text, "input")
    find_language(config, speech.language)
    if speech.voice:
        if config.model_type != "custom_voice":
            raise InvalidRequest(f"{_kind(config)} has no built-in voices, got {speech.voice!r}", "voice")
        find_speaker(config, speech.voice)
    if speech.instructions:
        _check_instructions(config, speech.instructions)
    _check_reference(config, speech.reference)


def build_plan(config: CheckpointConfig, tokenizer: TextTokenizer, speech: SpeechText) -> PrefillPlan:
    """The prompt's rows, and the text that trails behind them. Raises as `check_speech` does.

    The last row's hidden state predicts frame 0, in every layout. An in-context clone must know
    its number of reference frames by now.
    """
    check_speech(config, speech)
    role, body = _cut_role(_encode_turn(tokenizer, "assistant", speech.text))
    rows: list[_Row] = []
    if speech.instructions:
        instruction = _encode_turn(tokenizer, "user", speech.instructions)
        rows += [(token, NO_ID) for token in (*instruction, tokenizer.im_end_id, *tokenizer.encode("\n"))]
    rows += [(token, NO_ID) for token in role]
    speaker_row = _add_voice(rows, config, speech)

    transcript: _Ids = ()
    num_reference_frames = 0
    if speech.reference is not None and speech.reference.transcript is not None:
        _, transcript = _cut_role(_encode_turn(tokenizer, "assistant", speech.reference.transcript))
        num_reference_frames = speech.reference.num_frames
        assert num_reference_frames > 0, "an in-context clone needs its reference's frames"
    text = (*transcript, *body, config.tts_eos_id)
    codec = (config.talker.codec_bos_id, *(NO_ID,) * num_reference_frames)
    layout = speech.layout or _DEFAULT_LAYOUT[config.model_type]
    tail, trailing, codec_start = _tail(config, text, codec, layout)
    text_ids, codec_ids = zip(*rows, *tail, strict=True)
    return PrefillPlan(
        text_ids=text_ids,
        codec_ids=codec_ids,
        trailing_ids=trailing,
        speaker_row=speaker_row,
        reference_row=len(rows) + codec_start + 1 if num_reference_frames else None,
    )


def has_words(text: str) -> bool:
    """Whether anything in the text could be said: one letter, number, symbol or punctuation mark.

    An emoji or "..." alone counts: the model takes it, though what it says may be no more than a breath. What
    has no look of its own doesn't: whitespace, controls, formats, unassigned and private characters, combining
    marks without a base, and the letters and symbols that are blank by definition.
    Source: Unicode 15, UnicodeData.txt (general categories), DerivedCoreProperties.txt
    (Default_Ignorable_Code_Point).
    """
    return any(unicodedata.category(char)[0] in _WORDS and char not in _BLANKS for char in text)


def text_tokens(tokenizer: TextTokenizer, text: str) -> tuple[int, ...]:
    """Ids of the text to be spoken as the prompt holds them: what limits and usage count."""
    return _cut_role(_encode_turn(tokenizer, "assistant", text))[1]


# ---------------------------------------------------------------- rows
def _add_voice(rows: list[_Row], config: CheckpointConfig, speech: SpeechText) -> int | None:
    """Append the rows of language, speaker and begin; where an x-vector goes, or None."""
    pad, talker = config.tts_pad_id, config.talker
    speaker = find_speaker(config, speech.voice) if speech.voice else None
    language = find_language(config, speech.language, speaker)
    if language is None:
        thought: _Ids = (talker.codec_nothink_id, talker.codec_think_bos_id)
    else:
        thought = (talker.codec_think_id, talker.codec_think_bos_id, language)
    rows += [(pad, code) for code in (*thought, talker.codec_think_eos_id)]
    speaker_row = None
    if speaker is not None:
        rows.append((pad, speaker.codec_id))
    elif speech.reference is not None:
        speaker_row = len(rows)
        rows.append((pad, NO_ID))
    rows.append((config.tts_bos_id, talker.codec_pad_id))
    return speaker_row


def _tail(
    config: CheckpointConfig, text: _Ids, codec: _Ids, layout: TextLayout
) -> tuple[list[_Row], _Ids, int]:
    """The rows after the head, the trailing text, and the first of the rows that holds `codec`.

        full        text   t0  t1  ... EOS PAD PAD PAD        then PAD for every frame
                    codec  pad pad ... pad bos r0  r1
        streaming   text   t0  t1  t2                         then t3 ... EOS, PAD for every frame
                    codec  bos r0  r1                         (PAD fills a text shorter than this)

    r0, r1 are reference frames; without any the codec side is `bos` alone.
    """
    pad = config.tts_pad_id
    if layout == "full":
        text_rows = [(token, config.talker.codec_pad_id) for token in text]
        return text_rows + [(pad, code) for code in codec], (pad,), len(text)
    num_pads = max(0, len(codec) - len(text))
    beside_codec = (*text, *(pad,) * num_pads)[: len(codec)]
    return list(zip(beside_codec, codec, strict=True)), text[len(codec) :] or (pad,), 0


# ---------------------------------------------------------------- text
def _encode_turn(tokenizer: TextTokenizer, role: str, text: str) -> _Ids:
    """`<|im_start|>{role}\\n{text}`: a turn up to its end mark.

    Role and text are one stretch for the tokenizer, as in the reference: newlines at the start of
    the text merge into the role's (quirk Q1). A special token's spelling in the text is only
    characters, so that no text can end its turn (quirk Q2, where we part from the reference).
    """
    return (tokenizer.im_start_id, *tokenizer.encode(f"{role}\n{text}"))


def _cut_role(turn: _Ids) -> tuple[_Ids, _Ids]:
    return turn[:_NUM_ROLE_TOKENS], turn[_NUM_ROLE_TOKENS:]


# ---------------------------------------------------------------- what a checkpoint takes
def _kind(config: CheckpointConfig) -> str:
    return f"a {_KIND_NAMES[config.model_type]} checkpoint"


def _check_words(text: str, param: str) -> None:
    _check_characters(text, param)
    if not has_words(text):
        got = ("only whitespace" if not text.strip() else "only invisible characters") if text else "nothing"
        raise InvalidRequest(f"{param} must hold text, got {got}", param)


def _check_characters(text: str, param: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} holds a lone surrogate at position {error.start}, which is no character", param
        ) from None


def takes_instructions(config: CheckpointConfig) -> bool:
    """Whether this checkpoint was trained to follow them, or (VoiceDesign) to take its voice from them."""
    return _kind_without_instructions(config) is None


def _kind_without_instructions(config: CheckpointConfig) -> str | None:
    if config.model_type == "base":
        return _kind(config)
    if config.model_type == "custom_voice" and config.model_size == _SIZE_WITHOUT_INSTRUCTIONS:
        return "a 0.6B CustomVoice checkpoint"  # the reference drops them in silence (quirk Q12)
    return None


def _check_instructions(config: CheckpointConfig, instructions: str) -> None:
    if (kind := _kind_without_instructions(config)) is not None:
        raise InvalidRequest(
            f"{kind} takes no instructions; the 1.7B CustomVoice and VoiceDesign checkpoints do",
            "instructions",
        )
    _check_characters(instructions, "instructions")


def _check_reference(config: CheckpointConfig, reference: CloneReference | None) -> None:
    if config.model_type != "base":
        if reference is not None:
            raise InvalidRequest(f"{_kind(config)} clones no voice; Base checkpoints do", "ref_audio")
        return
    if reference is None:
        raise InvalidRequest("a Base checkpoint needs a reference clip, or a stored voice", "ref_audio")
    if reference.transcript is not None:
        _check_words(reference.transcript, "ref_text")
