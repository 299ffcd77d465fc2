import asyncio
from contextlib import suppress

import pytest

from deployments.exported import CHUNK_GAP, RTF, TTFA
from deployments.metrics import RequestRecord
from deployments.request_metrics import RequestMetrics
from qwen3tts_core.errors import EngineFault, InvalidRequest, Overloaded, UnknownVoice
from qwen3tts_core.types import AudioChunk
from tests.deployments.metrics_kit import Memory
from tests.fakes import Script, mortal


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def open_record(memory, clock):
    metrics = RequestMetrics(memory, ["tiny"])

    def opened(**fields):
        record = RequestRecord("an-id", 24000, clock, metrics.ended)
        record.note(**{"model": "tiny", "streamed": True, **fields})
        return record

    return opened


def write(record, frames, finish=None):
    record.add(AudioChunk(0, frames, 16, b"\0" * (3840 * frames), b"", finish))
    record.wrote_audio()


def requests(memory):
    return {key[1:]: count for key, count in memory.counters.items() if key[0] == "requests"}


def test_a_models_counts_are_there_before_its_first_request(memory):
    RequestMetrics(memory, ["tiny"])
    for name in ("streams", "underruns", "underrun_seconds", "audio_frames", "audio_seconds", "resumes"):
        assert memory.counters[name, "tiny"] == 0
    assert len(memory.counters) == 6


def test_a_stream_tells_when_it_began_its_gaps_its_speed_and_its_audio(open_record, memory, clock):
    with open_record() as record:
        clock.now += 0.25
        write(record, 2)
        clock.now += 0.125
        write(record, 8, "stop")
        clock.now += 0.025
    assert memory.observed == {
        ("ttfa_seconds", "tiny", "true"): [0.25],
        ("chunk_gap_seconds", "tiny"): [0.125],
        ("rtf", "tiny", "true"): [pytest.approx(0.5)],
    }
    assert requests(memory) == {("tiny", "ok", "stop"): 1}
    assert memory.counters["audio_frames", "tiny"] == 10
    assert memory.counters["audio_seconds", "tiny"] == pytest.approx(0.8)
    assert (memory.counters["streams", "tiny"], memory.counters["underruns", "tiny"]) == (1, 0)


def test_a_stream_whose_player_waits_is_an_underrun(open_record, memory, clock):
    with open_record() as record:
        write(record, 1)
        clock.now += 0.08 + 0.3
        write(record, 1, "stop")
    assert memory.counters["underruns", "tiny"] == 1
    assert memory.counters["underrun_seconds", "tiny"] == pytest.approx(0.3)


def test_audio_that_is_played_faster_runs_out_sooner(open_record, memory, clock):
    with open_record() as record:
        record.speed = 4.0
        write(record, 10)
        clock.now += 0.4
        write(record, 1, "stop")
    assert memory.counters["underrun_seconds", "tiny"] == pytest.approx(0.2)


def test_a_whole_body_has_no_player(open_record, memory, clock):
    with open_record(streamed=False) as record:
        record.add(AudioChunk(0, 10, 16, b"\0" * 38400, b"", "length"))
        clock.now += 5
        record.wrote_audio()
    assert memory.observed["ttfa_seconds", "tiny", "false"] == [5]
    assert requests(memory) == {("tiny", "ok", "length"): 1}
    assert memory.counters["streams", "tiny"] == memory.counters["underruns", "tiny"] == 0


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (InvalidRequest("no", "input"), "rejected", "invalid_value"),
        (UnknownVoice("my secret words", ["vivian"]), "rejected", "unknown_voice"),
        (Overloaded("full"), "refused", "overloaded"),
        (asyncio.CancelledError(), "cancelled", "client_left"),
        (EngineFault("page 7"), "failed", "internal_error"),
    ],
)
def test_an_abort_is_counted_with_its_reason_and_nothing_else_is(open_record, memory, error, outcome, reason):
    """known_faults row 29: aborts are counted."""
    with suppress(type(error)), open_record():
        raise error
    assert requests(memory) == {("tiny", outcome, reason): 1}
    assert not memory.observed
    assert not any(value for key, value in memory.counters.items() if key[0] != "requests")


def test_a_cut_stream_was_heard_but_has_no_speed(open_record, memory):
    with suppress(EngineFault), open_record() as record:
        write(record, 2)
        raise EngineFault("page 7")
    assert requests(memory) == {("tiny", "failed", "internal_error"): 1}
    assert memory.counters["streams", "tiny"] == 1
    assert ("rtf", "tiny", "true") not in memory.observed


def test_a_request_that_never_named_a_model_is_counted_all_the_same(memory, clock):
    with suppress(InvalidRequest), RequestRecord("an-id", 24000, clock, RequestMetrics(memory, []).ended):
        raise InvalidRequest("no JSON")
    assert requests(memory) == {("none", "rejected", "invalid_value"): 1}


def test_resumes_are_counted(open_record, memory):
    with open_record() as record:
        record.num_resumes = 2
        write(record, 2, "stop")
    assert memory.counters["resumes", "tiny"] == 2


def test_goals_of_the_design_lie_on_bucket_edges():
    """So that a quantile near a goal is no guess: DESIGN's TTFA of 15, 20, 30 ms, an underrun's 100 ms, RTF 1."""
    assert {0.015, 0.02, 0.03} <= set(TTFA.buckets)
    assert 0.1 in CHUNK_GAP.buckets
    assert {0.02, 1.0} <= set(RTF.buckets)


async def test_the_api_counts_what_it_answers(open_chain):
    memory = Memory()
    async with open_chain() as chain:
        chain.ingress._parts = chain.ingress._parts._replace(metrics=RequestMetrics(memory, ["tiny"]))
        body = b'{"input": "Hello there.", "stream": true, "response_format": "pcm", "seed": 3}'
        ok = await chain.call("POST", "/v1/audio/speech", body, content_type="application/json").finish()
        bad = b'{"input": "Hello there.", "voice": "nobody"}'
        await chain.call("POST", "/v1/audio/speech", bad, content_type="application/json").finish()
        await chain.call("POST", "/v1/audio/speech", b"{", content_type="application/json").finish()
    assert ok.status == 200
    assert requests(memory) == {
        ("tiny", "ok", "stop"): 1,
        ("tiny", "rejected", "unknown_voice"): 1,
        ("none", "rejected", "invalid_value"): 1,
    }
    assert memory.counters["audio_frames", "tiny"] == len(ok.body) / 3840 > 0
    assert len(memory.observed["chunk_gap_seconds", "tiny"]) == len(ok.parts) - 1 > 0


async def test_a_stream_that_outlived_two_engines_counts_two_resumes_and_no_abort(open_chain):
    memory = Memory()
    async with open_chain(talker=Script(num_frames=60)) as chain:
        chain.ingress._parts = chain.ingress._parts._replace(metrics=RequestMetrics(memory, ["tiny"]))
        chain.codec.decode = mortal(chain.codec.decode, 1, 2)
        body = b'{"input": "Hello there.", "stream": true, "seed": 3}'
        call = await chain.call("POST", "/v1/audio/speech", body, content_type="application/json").finish()
    assert call.is_complete
    assert memory.counters["resumes", "tiny"] == 2
    assert memory.counters["audio_frames", "tiny"] == 60
    assert requests(memory) == {("tiny", "ok", "stop"): 1}
