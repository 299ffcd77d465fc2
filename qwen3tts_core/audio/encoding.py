"""PCM16 of the codec into what a client asked for: a format, a sample rate, a speed; streamed or whole.

    PCM16 ──> speed (pitch kept) ──> sample rate ──> container or encoder ──> bytes
              └── audio/conversion.py, only where asked ──┘   └ here: wav, pcm; audio/compressed.py: the rest

Pieces may be cut anywhere: the samples that come out are the same. Knows nothing of requests or HTTP.
"""

from __future__ import annotations

import threading
from typing import Literal, Protocol, get_args

from qwen3tts_core.errors import EncoderUnavailable, InvalidRequest, StreamCancelled
from qwen3tts_core.streaming.pcm import BYTES_PER_SAMPLE, wav_file, wav_header

AudioFormat = Literal["wav", "pcm", "mp3", "opus", "aac", "flac"]
SampleRate = Literal[8000, 16000, 24000, 48000]

SAMPLE_RATES_HZ: tuple[int, ...] = get_args(SampleRate)
MIN_SPEED, MAX_SPEED = 0.25, 4.0

MEDIA_TYPES: dict[AudioFormat, str] = {
    "wav": "audio/wav",
    "pcm": "audio/pcm",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg; codecs=opus",  # RFC 7845; audio/opus would be bare packets in RTP
    "aac": "audio/aac",  # ADTS
    "flac": "audio/flac",
}


class Writer(Protocol):
    """The last stage. What it can't hand out yet comes with a later call; `finish` holds nothing back."""

    def feed(self, pcm: bytes) -> bytes: ...

    def finish(self) -> bytes: ...

    def close(self) -> None: ...


class Converter(Protocol):
    """A stage from PCM16 to PCM16."""

    def feed(self, pcm: bytes) -> bytes: ...

    def finish(self) -> bytes: ...


class Encoder:
    """One response's audio. Calls may come from any thread, one after the other.

    A streamed body is `feed` after `feed`, then `finish`; a whole one comes from `finish` alone.
    is_plain: every call costs next to nothing; the others are work for a worker thread.
    """

    def __init__(
        self, audio_format: AudioFormat, sample_rate_hz: int, writer: Writer, converter: Converter | None
    ) -> None:
        self.media_type = MEDIA_TYPES[audio_format]
        self.sample_rate_hz = sample_rate_hz
        self.is_plain = converter is None and isinstance(writer, PcmWriter)
        self._writer = writer
        self._converter = converter
        self._is_closed = False
        self._in_use = threading.Lock()  # `close` may come while a worker is still inside the encoder

    def feed(self, pcm: bytes) -> bytes:
        """The bytes that are ready with these samples, which may be none. Raises StreamCancelled once closed."""
        assert len(pcm) % BYTES_PER_SAMPLE == 0, f"half a sample: {len(pcm)} bytes"
        with self._in_use:
            self._check_open()
            return self._writer.feed(self._converter.feed(pcm) if self._converter else pcm)

    def finish(self) -> bytes:
        """The rest, every stage flushed. Nothing may be fed after it."""
        with self._in_use:
            self._check_open()
            rest = self._converter.finish() if self._converter else b""
            fed = self._writer.feed(rest) if rest else b""
            return fed + self._writer.finish()

    def close(self) -> None:
        """Give everything back, finished or not; waits for a call in progress. May be called twice."""
        with self._in_use:
            self._is_closed = True
            self._writer.close()
            self._converter = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise StreamCancelled("the encoder was given back")


def is_plain(audio_format: AudioFormat, source_rate_hz: int, sample_rate_hz: int, speed: float) -> bool:
    """Whether the samples go out as they are."""
    return audio_format in ("wav", "pcm") and sample_rate_hz == source_rate_hz and speed == 1


def open_encoder(
    audio_format: AudioFormat,
    source_rate_hz: int,
    sample_rate_hz: int | None = None,
    speed: float = 1.0,
    *,
    is_streaming: bool,
) -> Encoder:
    """An encoder for one response of mono PCM16 at source_rate_hz. sample_rate_hz: None means as it is.

    Raises InvalidRequest for a rate or speed out of range, EncoderUnavailable where this machine's
    libraries lack what was asked for.
    """
    rate_hz = source_rate_hz if sample_rate_hz is None else sample_rate_hz
    if rate_hz not in SAMPLE_RATES_HZ and not is_plain(audio_format, source_rate_hz, rate_hz, speed):
        raise InvalidRequest(
            f"sample_rate must be one of {', '.join(map(str, SAMPLE_RATES_HZ))}, got {rate_hz}", "sample_rate"
        )
    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise InvalidRequest(f"speed must be {MIN_SPEED:g} to {MAX_SPEED:g}, got {speed:g}", "speed")
    converter = None
    if rate_hz != source_rate_hz or speed != 1:
        converter = _open_converter(source_rate_hz, rate_hz, speed)
    writer = _open_writer(audio_format, rate_hz, is_streaming)
    return Encoder(audio_format, rate_hz, writer, converter)


def missing_formats() -> tuple[AudioFormat, ...]:
    """The formats that this machine's libraries can't write; asking for one is refused."""
    missing: list[AudioFormat] = []
    for audio_format in MEDIA_TYPES:
        try:
            _open_writer(audio_format, SAMPLE_RATES_HZ[-1], False).close()
        except EncoderUnavailable:
            missing.append(audio_format)
    return tuple(missing)


def _open_writer(audio_format: AudioFormat, rate_hz: int, is_streaming: bool) -> Writer:
    if audio_format in ("wav", "pcm"):
        return PcmWriter(rate_hz if audio_format == "wav" else None, is_streaming)
    try:
        from qwen3tts_core.audio.compressed import CompressedWriter
    except ModuleNotFoundError as error:
        raise EncoderUnavailable(f"response_format {audio_format}", str(error)) from error
    return CompressedWriter(audio_format, rate_hz, is_streaming)


def _open_converter(source_rate_hz: int, rate_hz: int, speed: float) -> Converter:
    try:
        from qwen3tts_core.audio.conversion import Conversion
    except ModuleNotFoundError as error:
        param = "speed" if speed != 1 else "sample_rate"
        raise EncoderUnavailable(f"{param} other than the model's own", str(error), param) from error
    return Conversion(source_rate_hz, rate_hz, speed)


class PcmWriter:
    """The samples themselves; wav_rate_hz: with a WAV header before them, or None: bare."""

    def __init__(self, wav_rate_hz: int | None, is_streaming: bool) -> None:
        self._wav_rate_hz = wav_rate_hz
        self._parts: list[bytes] | None = None if is_streaming else []
        self._header = b"" if wav_rate_hz is None else wav_header(wav_rate_hz)  # of unknown size

    def feed(self, pcm: bytes) -> bytes:
        if self._parts is None:
            header, self._header = self._header, b""
            return header + pcm if header else pcm
        self._parts.append(pcm)
        return b""

    def finish(self) -> bytes:
        if self._parts is None:
            return self.feed(b"")
        pcm = b"".join(self._parts)
        return pcm if self._wav_rate_hz is None else wav_file(pcm, self._wav_rate_hz)

    def close(self) -> None:
        self._parts = None
