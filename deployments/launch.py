"""`make serve`: start Ray and the app of one Serve config, wait until it is ready, speak once.

    python -m deployments.launch [--fast] serve_configs/tiny_cpu.yaml

Adds nothing that `serve run CONFIG` lacks but a person's comforts: settings that must be there
before Ray starts, an early word about a taken port, one about readiness, and a first sentence.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import NamedTuple

import yaml

HELLO = {"input": "Hello there, how are you today?", "seed": 1}
HELLO_FILE = Path("build") / "hello.wav"
_SAY_AGAIN_AFTER_S = 30

_ALWAYS = {
    "RAY_AUTH_MODE": "disabled",  # unset, it depends on which Ray command ran on this machine before
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
_FAST = {  # 3.75 instead of 10.5 ms to the first byte; README "Notes" on the ports it opens
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
}


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
    arguments = parser.parse_args()
    try:
        address = read_address(arguments.config)
    except (OSError, ValueError) as error:
        return _give_up(str(error))
    problem = find_problem(address)
    if problem is not None:
        return _give_up(problem)
    for name, value in {**_ALWAYS, **(_FAST if arguments.fast else {})}.items():
        os.environ.setdefault(name, value)
    return run(arguments.config, address)


def read_address(config: Path) -> Address:
    """Where the config's app will listen. Raises OSError or ValueError."""
    options = (yaml.safe_load(config.read_text(encoding="utf-8")) or {}).get("http_options") or {}
    return Address(options.get("host", "127.0.0.1"), options.get("port", 8000))


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


def run(config: Path, address: Address) -> int:
    """Serve until interrupted; the exit status of `serve run`."""
    _say(f"starting Ray Serve with {config}; this takes half a minute or so, more the first time")
    serve = subprocess.Popen([Path(sys.executable).with_name("serve"), "run", str(config)])
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches the child by itself; SIGTERM does not
        signal.signal(number, lambda *_: serve.send_signal(signal.SIGINT))
    if wait_until_ready(serve, address):
        _say(f"ready at {address.url}")
        speak_once(address)
        _say("Ctrl-C ends it")
    return serve.wait()


def wait_until_ready(serve: subprocess.Popen[bytes], address: Address) -> bool:
    """Poll `/health`; False when the server has ended instead."""
    began = said = time.monotonic()
    while serve.poll() is None:
        try:
            with urllib.request.urlopen(f"{address.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            pass  # not listening yet, or not ready: both are told by the line below
        now = time.monotonic()
        if now - said > _SAY_AGAIN_AFTER_S:
            said = now
            _say(f"still starting after {now - began:.0f} s; what happens is in the lines above")
        time.sleep(0.5)
    return False


def speak_once(address: Address) -> None:
    """One sentence into a file, and the command that does the same."""
    with urllib.request.urlopen(f"{address.url}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]
    if model["task_type"] == "Base":
        _say(f'{model["id"]} speaks with the voice of a clip: README, "Voice clone", has the commands')
        return
    body = json.dumps(HELLO)
    request = urllib.request.Request(
        f"{address.url}/v1/audio/speech", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
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
