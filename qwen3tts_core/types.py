"""The small values that travel between text, engines and deployments. No torch here.

`SpeechRequest` goes towards the Talker; `FrameBatch` (codes) and `AudioChunk` (PCM) come back,
each as one `bytes` item with a fixed header, so that a stream item is a copy and never a pickle.
A frame is one code per group, 80 ms in the published checkpoints.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Literal, NamedTuple

from qwen3tts_core.errors import InvalidCodes, InvalidRequest

FinishReason = Literal["stop", "length"]
_FINISH_TO_BYTE: dict[FinishReason | None, int] = {None: 0, "stop": 1, "length": 2}
_BYTE_TO_FINISH: dict[int, FinishReason | None] = {v: k for k, v in _FINISH_TO_BYTE.items()}

NO_ID = -1
"""In a `PrefillPlan`: this row takes nothing from that table."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How one code is drawn from its logits. `top_k` 0 and `top_p` 1 mean no cut."""

    do_sample: bool = True
    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise InvalidRequest(
                f"temperature must be above 0 and finite, got {self.temperature}", "temperature"
            )
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be 0 (off) or more, got {self.top_k}", "top_k")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p must be in (0, 1], got {self.top_p}", "top_p")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Group 0 is drawn with `talker` and the repetition penalty, the other groups with `subtalker`."""

    talker: DrawParams = DrawParams()
    subtalker: DrawParams = DrawParams()
    repetition_penalty: float = 1.05

    def __post_init__(self) -> None:
        if not 0 < self.repetition_penalty < math.inf:
            raise InvalidRequest(
                f"repetition_penalty must be above 0 and finite, got {self.repetition_penalty}",
                "repetition_penalty",
            )


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """A prompt as ids: what each of its rows is the sum of.

    text_ids, codec_ids: one entry per prompt row; row = text feature of `text_ids[i]` (unless
        NO_ID) + codec embedding of `codec_ids[i]` (unless NO_ID).
    trailing_ids: text ids added to the input after frame 0, 1, …; the pad feature afterwards.
    speaker_row: the row to which the request's x-vector is added (voice clone), or None.
    reference_row: the row to which the first reference frame's summed embedding is added, the
        next frames to the rows after it (in-context clone), or None.
    Source: spec sections 3.2 and 3.3.
    """

    text_ids: tuple[int, ...]
    codec_ids: tuple[int, ...]
    trailing_ids: tuple[int, ...]
    speaker_row: int | None = None
    reference_row: int | None = None

    def __post_init__(self) -> None:
        assert len(self.text_ids) == len(self.codec_ids), "one codec id per prompt row"

    @property
    def num_rows(self) -> int:
        return len(self.text_ids)


@dataclass(frozen=True, slots=True)
class ReferenceVoice:
    """What a clone takes from its clip.

    key: content hash and mode; equal keys mean equal voices, so state may be cached under it.
    x_vector: [D] float32, little endian.
    codes: [F, G] int16, little endian; empty in x-vector-only mode.
    """

    key: str
    x_vector: bytes
    codes: bytes = b""


@dataclass(frozen=True, slots=True)
class Resume:
    """Frames of an utterance whose audio has been sent: engines that get them go on after them.

    codes: [F, G] int16, little endian, from frame 0. cuts: the frames of each chunk in which they
    were sent, F together.
    """

    codes: bytes
    cuts: tuple[int, ...]

    def __post_init__(self) -> None:
        assert min(self.cuts, default=0) >= 1, "chunks with frames in them"

    @property
    def num_frames(self) -> int:
        return sum(self.cuts)


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """One utterance for the Talker, everything validated.

    seed: any int; only its lower 64 bits count. piece: index of the sentence within a long text.
    max_frames: the most frames produced, those of `resume` included; reaching it finishes with "length".
    model: the served model's name, by which a codec that several share finds the right Talker.
    resume: where an earlier chain of engines broke; this one goes on as if it had made those frames.
    """

    request_id: str
    plan: PrefillPlan
    sampling: Sampling
    seed: int
    max_frames: int
    piece: int = 0
    reference: ReferenceVoice | None = None
    model: str = ""
    resume: Resume | None = None

    def __post_init__(self) -> None:
        if self.max_frames < 1:
            raise InvalidRequest(
                f"max_new_tokens must be at least 1, got {self.max_frames}", "max_new_tokens"
            )
        needs_voice = self.plan.speaker_row is not None or self.plan.reference_row is not None
        assert (self.reference is not None) or not needs_voice, "the plan names a reference it lacks"


def _finish_reason(byte: int) -> FinishReason | None:
    if byte not in _BYTE_TO_FINISH:
        raise InvalidCodes(f"no item finishes with {byte}")
    return _BYTE_TO_FINISH[byte]


_FRAME_HEADER = struct.Struct("<IHBB")  # first frame, number of frames, groups, finish


class ItemHeader(NamedTuple):
    """How the bytes of a FrameBatch and those of an AudioChunk begin: enough for whoever only passes them on."""

    first_frame: int
    num_frames: int
    num_groups: int
    finish: FinishReason | None

    @classmethod
    def of(cls, item: bytes) -> ItemHeader:
        """Raises InvalidCodes when the item is neither."""
        if len(item) < _FRAME_HEADER.size:
            raise InvalidCodes(f"an item has {len(item)} bytes, its header alone {_FRAME_HEADER.size}")
        first, frames, groups, finish = _FRAME_HEADER.unpack_from(item)
        return cls(first, frames, groups, _finish_reason(finish))


class FrameBatch(NamedTuple):
    """Consecutive frames of one request.

    codes: [F, G] int16 little endian, group 0 first. finish is set on the last item of a stream,
    which may be empty (the end was only known after its last frame had left).
    """

    first_frame: int
    num_frames: int
    num_groups: int
    codes: bytes
    finish: FinishReason | None = None

    def to_bytes(self) -> bytes:
        header = _FRAME_HEADER.pack(
            self.first_frame, self.num_frames, self.num_groups, _FINISH_TO_BYTE[self.finish]
        )
        return header + self.codes

    @classmethod
    def from_bytes(cls, item: bytes) -> FrameBatch:
        """Raises InvalidCodes when the item isn't one that `to_bytes` wrote."""
        first, frames, groups, finish = ItemHeader.of(item)
        codes = item[_FRAME_HEADER.size :]
        if len(codes) != 2 * frames * groups:
            raise InvalidCodes(
                f"{frames} frames x {groups} groups need {2 * frames * groups} bytes, got {len(codes)}"
            )
        return cls(first, frames, groups, codes, finish)


_AUDIO_HEADER = struct.Struct("<IHBBI")  # first frame, number of frames, groups, finish, PCM bytes


class AudioChunk(NamedTuple):
    """The PCM of consecutive frames of one request, and the codes it was made from.

    pcm: mono PCM16 little endian. codes: as in FrameBatch; they ride along (32 B a frame) so that
    whoever holds the audio can restart the stream elsewhere.
    """

    first_frame: int
    num_frames: int
    num_groups: int
    pcm: bytes
    codes: bytes
    finish: FinishReason | None = None

    def to_bytes(self) -> bytes:
        header = _AUDIO_HEADER.pack(
            self.first_frame, self.num_frames, self.num_groups, _FINISH_TO_BYTE[self.finish], len(self.pcm)
        )
        return b"".join((header, self.pcm, self.codes))

    @classmethod
    def from_bytes(cls, item: bytes) -> AudioChunk:
        """Raises InvalidCodes when the item isn't one that `to_bytes` wrote."""
        if len(item) < _AUDIO_HEADER.size:
            raise InvalidCodes(f"an audio item has {len(item)} bytes, its header alone {_AUDIO_HEADER.size}")
        first, frames, groups, finish, num_pcm = _AUDIO_HEADER.unpack_from(item)
        start, end = _AUDIO_HEADER.size, _AUDIO_HEADER.size + num_pcm
        if len(item) - end != 2 * frames * groups:
            raise InvalidCodes(
                f"an audio item of {len(item)} bytes doesn't hold {num_pcm} + {2 * frames * groups}"
            )
        return cls(first, frames, groups, item[start:end], item[end:], _finish_reason(finish))
