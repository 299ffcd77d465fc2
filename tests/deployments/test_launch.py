import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from deployments.launch import Address, find_problem, read_address, speak_once


def test_the_address_is_the_configs(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("http_options: {host: 127.0.0.2, port: 8123}\n")
    assert read_address(config) == Address("127.0.0.2", 8123)
    config.write_text("applications: []\n")
    assert read_address(config) == Address("127.0.0.1", 8000)


def test_a_missing_config_is_an_error_with_its_name(tmp_path):
    with pytest.raises(OSError, match=r"nope\.yaml"):
        read_address(tmp_path / "nope.yaml")


def test_a_taken_port_is_told_before_anything_starts():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = Address("127.0.0.1", holder.getsockname()[1])
        assert str(address.port) in find_problem(address)
    assert find_problem(address) is None


class Server:
    """Answers as an app whose first model does that task; remembers what was asked."""

    def __init__(self, task_type):
        self.asked = asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append((self.command, self.path))
                self._answer(json.dumps({"data": [{"id": "m", "task_type": task_type}]}).encode())

            def do_POST(self):
                asked.append((self.command, self.path))
                self.rfile.read(int(self.headers["content-length"]))
                self._answer(b"RIFF")

            def _answer(self, body):
                self.send_response(200)
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
