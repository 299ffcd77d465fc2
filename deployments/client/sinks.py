"""Where the command puts audio: a file that appears once it is whole, stdout, a player; or several of them."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from qwen3tts_core.streaming.pcm import wav_header

_PLAYERS = (  # each reads a WAV whose end isn't known yet
    ("ffplay", "-nodisp", "-autoexit", "-loglevel", "error", "-i", "-"),
    ("aplay", "-q", "-"),
    ("mpv", "--no-terminal", "--no-video", "-"),
    ("play", "-q", "-t", "wav", "-"),
)


class SinkError(Exception):
    """Audio can't go where it should."""


class Sink(Protocol):
    def write(self, audio: bytes) -> None: ...


class Into:
    """An open binary file. is_wav: what comes is PCM16, and a header goes before it."""

    def __init__(self, file: IO[bytes], wav_rate_hz: int | None) -> None:
        self._file, self.num_bytes = file, 0
        if wav_rate_hz is not None:
            self._file.write(wav_header(wav_rate_hz))

    def write(self, audio: bytes) -> None:
        self._file.write(audio)
        self._file.flush()
        self.num_bytes += len(audio)


@contextmanager
def into_file(path: Path, wav_rate_hz: int | None) -> Iterator[Sink]:
    """The file is there once the audio is whole, with its size in the header; an unfinished one never is.

    A device or a pipe takes it as it comes: nothing may replace one.
    """
    if path.is_dir():
        raise SinkError(f"{path} is a directory")
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield Into(file, wav_rate_hz)
        return
    path = Path(os.path.realpath(path))  # a link stays one
    part = path.with_name(path.name + ".part")
    try:
        file = part.open("wb")
    except OSError as error:
        raise SinkError(f"{part} can't be written: {error.strerror}") from error
    except KeyboardInterrupt:  # Ctrl-C in the moment in which it was made
        part.unlink(missing_ok=True)
        raise
    try:
        with file:
            sink = Into(file, wav_rate_hz)
            yield sink
            if wav_rate_hz is not None:
                file.seek(0)
                file.write(wav_header(wav_rate_hz, sink.num_bytes))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def into_stdout(wav_rate_hz: int | None) -> Iterator[Sink]:
    """As it comes."""
    if sys.stdout is None:
        raise SinkError("stdout is closed")
    yield Into(sys.stdout.buffer, wav_rate_hz)


@contextmanager
def into_player(command: str | None, rate_hz: int) -> Iterator[Sink]:
    """PCM16 to a program that plays what it is piped; to the sounddevice package where there is none."""
    arguments = find_player(command)
    if arguments is None:
        with _into_sounddevice(rate_hz) as sink:
            yield sink
        return
    try:
        player = subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise SinkError(f"{arguments[0]} can't be started: {error.strerror}") from error
    assert player.stdin is not None, "it was asked for"
    try:
        try:
            yield Into(player.stdin, rate_hz)
            player.stdin.close()
        except BrokenPipeError:
            raise SinkError(f"{arguments[0]} ended before the audio did") from None
        if (status := player.wait()) != 0:
            raise SinkError(f"{arguments[0]} failed with status {status}")
    finally:
        if player.poll() is None:
            player.kill()
            player.wait()


def find_player(command: str | None) -> Sequence[str] | None:
    """None: the sounddevice package. Raises SinkError where there is nothing that plays."""
    if command is not None:
        return _split(command)
    for known in _PLAYERS:
        if shutil.which(known[0]) is not None:
            return known
    if importlib.util.find_spec("sounddevice") is not None:
        return None
    names = ", ".join(known[0] for known in _PLAYERS)
    raise SinkError(
        f"nothing here plays audio: install one of {names}, or the package sounddevice; or give -o FILE"
    )


def _split(command: str) -> Sequence[str]:
    try:
        words = shlex.split(command)
    except ValueError:  # an open quotation
        words = []
    if not words:
        raise SinkError(f"the player is no command: {command!r}")
    return words


@contextmanager
def _into_sounddevice(rate_hz: int) -> Iterator[Sink]:
    sounddevice: Any = importlib.import_module("sounddevice")
    with sounddevice.RawOutputStream(samplerate=rate_hz, channels=1, dtype="int16") as stream:
        yield stream


def give_up_stdout() -> None:
    """Whoever read it has left: what Python would still flush into it goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
