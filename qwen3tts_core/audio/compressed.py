"""MP3, Opus in Ogg, AAC in ADTS, and FLAC, by the FFmpeg libraries in PyAV's wheel.

What a decoder gives back, for n samples and one codec frame of N:

    flac  exactly n
    opus  exactly n: Ogg tells where the audio begins (pre-skip) and ends (the last granule position)
    mp3   n to n + N. The first frame tells the encoder's delay of 576 samples, and of a whole file the
          padding too; a decoder that doesn't read it plays 1,105 samples (46 ms at 24 kHz) of silence first
    aac   1,024 samples of silence, then n to n + N: ADTS has no place to tell them

A stream's header is written before the length is known and never mended: FLAC says 0, unknown.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import av
import numpy as np
from av.audio.stream import AudioStream
from av.codec.codec import UnknownCodecError
from av.packet import Packet

from qwen3tts_core.errors import EncoderUnavailable
from qwen3tts_core.streaming.pcm import UNKNOWN_SIZE

_BIT_RATES = {8_000: 32_000, 16_000: 64_000, 24_000: 96_000, 48_000: 128_000}
"""Of MP3 and AAC, by sample rate: transparent for one voice. Opus needs half."""

_MP3_DELAY = 1_105  # LAME's 576, and 529 of every decoder
_MP3_FLAG_SIZE = 2
_MP3_INFO = 36  # bytes of LAME's part of the Info tag
_MP3_INFO_DELAY = slice(21, 24)  # in that part: 12 bits of delay, 12 of padding


class _Kind(NamedTuple):
    """container and codec by FFmpeg's names; options of each, and those that only a stream has."""

    container: str
    codec: str
    container_options: dict[str, str] = {}  # noqa: RUF012 - never written to
    stream_container_options: dict[str, str] = {}  # noqa: RUF012
    stream_codec_options: dict[str, str] = {}  # noqa: RUF012


_KINDS = {
    "mp3": _Kind(
        "mp3", "libmp3lame",
        {"id3v2_version": "0"},
        {"write_xing": "0"},                      # ours says less, and all of it is true: _info_frame
        {"reservoir": "0"},                       # a frame never waits for the next one's bits
    ),
    "opus": _Kind("ogg", "libopus", {}, {"page_duration": "20000"}),  # a page per packet; else one a second
    "aac": _Kind("adts", "aac"),
    "flac": _Kind(
        "flac", "flac",
        {"metadata_header_padding": "0"},         # else 8 KiB for an editor's tags
        {},
        {"compression_level": "2"},               # frames of 24 ms instead of 96; 3% larger
    ),
}  # fmt: skip


class CompressedWriter:
    """Mono PCM16 at rate_hz to the file's bytes; those of a stream leave with the packet they belong to.

    Raises EncoderUnavailable if this build of the libraries can't write the format.
    """

    def __init__(self, audio_format: str, rate_hz: int, is_streaming: bool) -> None:
        kind = _KINDS[audio_format]
        _check(audio_format, kind.codec)
        self._rate_hz, self._is_streaming = rate_hz, is_streaming
        self._has_open_end = audio_format == "mp3" and is_streaming
        self._num_samples = self._num_packets = 0
        self._file = _GrowingFile()
        self._container = av.open(
            self._file,
            "w",
            format=kind.container,
            container_options={
                "flush_packets": "1",
                "fflags": "+bitexact",  # no random serial numbers: same samples, same bytes
                **kind.container_options,
                **(kind.stream_container_options if is_streaming else {}),
            },
        )
        options = kind.stream_codec_options if is_streaming else {}
        stream = self._container.add_stream(kind.codec, rate=rate_hz, options=dict(options))
        assert isinstance(stream, AudioStream)
        stream.layout = "mono"
        if audio_format != "flac":
            stream.bit_rate = _BIT_RATES[rate_hz] // (2 if audio_format == "opus" else 1)
        self._stream: AudioStream = stream
        self._container.start_encoding()

    def feed(self, pcm: bytes) -> bytes:
        if pcm:
            samples = np.frombuffer(pcm, "<i2")[None]
            frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            frame.sample_rate, frame.time_base = self._rate_hz, Fraction(1, self._rate_hz)
            frame.pts = self._num_samples
            self._num_samples += samples.size
            self._mux(self._stream.encode(frame))
        return self._file.take() if self._is_streaming else b""

    def finish(self) -> bytes:
        packets = self._stream.encode(None)
        if self._has_open_end:  # LAME may add a frame that no decoder needs, and nothing tells to skip it
            frame_size = self._stream.codec_context.frame_size
            while packets and self._decoded(len(packets) - 1, frame_size) >= self._num_samples:
                packets.pop()
        self._mux(packets)
        self._container.close()
        return self._file.take()

    def close(self) -> None:
        self._container.close()  # writes an end that nobody reads; breaks the library's reference cycles
        self._file = _GrowingFile()

    def _mux(self, packets: list[Packet[AudioStream]]) -> None:
        for packet in packets:
            if self._has_open_end and not self._num_packets:
                self._file.write(_info_frame(bytes(packet)))
            self._num_packets += 1
            self._container.mux(packet)

    def _decoded(self, num_more: int, frame_size: int) -> int:
        return (self._num_packets + num_more) * frame_size - _MP3_DELAY


def _check(audio_format: str, codec: str) -> None:
    try:
        av.Codec(codec, "w")
    except UnknownCodecError as error:
        reason = f"this build of FFmpeg has no encoder {codec}"
        raise EncoderUnavailable(f"response_format {audio_format}", reason) from error


def _info_frame(first: bytes) -> bytes:
    """A silent frame, shaped like the first one, whose Info tag tells the delay and no length.

    Its only flagged field is the size, unknown: with none at all FFmpeg plays the frame itself.
    Source: Gabriel Bouvigne, "Mp3 Info Tag revision 1 specifications".
    """
    is_mpeg1 = first[1] & 0x08
    tag_at = 4 + (17 if is_mpeg1 else 9)  # after the side information of a mono frame
    lame = bytearray(_MP3_INFO)
    lame[:9] = b"LAME3.100"  # readers take the delay from names they know
    lame[_MP3_INFO_DELAY] = (576 << 12).to_bytes(3, "big")
    tag = b"Info" + _MP3_FLAG_SIZE.to_bytes(4, "big") + UNKNOWN_SIZE.to_bytes(4, "big") + bytes(lame)
    return (first[:4] + bytes(tag_at - 4) + tag).ljust(len(first), b"\0")


class _GrowingFile:
    """A file in memory that is handed out as it grows. What was handed out can't be written again."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._start = self._position = 0  # of the data that is still here; of the next write

    def write(self, data: bytes) -> int:
        size = len(data)
        at = self._position - self._start
        if at >= 0:  # else a header is mended that is long since sent
            self._data[at : at + size] = data
        self._position += size
        return size

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._position, self._start + len(self._data))[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True

    def take(self) -> bytes:
        data = bytes(self._data)
        self._start += len(data)
        self._data.clear()
        return data
