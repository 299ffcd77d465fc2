"""`qwen3tts`: speak, list voices and models, upload voices. `qwen3tts say --help` has every option.

Exits with 0, 1 and the server's words on stderr, 2 for a command line that makes no sense, or 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import codecs
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from deployments.client.progress import Progress, guess_audio_s
from deployments.client.sinks import Sink, SinkError, give_up_stdout, into_file, into_player, into_stdout
from deployments.client.sync import Client
from deployments.client.wire import (
    DEFAULT_URL,
    KEY_VARIABLE,
    URL_VARIABLE,
    AudioDelta,
    ServerError,
    SpeechDone,
    base_url,
)

_FORMATS = ("wav", "pcm", "mp3", "opus", "aac", "flac")
_BY_SUFFIX = {**{f".{name}": name for name in _FORMATS}, ".ogg": "opus", ".raw": "pcm"}
_PLAIN = ("wav", "pcm")  # PCM16 on the wire; the header is ours
_READ_BYTES = 1 << 12
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class UsageError(Exception):
    """The command line contradicts itself."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        opened = Client(options.url)
    except ValueError as error:
        return _fail(str(error), 2)
    try:
        with opened as client:
            run: Callable[[Client, argparse.Namespace], None] = options.run
            run(client, options)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    except UsageError as error:
        return _fail(str(error), 2)
    except ServerError as error:
        return _fail(f"{error}{f' (field: {error.param})' if error.param else ''}")
    except BrokenPipeError:
        give_up_stdout()
        return _fail("whoever read the output has left")
    except (httpx.ConnectError, ConnectionRefusedError) as error:
        return _fail(f"{base_url(options.url).rstrip('/')} can't be reached: {error}")
    except UnicodeError as error:
        return _fail(f"this is not UTF-8: {error}")
    except (SinkError, OSError, httpx.HTTPError) as error:
        return _fail(str(error) or type(error).__name__)
    return 0


def _fail(words: str, status: int = 1) -> int:
    print(f"qwen3tts: {words}", file=sys.stderr)
    return status


# ---------------------------------------------------------------- say
def say(client: Client, options: argparse.Namespace) -> None:
    audio_format = _format(options)
    fields = _fields(client, options)
    if options.live:
        _say_live(client, options, audio_format, fields)
        return
    text = _text(options)
    progress = Progress(guess_audio_s(text, options.speed or 1.0))
    on_the_wire = "pcm" if audio_format in _PLAIN else audio_format
    with ExitStack() as stack:
        stream = stack.enter_context(client.events(text, response_format=on_the_wire, **fields))
        sinks = _open_sinks(stack, options, audio_format, stream.sample_rate_hz)
        stack.callback(progress.clear)
        if on_the_wire == "pcm":
            progress.bytes_per_s = 2 * stream.sample_rate_hz
        done: SpeechDone | None = None
        for event in stream.events():
            if isinstance(event, AudioDelta):
                _write(sinks, event.audio, progress)
            else:
                done = event
    assert done is not None, "a stream without its last event has raised"
    limited = ", cut off by its limit" if done.finish_reason == "length" else ""
    _report(options, f"{progress.summary(done.audio_seconds)}, seed {done.seed}{limited}")


def _say_live(client: Client, options: argparse.Namespace, audio_format: str, fields: dict[str, Any]) -> None:
    """Text from stdin is spoken while it is still coming."""
    progress = Progress(None)
    with ExitStack() as stack:
        session = stack.enter_context(client.session(response_format="pcm", **fields))
        rate_hz = session.configured["sample_rate"]
        sinks = _open_sinks(stack, options, audio_format, rate_hz)
        stack.callback(progress.clear)
        progress.bytes_per_s = 2 * rate_hz
        for part in session.speak(_text_as_it_comes(sys.stdin.buffer.fileno())):
            _write(sinks, part, progress)
    _report(options, f"{progress.summary(progress.audio_s or 0.0)}, seed {session.configured['seed']}")


def _write(sinks: Sequence[Sink], audio: bytes, progress: Progress) -> None:
    for sink in sinks:
        sink.write(audio)
    progress.got(len(audio))


def _report(options: argparse.Namespace, words: str) -> None:
    if not options.quiet:
        print(words, file=sys.stderr)


def _open_sinks(stack: ExitStack, options: argparse.Namespace, audio_format: str, rate_hz: int) -> list[Sink]:
    wav_rate_hz = rate_hz if audio_format == "wav" else None
    sinks: list[Sink] = []
    if options.play or options.output is None:
        sinks.append(stack.enter_context(into_player(options.player, rate_hz)))
    if options.output == "-":
        sinks.append(stack.enter_context(into_stdout(wav_rate_hz)))
    elif options.output is not None:
        sinks.append(stack.enter_context(into_file(Path(options.output), wav_rate_hz)))
    return sinks


def _format(options: argparse.Namespace) -> str:
    """What was asked for, else what the file's name says, else WAV. Raises UsageError."""
    named = None if options.output in (None, "-") else _BY_SUFFIX.get(Path(options.output).suffix.lower())
    chosen: str = options.format or named or "wav"
    if named is not None and chosen != named:
        raise UsageError(f"-f {chosen} contradicts the name {options.output}")
    if chosen not in _PLAIN and (options.live or options.play or options.output is None):
        raise UsageError(f"playing and --live need wav or pcm, got {chosen}")
    if options.live and sys.stdin is None:
        raise UsageError("--live reads the text from stdin, which is closed")
    if options.live and (options.text is not None or options.input is not None):
        raise UsageError("--live reads the text from stdin, and was given another")
    return chosen


def _text(options: argparse.Namespace) -> str:
    if options.text is not None and options.input is not None:
        raise UsageError("the text comes either from the command line or from -i, got both")
    if options.text not in (None, "-"):
        return str(options.text)
    if options.input not in (None, "-"):
        return Path(options.input).read_text(encoding="utf-8")
    if sys.stdin is None or (options.text is None and options.input is None and sys.stdin.isatty()):
        raise UsageError('no text: qwen3tts say "Hello there.", or -i FILE, or pipe it in')
    return sys.stdin.buffer.read().decode("utf-8")


def _text_as_it_comes(descriptor: int) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    while data := os.read(descriptor, _READ_BYTES):
        if text := decoder.decode(data):
            yield text
    decoder.decode(b"", final=True)  # raises where a character is only begun


def _fields(client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """The request's, without those that aren't given. Raises UsageError."""
    if options.design is not None and options.instructions is not None:
        raise UsageError("--design says how the voice speaks, too; got --instructions beside it")
    fields = {
        "model": options.model,
        "voice": options.voice,
        "language": options.language,
        "instructions": options.instructions if options.design is None else options.design,
        "ref_audio": None if options.clone is None else Path(options.clone),
        "ref_text": options.ref_text,
        "speed": options.speed,
        "sample_rate": options.sample_rate,
        "seed": options.seed,
        "temperature": options.temperature,
        "max_new_tokens": options.max_new_tokens,
    }
    if options.clone is not None and options.ref_text is None:
        fields["x_vector_only_mode"] = True
    if options.model is None and (options.design is not None or options.clone is not None):
        fields["model"] = _model_for(client, "VoiceDesign" if options.design is not None else "Base")
    return {name: value for name, value in fields.items() if value is not None}


def _model_for(client: Client, task_type: str) -> str:
    models = client.models()
    for model in models:
        if model["task_type"] == task_type:
            return str(model["id"])
    served = ", ".join(f"{model['id']} ({model['task_type']})" for model in models)
    raise ServerError(f"this takes a {task_type} model, and the server has none; it has {served}")


# ---------------------------------------------------------------- the rest
def list_voices(client: Client, options: argparse.Namespace) -> None:
    found = client.voices(options.model)
    if options.json:
        print(json.dumps(found, ensure_ascii=False))
        return
    for voice in found["data"]:
        kind = "built in" if voice["built_in"] else "uploaded"
        if "alias_of" in voice:
            kind = f"alias of {voice['alias_of']}"
        default = ", default" if voice["id"] == found["default"] else ""
        print(f"{voice['id']:<20} {kind}{default}  ({', '.join(voice['models'])})")
    print(f"languages: {', '.join(found['languages'])}")


def list_models(client: Client, options: argparse.Namespace) -> None:
    found = client.models()
    if options.json:
        print(json.dumps(found, ensure_ascii=False))
        return
    for model in found:
        print(f"{model['id']:<20} {model['task_type']}, {model['size']}, {model['sample_rate_hz']} Hz")


def add_voice(client: Client, options: argparse.Namespace) -> None:
    told = client.add_voice(options.name, options.clip, options.ref_text)
    print(f"{told['id']}: {told['clip_seconds']} s, for {', '.join(told['models'])}")


def delete_voice(client: Client, options: argparse.Namespace) -> None:
    client.delete_voice(options.name)


# ---------------------------------------------------------------- the command line
def number(text: str) -> float:
    """Raises ValueError for what JSON has no word for, too."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"not finite: {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qwen3tts",
        description="Speak with a qwen3tts server.",
        epilog=f"{KEY_VARIABLE} of the environment is the API key, where the server asks for one.",
    )
    parser.add_argument(
        "--url", help=f"the server; by default {URL_VARIABLE} of the environment, or {DEFAULT_URL}"
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_say(verbs.add_parser("say", help="speak a text, to a file, to stdout or to a player"))
    voices = verbs.add_parser("voices", help="list the voices")
    voices.add_argument("-m", "--model", help="only this model's")
    models = verbs.add_parser("models", help="list the models")
    for verb, run in ((voices, list_voices), (models, list_models)):
        verb.add_argument("--json", action="store_true", help="as the server tells it")
        verb.set_defaults(run=run)
    add = verbs.add_parser("add-voice", help="give the voice of a clip a name")
    add.add_argument("name")
    add.add_argument("clip", type=Path, help="an audio file of 1 to 30 s")
    add.add_argument("--ref-text", help="what is said in the clip; then the voice speaks in its manner, too")
    add.set_defaults(run=add_voice)
    delete = verbs.add_parser("delete-voice", help="delete a voice that was uploaded")
    delete.add_argument("name")
    delete.set_defaults(run=delete_voice)
    return parser


def _add_say(say_parser: argparse.ArgumentParser) -> None:
    add = say_parser.add_argument
    add("text", nargs="?", help="the text; - or none: from stdin")
    add("-i", "--input", metavar="FILE", help="the text's file, UTF-8; - is stdin")
    add("--live", action="store_true", help="speak the text on stdin while it is still coming")
    add("-o", "--output", metavar="FILE", help="where to; - is stdout; by default it is played")
    add("--play", action="store_true", help="play it as well")
    add(
        "--player",
        metavar="COMMAND",
        help="what plays the WAV that it is piped; by default ffplay, aplay, mpv or play",
    )
    add("-f", "--format", choices=_FORMATS, help="by default what FILE's name says, or wav")
    add("-m", "--model")
    add("-v", "--voice")
    add("-l", "--language")
    add("--instructions", help="how to speak")
    design = say_parser.add_mutually_exclusive_group()
    design.add_argument(
        "--design", metavar="DESCRIPTION", help="a voice by its description, from a VoiceDesign model"
    )
    design.add_argument("--clone", metavar="CLIP", help="the voice of an audio file, from a Base model")
    add("--ref-text", help="what is said in CLIP; then the voice speaks in its manner, too")
    add("--speed", type=number, help="0.25 to 4")
    add("--sample-rate", type=int, help="Hz: 8000, 16000, 24000, 48000")
    add("--seed", type=int)
    add("--temperature", type=number)
    add("--max-new-tokens", type=int, help="frames of 80 ms")
    add("-q", "--quiet", action="store_true", help="no figures at the end")
    say_parser.set_defaults(run=say)


if __name__ == "__main__":
    sys.exit(main())
