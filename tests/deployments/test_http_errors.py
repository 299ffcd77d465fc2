import inspect
import json

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError
from starlette.exceptions import HTTPException

import qwen3tts_core.errors as errors
from deployments.http_errors import describe
from qwen3tts_core.errors import (
    CheckpointMismatch,
    EngineFault,
    InvalidRequest,
    Overloaded,
    TTSError,
    UnknownVoice,
)

EXAMPLES = [
    (errors.InvalidRequest("top_k must be 0 or more, got -1", "top_k"), 400, "invalid_value", "top_k"),
    (errors.TextTooLong(5210, 4096), 400, "text_too_long", "input"),
    (errors.UnknownVoice("nope", ["vivian"]), 400, "unknown_voice", "voice"),
    (errors.UnknownLanguage("nope", ["Auto"]), 400, "unknown_language", "language"),
    (errors.UnknownModel("nope", ["tiny"]), 404, "model_not_found", "model"),
    (errors.VoiceNameTaken("Vivian"), 409, "voice_name_taken", "name"),
    (errors.EncoderUnavailable("response_format mp3", "x"), 400, "encoder_unavailable", "response_format"),
    (errors.InvalidReferenceAudio("silent"), 400, "invalid_reference_audio", "ref_audio"),
    (errors.Overloaded("full"), 503, "overloaded", None),
    (errors.FirstAudioTimeout(30.0), 504, "first_audio_timeout", None),
    (errors.StorageFull("no room for voices"), 507, "storage_full", None),
    (errors.SlowReader(60.0), 499, "slow_reader", None),
    (errors.EngineDown("page 7"), 503, "unavailable", None),
    (errors.StreamLost("page 7", 60.0), 503, "unavailable", None),
    (errors.StreamCancelled(), 499, "cancelled", None),
    (errors.EngineFault("page 7"), 500, "internal_error", None),
    (errors.InvalidCodes("page 7"), 500, "internal_error", None),
    (errors.CheckpointMismatch("page 7", ["x"]), 500, "internal_error", None),
]


@pytest.mark.parametrize(
    ("error", "status", "code", "param"), EXAMPLES, ids=lambda value: type(value).__name__
)
def test_every_kind_has_its_status(error, status, code, param):
    described = describe(error)
    assert (described.status, described.error["code"], described.error["param"]) == (status, code, param)
    assert set(described.error) == {"message", "type", "param", "code"}
    assert json.loads(described.response().body)["error"] == described.error


def test_the_examples_leave_no_public_kind_out():
    public = {
        kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, TTSError) and not name.startswith("_") and kind is not TTSError
    }
    assert {type(error) for error, *_ in EXAMPLES} == public


def test_a_kind_added_later_is_told_like_its_base():
    class VoiceInUse(UnknownVoice):
        pass

    class DiskFull(EngineFault):
        pass

    assert describe(VoiceInUse("a", ["b"])).error["code"] == "unknown_voice"
    assert describe(DiskFull("/var")).status == 500


@pytest.mark.parametrize(
    "error", [EngineFault("secret"), CheckpointMismatch("secret", ["secret"]), KeyError("secret")]
)
def test_our_faults_are_told_in_general_words_only(error):
    described = describe(error)
    assert described.status == 500
    assert described.is_ours
    assert "secret" not in json.dumps(described.error)


def test_what_the_caller_can_fix_is_told_in_full():
    assert describe(InvalidRequest("top_k must be 0", "top_k")).error["message"] == "top_k must be 0"
    assert "vivian" in describe(UnknownVoice("nope", ["vivian"])).error["message"]


@pytest.mark.parametrize(("wait_s", "header"), [(0.2, "1"), (1.0, "1"), (2.5, "3")])
def test_overload_says_when_to_come_back_in_whole_seconds(wait_s, header):
    assert describe(Overloaded("full", wait_s)).headers == {"Retry-After": header}


def test_serves_own_backpressure_looks_the_same():
    described = describe(BackPressureError(1, 1))
    assert (described.status, described.error["code"], described.headers) == (
        503,
        "overloaded",
        {"Retry-After": "1"},
    )


def test_a_dead_replica_is_unavailable_not_broken():
    described = describe(ActorDiedError())
    assert (described.status, described.headers) == (503, {"Retry-After": "1"})


@pytest.mark.parametrize("depth", [1, 2])
def test_errors_keep_their_kind_across_replicas(depth):
    error = UnknownVoice("nope", ["vivian"])
    for _ in range(depth):
        error = RayTaskError("decode", "a traceback", error).as_instanceof_cause()
    described = describe(error)
    assert (described.status, described.error["param"]) == (400, "voice")
    assert "traceback" not in described.error["message"]


def test_http_exceptions_keep_status_and_headers():
    described = describe(HTTPException(405, "Method Not Allowed", {"Allow": "POST"}))
    assert (described.status, described.headers, described.error["code"]) == (
        405,
        {"Allow": "POST"},
        "method_not_allowed",
    )
