"""What a request may ask of which kind of checkpoint, before its text is looked at.

    CustomVoice   `voice` is a built-in speaker
    VoiceDesign   `instructions` describes the voice
    Base          the voice of a clip: `ref_audio`, or an uploaded voice by name

Rules between fields of the body; `text/prompt.py` has those of texts and names.
"""

from __future__ import annotations

from collections.abc import Mapping

from deployments.schemas import SpeechBody, TaskType
from qwen3tts_core.config import ModelType
from qwen3tts_core.errors import InvalidRequest

TASK_TYPES: Mapping[ModelType, TaskType] = {
    "custom_voice": "CustomVoice",
    "voice_design": "VoiceDesign",
    "base": "Base",
}
_CLONE_FIELDS = ("ref_audio", "ref_text", "x_vector_only_mode")


def check_task(body: SpeechBody, model_name: str, model_type: ModelType) -> None:
    """Raises InvalidRequest that names the field and says what to send instead."""
    task = TASK_TYPES[model_type]
    if body.task_type not in (None, task):
        raise InvalidRequest(
            f"task_type is {body.task_type}, but {model_name} is a {task} checkpoint; GET /v1/models tells which "
            "model does what",
            "task_type",
        )
    if task == "Base":
        _check_clone(body, model_name)
        return
    for field in _CLONE_FIELDS:
        if getattr(body, field) is not None:
            raise InvalidRequest(
                f"{model_name} is a {task} checkpoint and clones no voice, so it takes no {field}; "
                "Base checkpoints do",
                field,
            )


def _check_clone(body: SpeechBody, model_name: str) -> None:
    if body.ref_audio is None:
        if body.voice_name is None:
            raise InvalidRequest(
                f"{model_name} is a Base checkpoint, whose voice is that of a clip: send ref_audio with ref_text "
                "(what is said in it) or x_vector_only_mode true, or voice, the name of an uploaded voice",
                "ref_audio",
            )
        return
    if body.voice_name is not None:
        raise InvalidRequest("the voice is either ref_audio's or an uploaded one, got both", "voice")
    if not body.ref_text and not body.x_vector_only_mode:
        raise missing_transcript("ref_audio")


def missing_transcript(whose: str) -> InvalidRequest:
    return InvalidRequest(
        f"cloning in context needs ref_text, what is said in {whose}; or send x_vector_only_mode true, "
        "which takes the voice alone",
        "ref_text",
    )
