"""Reference clips for tests: audio files in memory, and the forms that upload them."""

import base64
import io

import numpy as np
import soundfile

RATE_HZ = 24_000


def tone(seconds=2.0, rate_hz=RATE_HZ, channels=1, pitch_hz=220.0):
    """A quiet tone with a little noise: nothing in it is silent or clipped."""
    n = round(seconds * rate_hz)
    noise = np.random.default_rng(int(pitch_hz)).normal(0, 0.01, n)
    wave = 0.2 * np.sin(2 * np.pi * pitch_hz * np.arange(n) / rate_hz) + noise
    return wave[:, None].repeat(channels, axis=1)


def audio_file(samples, rate_hz=RATE_HZ, file_format="WAV", subtype=None):
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=file_format, subtype=subtype)
    return file.getvalue()


def wav_clip(seconds=2.0, pitch_hz=220.0):
    return audio_file(tone(seconds, pitch_hz=pitch_hz), subtype="PCM_16")


def as_base64(data):
    return base64.b64encode(data).decode()


def form(boundary="b0undary", **fields):
    """A multipart body and its content type. A field of bytes is a file."""
    body = b""
    for name, value in fields.items():
        is_file = isinstance(value, bytes)
        filename = '; filename="clip.wav"' if is_file else ""
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{filename}\r\n'.encode()
        body += b"\r\n" + (value if is_file else str(value).encode()) + b"\r\n"
    return body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"
