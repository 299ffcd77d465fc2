import asyncio
import json
import logging

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RequestCancelledError
from starlette.requests import ClientDisconnect

from deployments.metrics import RequestRecord
from qwen3tts_core.errors import EngineFault, InvalidRequest, Overloaded, UnknownVoice
from qwen3tts_core.types import AudioChunk


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def chunk(first, frames, finish=None):
    return AudioChunk(first, frames, 16, b"\0" * (3840 * frames), b"", finish)


def line_of(caplog):
    (record,) = [r for r in caplog.records if r.name == "deployments.metrics"]
    return json.loads(record.message.removeprefix("request "))


@pytest.fixture(autouse=True)
def _hear_info(caplog):
    caplog.set_level(logging.INFO, "deployments.metrics")


def test_a_finished_request_is_one_line_with_what_it_cost(caplog):
    clock = Clock()
    with RequestRecord("abc", 24000, clock) as record:
        record.note(voice="vivian", seed=7)
        clock.now += 0.02
        record.add(chunk(0, 1))
        record.wrote_audio()
        clock.now += 0.1
        record.add(chunk(1, 3, "stop"))
        record.wrote_audio()
    assert line_of(caplog) == {
        "request_id": "abc", "voice": "vivian", "seed": 7, "outcome": "ok", "status": 200, "finish": "stop",
        "frames": 4, "chunks": 2, "ttfa_s": 0.02, "audio_s": 0.32, "rtf": 0.375,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "outcome", "status"),
    [
        (InvalidRequest("no", "input"), "rejected", 400),
        (Overloaded("full"), "refused", 503),
        (EngineFault("page 7"), "failed", 500),
        (asyncio.CancelledError(), "cancelled", None),
        (GeneratorExit(), "cancelled", None),
        (BackPressureError(1, 1), "refused", 503),
        (ActorDiedError(), "failed", 503),
        (ClientDisconnect(), "cancelled", None),
        (TaskCancelledError(), "cancelled", None),
        (RequestCancelledError("a"), "cancelled", None),
        (RayTaskError("f", "a traceback", TaskCancelledError()).as_instanceof_cause(), "cancelled", None),
    ],
)
def test_every_end_is_told(caplog, error, outcome, status):
    with pytest.raises(type(error)), RequestRecord("abc", 24000):
        raise error
    line = line_of(caplog)
    assert (line["outcome"], line["status"], line["frames"], line["rtf"]) == (outcome, status, 0, None)


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        ActorUnavailableError("gone", b"\0" * 16),
        Overloaded("full"),
        InvalidRequest("no", "input"),
    ],
)
def test_whatever_cuts_a_stream_is_a_failure_with_its_type(caplog, error):
    record = RequestRecord("abc", 24000)
    record.add(chunk(0, 1))
    record.wrote_audio()
    with pytest.raises(type(error)), record:
        raise error
    line = line_of(caplog)
    assert (line["outcome"], line["status"]) == ("failed", 200)
    assert line["error"].startswith(type(error).__name__)
    assert "\n" not in line["error"]


def test_a_rejection_names_the_field_and_never_quotes(caplog):
    with pytest.raises(UnknownVoice), RequestRecord("abc", 24000):
        raise UnknownVoice("my secret words", ["vivian"])
    line = line_of(caplog)
    assert (line["outcome"], line["param"], line["code"]) == ("rejected", "voice", "unknown_voice")
    assert "secret" not in json.dumps(line)


def test_a_failure_after_the_first_audio_keeps_the_status_that_was_sent(caplog):
    record = RequestRecord("abc", 24000)
    record.add(chunk(0, 1))
    record.wrote_audio()
    with pytest.raises(EngineFault), record:
        raise EngineFault("page 7")
    line = line_of(caplog)
    assert (line["outcome"], line["status"], line["frames"]) == ("failed", 200, 1)
    assert "page 7" in line["error"]
