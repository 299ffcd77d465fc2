"""How long a text and its speech may be. Plain arithmetic on tokens, prompt rows and frames.

A talker now and then never draws its end (quirk Q24 of the reference): a few words then run on
for minutes of babble or near-silence, up to the checkpoint's 8,192 frames, 11 minutes. So a
request that names no limit of its own gets one that grows with its text:

    frames = min(the checkpoint's max_new_tokens, max(192, 12 * text tokens))

Ordinary speech takes 3 to 4 frames a token, so 12 leaves three times the usual pace ("very
slowly", digits read out one by one) before a slow speaker is cut, and the floor of 192 frames,
15 s, leaves room for one word drawn out. Reaching a limit is never silent: the stream finishes
with "length".

A text must also fit the positions of the talker, with its speech behind it:

    | instruction, role, language, voice, reference | text | frames ............. |
    |<------------------- prompt rows ------------------->|<----- frame limit --->|
    |<------------------------- max_positions ----------------------------------->|

Its own limit leaves four frames for each of its tokens, so no text is accepted that could only be
cut short.
"""

from __future__ import annotations

from qwen3tts_core.config import CheckpointConfig
from qwen3tts_core.errors import InvalidRequest, TextTooLong

MIN_DEFAULT_FRAMES = 192
MAX_FRAMES_PER_TOKEN = 12
USUAL_FRAMES_PER_TOKEN = 4


def text_token_limit(config: CheckpointConfig, max_positions: int) -> int:
    """The most tokens of one text. max_positions: what the engine holds for one request."""
    return min(max_positions, config.talker.max_positions) // (1 + USUAL_FRAMES_PER_TOKEN)


def default_frame_limit(config: CheckpointConfig, num_text_tokens: int) -> int:
    """The most frames of a request that doesn't say, from the tokens of the text to be spoken."""
    return min(config.max_new_tokens, max(MIN_DEFAULT_FRAMES, MAX_FRAMES_PER_TOKEN * num_text_tokens))


def frame_room(config: CheckpointConfig, num_rows: int, max_positions: int) -> int:
    """How many frames fit behind a prompt of so many rows; below 1 if none does."""
    return min(max_positions, config.talker.max_positions) - num_rows


def frame_limit(
    config: CheckpointConfig,
    num_text_tokens: int,
    num_rows: int,
    max_positions: int,
    max_new_tokens: int | None = None,
) -> int:
    """The most frames one request may make, such that they fit behind its prompt.

    num_text_tokens: of the text to be spoken, alone. num_rows: of the whole prompt.
    max_positions: prompt rows + frames that the engine holds for one request.
    max_new_tokens: the caller's own limit, counted in frames and used as given.
    Raises TextTooLong on `input`, or on what else fills the prompt (the instruction, the reference
    of a clone); InvalidRequest on `max_new_tokens` when that is below 1 or doesn't fit.
    """
    limit = text_token_limit(config, max_positions)
    if num_text_tokens > limit:
        raise TextTooLong(num_text_tokens, limit)
    room = frame_room(config, num_rows, max_positions)
    default = default_frame_limit(config, num_text_tokens)
    needed = min(default, USUAL_FRAMES_PER_TOKEN * num_text_tokens)
    if room < needed:
        filler = "ref_audio" if config.model_type == "base" else "instructions"
        num_others = num_rows - num_text_tokens
        raise TextTooLong(num_others, room + num_others - needed, filler)
    if max_new_tokens is None:
        return min(default, room)
    if not 1 <= max_new_tokens <= room:
        raise InvalidRequest(
            f"max_new_tokens must be from 1 to the {room:,} frames that fit behind this prompt, "
            f"got {max_new_tokens:,}",
            "max_new_tokens",
        )
    return max_new_tokens
