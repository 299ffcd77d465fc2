import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deployments.launch import Address, find_problem, read_address, speak_once
from deployments.serve_child import find_mistake, last_error

ROOT = Path(__file__).parents[2]


def test_the_address_is_the_configs(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("http_options: {host: 127.0.0.2, port: 8123}\n")
    assert read_address(config) == Address("127.0.0.2", 8123)
    config.write_text("applications: []\n")
    assert read_address(config) == Address("127.0.0.1", 8000)


def test_a_missing_config_is_an_error_with_its_name(tmp_path):
    with pytest.raises(OSError, match=r"nope\.yaml"):
        read_address(tmp_path / "nope.yaml")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("- 1\n", r"config\.yaml must be a mapping"),
        ("a: [1\nb: }\n", r"config\.yaml is no YAML"),
        ("http_options: 5\n", r"http_options must be a mapping, got 5"),
        ('http_options: {port: "8000"}\n', r"http_options\.port must be .* got '8000'"),
        ("http_options: {port: 99999}\n", r"http_options\.port must be .* got 99999"),
        ("http_options: {port: true}\n", r"http_options\.port must be .* got True"),
        ("http_options: {host: 127}\n", r"http_options\.host must be text, got 127"),
    ],
)
def test_an_address_that_is_none_is_told_by_its_key(tmp_path, text, key):
    config = tmp_path / "config.yaml"
    config.write_text(text)
    with pytest.raises(ValueError, match=key) as caught:
        read_address(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("applications: 5\n", "applications: "),
        ("applications: [{import_path: nowhere}]\n", "applications.0.import_path: "),
        ("{applications: [], http_options: {request_timeout_s: soon}}\n", "http_options.request_timeout_s: "),
        (
            "applications: [{import_path: 'a:b', deployments: [{name: Talker, num_replicas: -1}]}]\n",
            "applications.0.deployments.0.num_replicas",
        ),
    ],
)
def test_what_serve_would_refuse_is_told_by_its_key(tmp_path, text, key):
    config = tmp_path / "config.yaml"
    config.write_text(text)
    assert key in find_mistake(config)
    assert "\n" not in find_mistake(config)


@pytest.mark.parametrize(
    "config", sorted((ROOT / "serve_configs").glob("tiny_*.yaml")), ids=lambda path: path.name
)
def test_serve_refuses_nothing_in_our_own_configs(config):
    assert find_mistake(config) is None


def test_a_taken_port_is_told_before_anything_starts():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = Address("127.0.0.1", holder.getsockname()[1])
        assert str(address.port) in find_problem(address)
    assert find_problem(address) is None


class Server:
    """Answers as an app whose first model does that task; remembers what was asked."""

    def __init__(self, task_type, status=200):
        self.asked = asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append((self.command, self.path))
                self._answer(json.dumps({"data": [{"id": "m", "task_type": task_type}]}).encode())

            def do_POST(self):
                asked.append((self.command, self.path))
                self.rfile.read(int(self.headers["content-length"]))
                self._answer(b"RIFF" if status == 200 else b'{"error": "needs a clip"}', status)

            def _answer(self, body, status=200):
                self.send_response(status)
                self.send_header("x-audio-seconds", "1.0")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = Address("127.0.0.1", self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.mark.parametrize(
    ("task_type", "speaks"), [("CustomVoice", True), ("VoiceDesign", True), ("Base", False)]
)
def test_the_first_sentence_is_spoken_where_no_clip_is_needed(
    task_type, speaks, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with Server(task_type) as server:
        speak_once(server.address)
    assert (("POST", "/v1/audio/speech") in server.asked) == speaks
    assert (tmp_path / "build" / "hello.wav").is_file() == speaks
    assert ("Voice clone" in capsys.readouterr().out) != speaks


def test_no_proxy_stands_between_the_launcher_and_its_server(tmp_path, monkeypatch):
    """Behind a company's proxy a start would never be seen to be ready."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    with Server("CustomVoice") as server:
        speak_once(server.address)
    assert ("POST", "/v1/audio/speech") in server.asked


# ---------------------------------------------------------------- the child
def child(code):
    """A command that runs the code with `pipe`, where it tells why it can't start."""
    return [sys.executable, "-c", f"import os, signal, sys, time\npipe = int(sys.argv[1])\n{code}"]


LAUNCH = """
import signal, sys
from deployments import launch
launch._ENDINGS = ((signal.SIGINT, 1.0), (signal.SIGTERM, 1.0), (signal.SIGKILL, 5.0))
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a script
sys.exit(launch.run(sys.argv[3:], launch.Address(sys.argv[1], int(sys.argv[2]))))
"""


def start(command, address):
    """A launcher in a process of its own, its child run by that command."""
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, address.host, str(address.port), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def nobody():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield Address("127.0.0.1", probe.getsockname()[1])


def test_a_start_that_fails_ends_with_its_reason_and_without_its_child(nobody):
    launcher = start(
        child("print('child', os.getpid(), flush=True); os.write(pipe, b'no tensor x'); time.sleep(60)"),
        nobody,
    )
    told, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert told.strip().splitlines()[-1] == "==> no tensor x"
    assert not is_alive(int(re.search(r"child (\d+)", told)[1]))


def test_a_child_that_ends_by_itself_is_an_end_too(nobody):
    launcher = start(child("sys.exit(0)"), nobody)
    told, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 1
    assert "Serve has ended" in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("stubborn", ["", "signal.SIGINT", "signal.SIGINT, signal.SIGTERM"])
def test_a_signal_ends_launcher_and_child_however_stubborn(nobody, number, stubborn):
    ignore = f"[signal.signal(n, signal.SIG_IGN) for n in ({stubborn},)]\n" if stubborn else ""
    launcher = start(child(f"{ignore}print('child', os.getpid(), flush=True)\ntime.sleep(60)"), nobody)
    pid = int(launcher.stdout.readline().split()[1])
    launcher.send_signal(number)
    launcher.communicate(timeout=120)
    assert not is_alive(pid)


def test_a_refused_first_sentence_is_told_and_the_server_goes_on():
    with Server("CustomVoice", status=400) as server:
        launcher = start(child("time.sleep(60)"), server.address)
        lines = iter(launcher.stdout.readline, "")
        refusal = next(line for line in lines if "refused" in line)
        assert "needs a clip" in refusal
        assert "Ctrl-C" in next(lines)
        assert launcher.poll() is None
        launcher.terminate()
        launcher.communicate(timeout=120)


TRACEBACK = """The deployment failed to start 3 times in a row. Error:
Traceback (most recent call last):
  File "talker.py", line 80, in __init__
    self._engine = open_engine(settings)
KeyError: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "weights.py", line 80, in take
    raise CheckpointMismatch(
qwen3tts_core.errors.CheckpointMismatch: model.safetensors: talker.norm.weight: tensor is missing
"""
PYDANTIC = """Deploying application 'a' failed: Traceback (most recent call last):
  File "app.py", line 8, in build
    app = builder(args)
pydantic_core._pydantic_core.ValidationError: 1 validation error for AppArgs
chekpoint
  Extra inputs are not permitted [type=extra_forbidden, input_value='x', input_type=str]
    For further information visit https://errors.pydantic.dev/2.14/v/extra_forbidden
"""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (TRACEBACK, "CheckpointMismatch: model.safetensors: talker.norm.weight: tensor is missing"),
        (
            PYDANTIC,
            "ValidationError: 1 validation error for AppArgs chekpoint Extra inputs are not permitted",
        ),
        ("no traceback at all", "no traceback at all"),
    ],
)
def test_of_a_traceback_the_error_is_told(message, expected):
    assert last_error(message).startswith(expected)
    assert "https" not in last_error(message)
