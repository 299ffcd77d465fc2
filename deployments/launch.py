"""`make serve`: start Ray and the app of one Serve config, wait until it is ready, speak once.

    python -m deployments.launch [--fast] [--mps] serve_configs/tiny_cpu.yaml

Adds nothing that `serve run CONFIG` lacks but a person's comforts: settings that must be there
before Ray starts, an early word about a taken port, one about readiness, and a first sentence; and
an end, with the reason, to a start that has failed. The child, `serve_child.py`, never outlives this.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import yaml

from deployments.mps import MpsUnavailable, mps_daemon

HELLO = {"input": "Hello there, how are you today?", "seed": 1}
HELLO_FILE = Path("build") / "hello.wav"
_SAY_AGAIN_AFTER_S = 30
_ENDINGS = ((signal.SIGINT, 60.0), (signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0))
"""What ends the child, and how long each may take: Serve's own shutdown, Ray's alone, none."""

BEFORE_RAY = {
    "RAY_AUTH_MODE": "disabled",  # unset, it depends on which Ray command ran on this machine before
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
    # Without it audio for a slow reader piles up in Serve's queues: reader_pace.py
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.reader_pace:proxy_middlewares",
}
_FAST = {  # 3.75 instead of 10.5 ms to the first byte; README "Notes" on the ports it opens
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # How long an ingress that leaves goes on accepting, so that its proxy, on this machine, hears of it; Ray's 30 s are
    # for load balancers elsewhere, and every Ctrl-C would wait for them.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
}


open_here = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""`urlopen` for the server on this machine: whatever proxy the environment names, it isn't for this one."""


class Address(NamedTuple):
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="deployments.launch", description="Serve one config and say when it is ready."
    )
    parser.add_argument("config", type=Path, help="a Serve config, e.g. serve_configs/tiny_cpu.yaml")
    parser.add_argument("--fast", action="store_true", help="HAProxy in front and one loop per replica")
    parser.add_argument("--mps", action="store_true", help="an MPS daemon, for replicas that share a GPU")
    arguments = parser.parse_args()
    try:
        address = read_address(arguments.config)
    except (OSError, ValueError) as error:
        return _give_up(str(error))
    problem = find_problem(address)
    if problem is not None:
        return _give_up(problem)
    for name, value in {**BEFORE_RAY, **(_FAST if arguments.fast else {})}.items():
        os.environ.setdefault(name, value)
    _say(f"starting Ray Serve with {arguments.config}; this takes half a minute or so, more the first time")
    command = [sys.executable, "-m", "deployments.serve_child", str(arguments.config)]
    try:
        with mps_daemon() if arguments.mps else nullcontext():
            return run(command, address)
    except MpsUnavailable as error:
        return _give_up(str(error))


def read_address(config: Path) -> Address:
    """Where the config's app will listen. Raises OSError, or ValueError that names the key.

    All else in the config is `serve_child.py`'s to check: Ray is slow to import.
    """
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{config} is no YAML: {' '.join(str(error).split())}") from error
    options = _mapping(_mapping(content, str(config)).get("http_options"), "http_options")
    host, port = options.get("host", "127.0.0.1"), options.get("port", 8000)
    if not isinstance(host, str):
        raise ValueError(f"http_options.host must be text, got {host!r}")
    if type(port) is not int or not 1 <= port <= 65_535:
        raise ValueError(f"http_options.port must be an integer from 1 to 65535, got {port!r}")
    return Address(host, port)


def _mapping(value: object, name: str) -> dict[str, object]:
    if not isinstance(value, dict | None):
        raise ValueError(f"{name} must be a mapping, got {value!r}"[:300])
    return value or {}


def find_problem(address: Address) -> str | None:
    """What would fail later and less clearly; None when all is well."""
    if importlib.util.find_spec("uvloop") is None:
        return "uvloop can't be imported: every reused connection would wait 40 ms; run `make install`"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return (
                f"{address.host}:{address.port} can't be used ({error.strerror}): another server, or an HAProxy "
                "left over from an earlier start? End it, or change http_options.port in the config"
            )
    return None


def run(command: Sequence[str], address: Address) -> int:
    """Serve until interrupted (SIGINT, SIGTERM) or until the start has failed; an exit status.

    command: of the child; a file descriptor is added, to which it writes why it can't start.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # set even where a script's shell had SIGINT ignored
        signal.signal(number, _interrupt)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    # A session of its own: a terminal's Ctrl-C would reach it a second time, in the midst of its shutdown.
    serve = subprocess.Popen([*command, str(writing)], pass_fds=[writing], start_new_session=True)
    os.close(writing)
    try:
        problem = wait_until_ready(serve, address, reading)
        if problem is not None:
            end(serve)  # first: its last words would hide ours
            return _give_up(problem)
        _say(f"ready at {address.url}")
        _try_to_speak(address)
        _say("Ctrl-C ends it")
        serve.wait()
    except KeyboardInterrupt:
        _say("ending; again, to end it the hard way")
    finally:
        end(serve)
        os.close(reading)
    return serve.returncode if serve.returncode >= 0 else 128 - serve.returncode


def wait_until_ready(serve: subprocess.Popen[bytes], address: Address, failures: int) -> str | None:
    """Poll `/health` until it is 200; or what went wrong instead. failures: the pipe's end, not blocking."""
    began = said = time.monotonic()
    while serve.poll() is None:
        if failure := _read_now(failures):
            return failure
        try:
            with open_here(f"{address.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return None
        except (OSError, http.client.HTTPException):
            pass  # not listening yet, or not ready: both are told by the line below
        now = time.monotonic()
        if now - said > _SAY_AGAIN_AFTER_S:
            said = now
            _say(f"still starting after {now - began:.0f} s; what happens is in the lines above")
        time.sleep(0.5)
    return _read_now(failures) or f"Serve has ended (status {serve.returncode}); why is in the lines above"


def end(serve: subprocess.Popen[bytes]) -> None:
    """Ask politely, then less so; each within its time, or until the user asks again."""
    for number, patience_s in _ENDINGS:
        if serve.poll() is not None:
            return
        serve.send_signal(number)
        try:
            serve.wait(patience_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            _say(f"{number.name} has not ended it")


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def _read_now(pipe: int) -> str:
    try:
        return os.read(pipe, 1 << 16).decode(errors="replace")
    except BlockingIOError:
        return ""


def _try_to_speak(address: Address) -> None:
    """A server that refuses the first sentence still serves: say why, and go on."""
    try:
        speak_once(address)
    except urllib.error.HTTPError as error:
        _say(f"the first sentence was refused: {error.code} {error.read(2_000).decode(errors='replace')}")
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        _say(f"the first sentence failed: {error!r}")


def speak_once(address: Address) -> None:
    """One sentence into a file, and the command that does the same."""
    with open_here(f"{address.url}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]
    if model["task_type"] == "Base":
        _say(f'{model["id"]} speaks with the voice of a clip: README, "Voice clone", has the commands')
        return
    body = json.dumps(HELLO)
    request = urllib.request.Request(
        f"{address.url}/v1/audio/speech", body.encode(), {"Content-Type": "application/json"}
    )
    with open_here(request, timeout=600) as answer:
        HELLO_FILE.parent.mkdir(exist_ok=True)
        HELLO_FILE.write_bytes(answer.read())
        _say(f"spoke {answer.headers['X-Audio-Seconds']} s of audio into {HELLO_FILE}; the same by hand:")
    _say(f"  curl {address.url}/v1/audio/speech -H 'content-type: application/json' -d '{body}' -o hello.wav")


def _say(line: str) -> None:
    print(f"==> {line}", flush=True)


def _give_up(problem: str) -> int:
    print(f"==> {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
