"""Voices come and go through a server's API; here one in a thread, since the client brings its own loop."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from load_tests.client import Target
from load_tests.jobs import made_up_clips
from load_tests.uploads import uploaded_voices


class Voices(BaseHTTPRequestHandler):
    def do_POST(self):
        form = self.rfile.read(int(self.headers["content-length"]))
        name = re.search(rb'name="name"\r\n(?:.*\r\n)*?\r\n(.*)\r\n', form).group(1).decode()
        is_whole = b"RIFF" in form and b'name="ref_text"' in form
        self.server.log.append(("POST", name, is_whole))
        self.answer(400 if name in self.server.refused else 200)

    def do_DELETE(self):
        self.server.log.append(("DELETE", self.path.rpartition("/")[2]))
        self.answer(200)

    def answer(self, status):
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Voices)
    server.log, server.refused = [], set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def target(server):
    return Target(f"http://127.0.0.1:{server.server_port}")


def test_voices_are_there_for_the_measurement_and_gone_after_it(server, target):
    with uploaded_voices(target, made_up_clips(2)) as names:
        assert server.log == [("POST", name, True) for name in names]
    assert server.log[2:] == [("DELETE", name) for name in names]


def test_voices_go_also_when_the_measurement_fails(server, target):
    with pytest.raises(RuntimeError), uploaded_voices(target, made_up_clips(1)):
        raise RuntimeError("measured nothing")
    assert server.log[-1][0] == "DELETE"


def test_a_voice_that_is_refused_is_told_by_its_name(server, target):
    server.refused.add("load-test-1")
    with pytest.raises(OSError, match="load-test-1: 400"), uploaded_voices(target, made_up_clips(2)):
        pass


def test_servers_that_take_no_uploads_are_not_asked(server, target):
    other = Target(target.url, engine="mstar")
    with pytest.raises(ValueError, match="mstar"), uploaded_voices(other, made_up_clips(1)):
        pass
    assert server.log == []
