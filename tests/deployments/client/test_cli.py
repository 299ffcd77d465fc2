"""The command `qwen3tts` as people run it: its files, its words, its exit status; and what is left when it is ended."""

import asyncio
import io
import json
import os
import signal
import sys
import tomllib
import wave
from pathlib import Path

import pytest

from deployments.client import cli
from deployments.client.progress import Progress, guess_audio_s
from deployments.client.sinks import into_file
from tests.clips import wav_clip
from tests.deployments.test_api_keys import KEYS, hashes_of
from tests.deployments.test_websocket import pcm_of
from tests.fakes import Script, until
from tests.outside_decoder import decode

ROOT = Path(__file__).parents[3]
HELLO = ("say", "Hello there.", "--seed", "7")
SLOW = Script(num_frames=3000, seconds_per_item=0.5)  # a minute of work, if nobody leaves


@pytest.fixture
def start(tmp_path):
    """Starts the command in `tmp_path`."""

    async def started(chain, *arguments, **variables):
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "deployments.client.cli", *arguments,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "QWEN3TTS_URL": chain.url, **variables},
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip

    return started


@pytest.fixture
def run(tmp_path, monkeypatch, capsysbinary):
    """Runs it to its end, within this process: status, stdout, stderr as text."""

    async def ran(chain, *arguments, stdin=b"", **variables):
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            for name, value in {"QWEN3TTS_URL": chain.url, **variables}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            try:
                status = await asyncio.to_thread(cli.main, arguments)
            except SystemExit as end:
                status = end.code
            sys.stdout.flush()
        out, told = capsysbinary.readouterr()
        return status, out, told.decode()

    return ran


@pytest.fixture
def recorder(tmp_path):
    """A player that keeps what it is piped; as a command."""
    program = tmp_path / "recorder.py"
    program.write_text("import sys; heard = sys.stdin.buffer.read(); open('heard.wav', 'wb').write(heard)")
    return f"{sys.executable} {program}"


def frames_of(wav):
    with wave.open(io.BytesIO(wav)) as reader:
        return reader.readframes(reader.getnframes())


def test_the_command_is_installed_with_the_package():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["qwen3tts"].partition(":")
    assert getattr(sys.modules[module], name) is cli.main


# ---------------------------------------------------------------- where audio goes
async def test_a_file_is_whole_with_true_sizes_and_the_figures_go_to_stderr(serving, run, tmp_path):
    async with serving(talker=Script(num_frames=30)) as chain:
        status, out, told = await run(chain, *HELLO, "-o", "hello.wav")
        assert (await run(chain, *HELLO, "-q", "-o", "quiet.wav"))[1:] == (b"", "")
    assert (status, out) == (0, b"")
    assert frames_of((tmp_path / "hello.wav").read_bytes()) == pcm_of(30)
    assert told.startswith("2.40 s of audio in ")
    assert all(word in told for word in ("first after ", "RTF ", "seed 7"))
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["hello.wav", "quiet.wav"]


@pytest.mark.parametrize("name", ["hello.mp3", "hello.ogg", "hello.FLAC"])
async def test_the_name_says_the_format(serving, run, tmp_path, name):
    async with serving(talker=Script(num_frames=30)) as chain:
        assert (await run(chain, *HELLO, "--speed", "2", "-o", name))[0] == 0
    samples, rate_hz = decode((tmp_path / name).read_bytes(), tmp_path)
    assert len(samples) / rate_hz == pytest.approx(1.2, abs=0.05)


async def test_stdout_takes_a_wav_or_bare_samples_as_they_come(serving, run):
    async with serving() as chain:
        status, out, _ = await run(chain, *HELLO, "-o", "-")
        assert (status, out[:4], out[44:]) == (0, b"RIFF", pcm_of(9))
        assert (await run(chain, *HELLO, "-f", "pcm", "-o", "-"))[1] == pcm_of(9)


async def test_first_bytes_are_there_before_the_last_are_made(serving, start):
    async with serving(talker=SLOW) as chain:
        process = await start(chain, *HELLO, "--max-new-tokens", "3000", "-f", "pcm", "-o", "-")
        first = await process.stdout.readexactly(4 * 3840)
        assert chain.num_held > 0
        process.stdout._transport.close()  # as `| head` does
        assert await process.wait() == 1
        await until(lambda: chain.num_held == 0)
    assert first == pcm_of(4)
    assert b"has left" in await process.stderr.read()


@pytest.mark.parametrize("output", [(), ("-o", "kept.wav", "--play")])
async def test_a_player_gets_a_wav_through_its_stdin(serving, run, tmp_path, recorder, output):
    async with serving(talker=Script(num_frames=30)) as chain:
        assert (await run(chain, *HELLO, "--player", recorder, *output))[0] == 0
    assert (tmp_path / "heard.wav").read_bytes()[44:] == pcm_of(30)
    assert not output or frames_of((tmp_path / "kept.wav").read_bytes()) == pcm_of(30)


async def test_a_player_is_found_on_the_path_and_one_that_fails_is_told(serving, run, tmp_path):
    player = tmp_path / "bin" / "aplay"
    player.parent.mkdir()
    player.write_text(
        f"#!{sys.executable}\nimport sys; open('heard.wav', 'wb').write(sys.stdin.buffer.read())"
    )
    player.chmod(0o755)
    async with serving() as chain:
        assert (await run(chain, *HELLO, PATH=str(player.parent)))[0] == 0
        assert (tmp_path / "heard.wav").read_bytes()[44:] == pcm_of(9)
        player.write_text(f"#!{sys.executable}\nimport sys; sys.stdin.buffer.read(); sys.exit(3)")
        status, _, told = await run(chain, *HELLO, PATH=str(player.parent))
        assert (status, "aplay failed with status 3" in told) == (1, True)
        status, _, told = await run(chain, *HELLO, "--player", "/nowhere/player")
        assert (status, "/nowhere/player can't be started" in told) == (1, True)


# ---------------------------------------------------------------- where text comes from
async def test_text_comes_from_a_file_or_stdin(serving, run, tmp_path):
    (tmp_path / "text.txt").write_text("Grüß Gott.", encoding="utf-8")
    async with serving() as chain:
        text = "Grüß Gott.".encode()
        await run(chain, "say", "-i", "text.txt", "-o", "a.wav")
        await run(chain, "say", "-o", "b.wav", stdin=text)
        await run(chain, "say", "-", "-o", "c.wav", stdin=text)
        await run(chain, "say", "-i", "-", "-o", "d.wav", stdin=text)
        await run(chain, "say", "Grüß Gott.", "-o", "e.wav")
        plans = {request.plan for request in chain.talker_engine.requests}
        assert (len(chain.talker_engine.requests), len(plans)) == (5, 1)


async def test_live_speaks_what_has_come_before_stdin_ends(serving, start, tmp_path):
    async with serving() as chain:
        process = await start(chain, "say", "--live", "--seed", "7", "-o", "live.wav")
        process.stdin.write("Grüß Gott. H".encode()[:3])  # half a character
        await process.stdin.drain()
        process.stdin.write("Grüß Gott. H".encode()[3:])
        await process.stdin.drain()
        await until(lambda: len(chain.talker_engine.requests) == 1, 60)
        process.stdin.write(b"ow are you?")
        process.stdin.close()
        assert await process.wait() == 0
    assert frames_of((tmp_path / "live.wav").read_bytes()) == pcm_of(9) + pcm_of(9, piece=1)


# ---------------------------------------------------------------- whose voice
async def test_design_and_clone_find_the_model_that_can(serving, run, tmp_path):
    (tmp_path / "ada.wav").write_bytes(wav_clip())
    async with serving() as chain:
        engines = chain.talker_engines
        assert (await run(chain, *HELLO, "--design", "A low voice.", "-o", "a.wav"))[0] == 0
        assert len(engines["tiny-design"].requests) == 1
        for extra in ((), ("--ref-text", "What it says.")):
            assert (await run(chain, *HELLO, "--clone", "ada.wav", *extra, "-o", "b.wav"))[0] == 0
        codes = [request.reference.codes for request in engines["tiny-base"].requests]
    assert [bool(each) for each in codes] == [False, True]  # the voice alone; in the clip's manner


async def test_voices_come_and_go_and_lists_are_for_people_or_programs(serving, run, tmp_path):
    (tmp_path / "ada.wav").write_bytes(wav_clip())
    async with serving(voice_aliases={"alloy": "vivian"}) as chain:
        status, out, _ = await run(chain, "add-voice", "ada", "ada.wav", "--ref-text", "What it says.")
        assert (status, out.decode()) == (0, "ada: 2.0 s, for tiny-base\n")
        listed = (await run(chain, "voices"))[1].decode()
        assert "vivian               built in  (tiny)" in listed
        assert "alloy                alias of vivian" in listed
        assert "ada                  uploaded  (tiny-base)" in listed
        told = json.loads((await run(chain, "voices", "--model", "tiny-base", "--json"))[1])
        assert told["voices"] == ["ada"]
        assert "tiny-design          VoiceDesign" in (await run(chain, "models"))[1].decode()
        assert len(json.loads((await run(chain, "models", "--json"))[1])) == 3
        assert (await run(chain, "delete-voice", "ada"))[0] == 0
        assert (await run(chain, "delete-voice", "ada"))[0] == 1


async def test_the_key_is_taken_from_the_environment(serving, run):
    async with serving(api_key_hashes=hashes_of(*KEYS)) as chain:
        status, _, told = await run(chain, "models", QWEN3TTS_API_KEY="nope")
        assert (status, "401 invalid_api_key" in told) == (1, True)
        assert (await run(chain, "models", QWEN3TTS_API_KEY=KEYS[0]))[0] == 0


# ---------------------------------------------------------------- when it goes wrong
WRONG = [
    ((*HELLO, "-v", "nobody", "-o", "x.wav"), 1, "400 unknown_voice: unknown voice 'nobody'; accepted: "),
    ((*HELLO, "-v", "nobody", "-o", "x.wav"), 1, "(field: voice)"),
    (("say", "--live", "-v", "nobody", "-o", "x.wav"), 1, "unknown voice 'nobody'"),
    ((*HELLO, "-o", "nowhere/x.wav"), 1, "nowhere/x.wav.part can't be written"),
    ((*HELLO, "-f", "mp3", "-o", "x.wav"), 2, "-f mp3 contradicts the name x.wav"),
    ((*HELLO, "-f", "mp3"), 2, "playing and --live need wav or pcm"),
    ((*HELLO, "--live", "-o", "x.wav"), 2, "--live reads the text from stdin"),
    ((*HELLO, "-i", "x.txt", "-o", "x.wav"), 2, "got both"),
    (("say", "-i", "missing.txt", "-o", "x.wav"), 1, "missing.txt"),
    (("say", "--clone", "missing.wav", "Hi", "-o", "x.wav"), 1, "missing.wav"),
    (("sing",), 2, "invalid choice"),
    ((*HELLO, "-o", "."), 1, ". is a directory"),
    ((*HELLO, "-o", ""), 1, ". is a directory"),
    ((*HELLO, "--player", ""), 1, "no command: ''"),
    ((*HELLO, "--player", "'"), 1, 'no command: "\'"'),
    ((*HELLO, "--speed", "nan", "-o", "x.wav"), 2, "argument --speed: invalid number value: 'nan'"),
    (
        (*HELLO, "--temperature", "inf", "-o", "x.wav"),
        2,
        "argument --temperature: invalid number value: 'inf'",
    ),
    ((*HELLO, "--design", "A low voice.", "--instructions", "Slow.", "-o", "x.wav"), 2, "--design"),
    (("say", "\udcff", "-o", "x.wav"), 1, "not UTF-8"),  # as Python has what isn't
    (("delete-voice", "\udcff"), 1, "not UTF-8"),
    (("delete-voice", "nobody?x"), 1, "'nobody?x' can't name a voice"),  # not another's name
    (("--url", "localhost:8000", "models"), 2, "starts with http:// or https://, got 'localhost:8000'"),
    (("--url", "ftp://127.0.0.1", "say", "--live", "-o", "x.wav"), 2, "starts with http:// or https://"),
    (("--url", "http://[::1", "models"), 2, "'http://[::1' is no address"),
    (("--url", "http://127.0.0.1:1", "models"), 1, "http://127.0.0.1:1 can't be reached: "),
    (("--url", "http://127.0.0.1:1", "say", "--live", "-o", "x.wav"), 1, "can't be reached: "),
]


async def test_what_went_wrong_is_told_and_no_file_is_left(serving, run, tmp_path):
    async with serving() as chain:
        for arguments, status, words in WRONG:
            got, out, told = await run(chain, *arguments)
            assert (got, out, words in told) == (status, b"", True), (arguments, told)
            assert not list(tmp_path.glob("x.*"))


async def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(serving, run):
    async with serving() as chain:
        for key in ("schlüssel", "two\nlines"):
            status, _, told = await run(chain, "models", QWEN3TTS_API_KEY=key)
            assert (status, "no header can carry" in told, key[:3] in told) == (2, True, False)


@pytest.mark.parametrize("missing", [0, 1], ids=["stdin", "stdout"])
async def test_a_shell_may_have_closed_what_it_reads_or_writes(serving, tmp_path, missing):
    verbs = {0: ["say --live -o x.wav", "say -o x.wav"], 1: ["say Hello. -o -"]}[missing]
    async with serving() as chain:
        for verb in verbs:
            process = await asyncio.create_subprocess_shell(
                f"{sys.executable} -m deployments.client.cli {verb} {missing}>&-",
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT), "QWEN3TTS_URL": chain.url},
                stderr=asyncio.subprocess.PIPE,
            )
            told = (await process.stderr.read()).decode()
            assert await process.wait() in (1, 2)
            assert told.startswith("qwen3tts: ")
            assert "Traceback" not in told


async def test_a_device_or_pipe_is_written_to_and_never_replaced(serving, run, tmp_path):
    os.mkfifo(tmp_path / "pipe.wav")
    async with serving() as chain:
        reading = asyncio.create_task(asyncio.to_thread((tmp_path / "pipe.wav").read_bytes))
        assert (await run(chain, *HELLO, "-o", "pipe.wav"))[0] == 0
        assert (tmp_path / "pipe.wav").is_fifo()
        assert len(frames_of(await reading)) > 0
        assert not list(tmp_path.glob("*.part"))


async def test_a_link_stays_one(serving, run, tmp_path):
    (tmp_path / "link.wav").symlink_to("real.wav")
    async with serving() as chain:
        assert (await run(chain, *HELLO, "-o", "link.wav"))[0] == 0
    assert (tmp_path / "link.wav").is_symlink()
    assert len(frames_of((tmp_path / "real.wav").read_bytes())) > 0


@pytest.mark.parametrize("verb", ["models", "voices", "say Hello.", "say --live", "delete-voice ada"])
@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n<p/>", b"SSH-2.0-x\r\n", b""]
)
async def test_what_is_no_server_of_ours_is_said_to_be_none(run, tmp_path, verb, answer):
    async def greet(reader, writer):
        await reader.read(1)
        writer.write(answer)
        writer.close()

    class Stranger:
        url = ""

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as stranger:
        Stranger.url = f"http://127.0.0.1:{stranger.sockets[0].getsockname()[1]}"
        words = verb.split()
        output = ["-o", "x.wav"] if words[0] == "say" else []
        status, out, told = await run(Stranger, *words, *output, stdin=b"Hello.")
    deleted = words[0] == "delete-voice" and answer.startswith(b"HTTP")  # 200 is all that it needs to know
    assert (status, out) == (0 if deleted else 1, b"")
    assert told.startswith("" if deleted else "qwen3tts: ")
    assert not list(tmp_path.glob("x.*"))


async def test_speech_that_fails_on_the_way_leaves_no_file(serving, run, tmp_path):
    async with serving(talker=Script(num_frames=60, seconds_per_item=0.05, fail_after_frames=12)) as chain:
        (tmp_path / "hello.wav").write_bytes(b"an older one")
        status, _, told = await run(chain, *HELLO, "-o", "hello.wav")
    assert (status, "the server failed on this request" in told) == (1, True)
    assert [path.name for path in tmp_path.glob("hello.*")] == ["hello.wav"]
    assert (tmp_path / "hello.wav").read_bytes() == b"an older one"


@pytest.mark.parametrize("live", [False, True], ids=["events", "session"])
async def test_ctrl_c_ends_it_and_what_the_server_does_for_it(serving, start, tmp_path, recorder, live):
    async with serving(talker=SLOW) as chain:
        text = ["--max-new-tokens", "3000", "--live" if live else "Hello there. " * 10]
        process = await start(chain, "say", *text, "--play", "--player", recorder, "-o", "x.wav")
        if live:
            process.stdin.write(b"Hello there. How")
            await process.stdin.drain()
        await until(lambda: (tmp_path / "x.wav.part").exists() and chain.num_held > 0, 60)
        process.send_signal(signal.SIGINT)
        told = (await process.stderr.read()).decode()
        assert await process.wait() == 130
        await until(lambda: chain.num_held == 0)
    assert told == "qwen3tts: interrupted\n"
    assert not list(tmp_path.glob("x.wav*"))
    assert not (tmp_path / "heard.wav").exists()  # the player has been ended, too


def test_ctrl_c_in_the_moment_in_which_a_file_is_made_leaves_none(tmp_path, monkeypatch):
    open_file = Path.open

    def opened_and_interrupted(path, mode):
        open_file(path, mode).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "open", opened_and_interrupted)
    with pytest.raises(KeyboardInterrupt), into_file(tmp_path / "x.wav", 24000):
        pytest.fail("there is nothing to write to")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- the bar
class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_grows_with_the_audio_and_is_never_full_before_the_end():
    now, terminal = [0.0], Terminal()
    progress = Progress(10.0, terminal, clock=lambda: now[0])
    progress.bytes_per_s = 48_000
    filled = []
    for _ in range(15):
        now[0] += 0.2
        progress.got(48_000)
        filled.append(terminal.getvalue().rpartition("\r")[2].count("#"))
    assert filled == sorted(filled)
    assert (filled[4], filled[-1]) == (12, 23)
    assert "15.0 s of audio of about 15, first after 0.200 s, RTF 0.200" in terminal.getvalue()
    progress.clear()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert progress.summary(15.0) == "15.00 s of audio in 3.00 s, first after 0.200 s, RTF 0.200"


def test_nothing_is_drawn_where_no_one_looks():
    file = io.StringIO()
    progress = Progress(10.0, file)
    progress.got(48_000)
    progress.clear()
    assert file.getvalue() == ""


def test_the_end_is_guessed_from_the_text():
    assert guess_audio_s("Hello there, how are you today?") == pytest.approx(2.0, abs=0.5)
    assert guess_audio_s("清晨的港口十分安静") == pytest.approx(2.0, abs=0.5)
    assert guess_audio_s("Hello there.", speed=2) == guess_audio_s("Hello there.") / 2
