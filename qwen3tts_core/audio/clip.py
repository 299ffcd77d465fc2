"""Reads a reference clip: any file libsndfile decodes becomes mono float32 at 24 kHz, or is refused.

Blocking and free of shared state: call it on a worker thread. Memory is bounded by the limits, not
by what the file says or unpacks to. Knows nothing of where the bytes came from or of any model.
Source: spec 5.1; the reference trims, normalises and refuses nothing.
"""

from __future__ import annotations

import hashlib
import io
import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from qwen3tts_core.errors import InvalidReferenceAudio

CLIP_RATE_HZ = 24_000
"""The rate of every clip: the mel of the speaker encoder and the codec's encoder are made for it."""

_BLOCK_SAMPLES = 1 << 18  # decoded at once, all channels together
_UNKNOWN_FRAMES = 1 << 62  # a streamed FLAC doesn't say its length; libsndfile answers with about 2**63
_LOUDNESS_WINDOW = CLIP_RATE_HZ // 20  # 50 ms

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReferenceLimits:
    """What a clip may be. Times in seconds of audio, rates in Hz, sizes in bytes of the file.

    min_level_db: the loudest 50 ms must reach it (RMS about its mean, 0 dB = full scale).
    max_peak: full scale is 1; a float file with integer-sized samples lies far above.
    """

    min_seconds: float = 1.0
    max_seconds: float = 30.0
    max_bytes: int = 10 << 20
    max_channels: int = 16
    min_rate_hz: int = 4_000
    max_rate_hz: int = 384_000
    min_level_db: float = -60.0
    max_peak: float = 16.0

    def __post_init__(self) -> None:
        # Below 0.1 s the networks have no frames to pad from; above 600 s the encoder's lengths,
        # which the library computes in float32, would no longer be exact.
        if not 0.1 <= self.min_seconds <= self.max_seconds <= 600:
            raise ValueError(
                f"expected 0.1 <= min_seconds <= max_seconds <= 600, got {self.min_seconds} and {self.max_seconds}"
            )
        if self.max_bytes < 1 or self.max_channels < 1 or not 1 <= self.min_rate_hz <= self.max_rate_hz:
            raise ValueError(f"sizes must be positive and rates in order, got {self}")


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceClip:
    """Mono float32 samples at CLIP_RATE_HZ, read-only. digest: SHA-256 of them as little endian, in hex."""

    samples: Samples
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        samples = np.ascontiguousarray(self.samples, dtype="<f4").view()
        assert samples.ndim == 1, f"a clip is mono, got shape {samples.shape}"
        samples.flags.writeable = False
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "digest", hashlib.sha256(samples.data).hexdigest())

    @property
    def seconds(self) -> float:
        return len(self.samples) / CLIP_RATE_HZ

    def voice_key(self, in_context: bool) -> str:
        """The `ReferenceVoice.key` of this clip."""
        return voice_key(self.digest, in_context)


def voice_key(clip_digest: str, in_context: bool) -> str:
    """Content hash and mode: what one clip means to a prompt."""
    return f"{clip_digest}-{'in-context' if in_context else 'x-vector'}"


class _ForwardFile(soundfile.SoundFile):  # type: ignore[misc]  # the library has no types
    """Read front to back. Otherwise the library seeks after every block: slow for MP3, and an error
    for a FLAC that doesn't say its length."""

    def seekable(self) -> bool:
        return False


def read_clip(data: bytes, limits: ReferenceLimits = ReferenceLimits()) -> ReferenceClip:
    """Decode, average the channels, resample (soxr HQ) and check.

    A file that is too long is refused by its header; where the header is silent or lies, decoding
    stops at the limit. Raises InvalidReferenceAudio saying what was expected and what came.
    """
    if not data:
        raise InvalidReferenceAudio("the clip is empty, expected an audio file")
    if len(data) > limits.max_bytes:
        raise InvalidReferenceAudio(f"the clip is {len(data):,} bytes, the limit is {limits.max_bytes:,}")
    try:
        with _ForwardFile(io.BytesIO(data)) as file:
            _check_header(file, limits)
            rate_hz: int = file.samplerate
            mono = _decode(file, limits)
    except soundfile.SoundFileError as error:
        reason = getattr(error, "error_string", "") or "unreadable"
        raise InvalidReferenceAudio(
            f"the clip can't be decoded ({reason.strip().rstrip('.')}); expected WAV, FLAC, Ogg, MP3 or another "
            "format that libsndfile reads, whole and undamaged"
        ) from error
    _check_seconds(len(mono) / rate_hz, limits)
    _check_samples(mono, limits)
    samples = _resample(mono, rate_hz)
    _check_level(samples, limits)
    return ReferenceClip(samples)


def _check_header(file: soundfile.SoundFile, limits: ReferenceLimits) -> None:
    if not limits.min_rate_hz <= file.samplerate <= limits.max_rate_hz:
        raise InvalidReferenceAudio(
            f"the clip's sample rate is {file.samplerate:,} Hz, "
            f"expected {limits.min_rate_hz:,} to {limits.max_rate_hz:,}"
        )
    if file.channels > limits.max_channels:
        raise InvalidReferenceAudio(
            f"the clip has {file.channels} channels, the limit is {limits.max_channels}"
        )
    if file.frames < _UNKNOWN_FRAMES:
        _check_seconds(file.frames / file.samplerate, limits)


def _check_seconds(seconds: float, limits: ReferenceLimits, at_least: str = "") -> None:
    if not limits.min_seconds <= seconds <= limits.max_seconds:
        raise InvalidReferenceAudio(
            f"the clip lasts {at_least}{seconds:,.2f} s, "
            f"expected {limits.min_seconds:g} to {limits.max_seconds:g} s"
        )


def _decode(file: soundfile.SoundFile, limits: ReferenceLimits) -> Samples:
    """[n] at the file's rate. Channels are averaged block by block, so a wide file never lies in memory whole."""
    max_frames = math.floor(limits.max_seconds * file.samplerate)
    block_frames = max(1, _BLOCK_SAMPLES // file.channels)
    blocks: list[Samples] = []
    num_frames = 0
    while len(block := file.read(block_frames, dtype="float32", always_2d=True)):
        num_frames += len(block)
        if num_frames > max_frames:
            _check_seconds(num_frames / file.samplerate, limits, at_least="at least ")
        with np.errstate(all="ignore"):  # infinities are looked for below
            blocks.append(block.mean(axis=1))
    # An MP3's length may be an estimate; the others know it, and a decoder that lost its place ends early.
    if file.format != "MP3" and num_frames < file.frames < _UNKNOWN_FRAMES:
        raise InvalidReferenceAudio(
            f"the clip is damaged: its header says {file.frames / file.samplerate:,.2f} s, "
            f"expected that much, got {num_frames / file.samplerate:,.2f} s"
        )
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def _check_samples(mono: Samples, limits: ReferenceLimits) -> None:
    if not np.isfinite(mono).all():
        raise InvalidReferenceAudio("the clip holds NaN or infinite samples, expected finite ones")
    peak = float(np.abs(mono).max())
    if peak > limits.max_peak:
        raise InvalidReferenceAudio(
            f"the clip's peak is {peak:,.4g}, expected samples in [-1, 1] (float files aren't rescaled)"
        )


def _resample(mono: Samples, rate_hz: int) -> Samples:
    """To CLIP_RATE_HZ; the length is what librosa's `resample` gives, whose default this is."""
    if rate_hz == CLIP_RATE_HZ:
        return mono
    length = math.ceil(len(mono) * (CLIP_RATE_HZ / rate_hz))
    resampled: Samples = soxr.resample(mono, rate_hz, CLIP_RATE_HZ, quality="HQ")[:length]
    return np.pad(resampled, (0, length - len(resampled)))


def _check_level(samples: Samples, limits: ReferenceLimits) -> None:
    whole = len(samples) // _LOUDNESS_WINDOW * _LOUDNESS_WINDOW
    power = samples[:whole].reshape(-1, _LOUDNESS_WINDOW).var(axis=1, dtype=np.float64).max()
    level_db = 10 * math.log10(max(float(power), 1e-20))
    if level_db < limits.min_level_db:
        raise InvalidReferenceAudio(
            f"the clip is silent: its loudest 50 ms are at {level_db:.0f} dB of full scale, "
            f"expected at least {limits.min_level_db:g}"
        )
