"""Every example of README "WebSocket" and "Command line and Python" runs as it stands, against the API."""

import asyncio
import contextlib
import io
import json
import os
import re
import sys
import textwrap
import wave
from pathlib import Path

import pytest

from tests.clips import wav_clip
from tests.deployments.client.conftest import MODELS
from tests.test_readme import section

ROOT = Path(__file__).parents[3]
HERE = "http://127.0.0.1:8000"  # what the README says
SERVED = {"speaking": str(ROOT / "checkpoints" / "speaking"), **MODELS}  # the first is what `make serve` has
NOTES = "The harbour lay still. Nobody had come yet.\nAn old man mended nets.\n"
WRITTEN_BY_THE_COMMANDS = {
    "hello.wav", "notes.mp3", "notes.pcm", "designed.wav", "cloned.wav", "ada-says.wav",
}  # fmt: skip


def blocks(title):
    """The indented ones, as they stand."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section(title), re.MULTILINE)
    return [textwrap.dedent(block).strip() for block in found]


COMMANDS, CLIENT, ASYNC_CLIENT, OPENAI = blocks("Command line and Python")
(SESSION,) = blocks("WebSocket")


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with what the examples need: a text, a clip, and on the path the command and a player."""
    (tmp_path / "notes.txt").write_text(NOTES)
    (tmp_path / "ada.wav").write_bytes(wav_clip())
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {
        "qwen3tts": "from deployments.client.cli import main; sys.exit(main())",
        "ffplay": "open('played.wav', 'ab').write(sys.stdin.buffer.read())",
    }
    for name, program in programs.items():
        (folder / name).write_text(f"#!{sys.executable}\nimport sys; {program}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_every_command_runs(serving, workplace, monkeypatch):
    async with serving(SERVED) as chain:
        monkeypatch.setenv("QWEN3TTS_URL", chain.url)
        shell = await asyncio.create_subprocess_exec(
            "bash", "-eu", "-o", "pipefail", "-c", COMMANDS,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, told = await shell.communicate()
        assert shell.returncode == 0, told.decode()
    assert "slt " in out.decode()
    assert told.decode().count("s of audio in") == COMMANDS.count("qwen3tts say") == 8
    made = {path.name for path in workplace.iterdir() if path.is_file()} - {
        "notes.txt",
        "ada.wav",
        "played.wav",
    }
    assert made == WRITTEN_BY_THE_COMMANDS
    assert (workplace / "played.wav").read_bytes().count(b"RIFF") == 2


@pytest.mark.parametrize("code", [CLIENT, ASYNC_CLIENT, OPENAI], ids=["client", "async", "openai"])
async def test_every_python_example_runs(serving, workplace, monkeypatch, code):
    names, said = {}, io.StringIO()
    async with serving(SERVED) as chain:
        monkeypatch.setenv("QWEN3TTS_URL", chain.url)

        def run():
            with contextlib.redirect_stdout(said):
                exec(compile(code.replace(HERE, chain.url), "README.md", "exec"), names)

        await asyncio.to_thread(run)
    if code is ASYNC_CLIENT:
        assert said.getvalue().startswith("400 voice 400 unknown_voice: unknown voice 'nobody'")
        return
    assert len(names["pcm"]) == 9 * 3840
    with wave.open("hello.wav") as reader:
        assert reader.getnframes() == 9 * 1920
    if code is CLIENT:
        assert said.getvalue().startswith("stop 0.72 ")
        assert len(re.findall(r"^\d+ bytes at 24000 Hz$", said.getvalue(), re.MULTILINE)) >= 2


async def test_the_session_goes_as_it_is_shown(serving):
    """What the client says is sent as it stands; what the server says has the shown fields, in the shown order."""
    lines = [re.sub(r"   .*", "", line) for line in SESSION.splitlines()]
    async with serving(SERVED) as chain:
        socket = chain.socket()
        for line in lines:
            if line.startswith("> "):
                socket.send_raw(line[2:])
        await socket.wait_until_over()
    told = iter(message for message in socket.messages if isinstance(message, dict))
    for line in lines:
        if line.startswith("< {"):
            message = next(told)
            shown = dict(re.findall(r'"(\w+)": ("[^"]*"|[\w.]+|…)', line))
            assert {name: message[name] for name in shown if shown[name] != "…"} == {
                name: json.loads(value) for name, value in shown.items() if value != "…"
            }
            assert set(shown) <= set(message)
        elif line.startswith("< audio.start"):
            assert [next(told)["type"], next(told)["type"]] == ["audio.start", "audio.done"]
    assert next(told, None) is None
    assert socket.close_code == 1000
