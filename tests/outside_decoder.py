"""Reads audio with a whole ffmpeg of its own, and with libsndfile: nothing of what encoded it."""

import io
import re
import subprocess
from functools import cache

import imageio_ffmpeg
import numpy as np
import soundfile

SOURCE_RATE_HZ = 24_000


def tone(num_samples, hz=440.0):
    """PCM16 at the codec's rate."""
    wave = 9_000 * np.sin(2 * np.pi * hz * np.arange(num_samples) / SOURCE_RATE_HZ)
    return wave.round().astype("<i2").tobytes()


def decode(data, folder):
    """(samples, rate) as ffmpeg plays a file of these bytes; its rate is the container's."""
    path = folder / "audio"
    path.write_bytes(data)
    ffmpeg = _ffmpeg()
    told = subprocess.run([ffmpeg, "-hide_banner", "-i", path], capture_output=True, text=True)
    result = subprocess.run([ffmpeg, "-v", "error", "-i", path, "-f", "s16le", "-"], capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    rate_hz = int(re.search(r"Audio: .*?(\d+) Hz, mono", told.stderr)[1])
    return np.frombuffer(result.stdout, "<i2"), rate_hz


class _ForwardFile(soundfile.SoundFile):
    """Never seeks, which libsndfile can't in a FLAC that doesn't tell its length."""

    def seekable(self):
        return False


def decode_with_libsndfile(data):
    """In pieces, so that a length that the header doesn't tell is no matter."""
    with _ForwardFile(io.BytesIO(data)) as file:
        blocks = []
        while len(block := file.read(4_096, dtype="int16")):
            blocks.append(block)
        return np.concatenate(blocks), file.samplerate


def peak_hz(samples, rate_hz):
    middle = samples[len(samples) // 8 : -len(samples) // 8].astype(np.float64)
    size = 1 << 19
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle)), size))
    return float(spectrum.argmax() * rate_hz / size)


@cache
def _ffmpeg():
    return imageio_ffmpeg.get_ffmpeg_exe()
