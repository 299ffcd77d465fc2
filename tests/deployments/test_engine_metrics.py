import asyncio
import dataclasses
import logging
from dataclasses import dataclass, field

import pytest

from deployments import engine_metrics
from deployments.clone import VoiceLookups
from deployments.engine_metrics import EnginePublisher, Series, memory_table, start_publishing
from deployments.exported import Metric
from qwen3tts_core.engine.memo import MemoStats
from qwen3tts_core.engine.tally import Tally
from tests.deployments.metrics_kit import Memory

BOUNDS = (1, 2, 4)
TABLE = {
    "waiting": Series(Metric("waiting", "gauge", "g")),
    "frames": Series(Metric("frames", "counter", "c", ("kind",)), {"kind": "all"}),
    "by_size": Series(Metric("by_size", "counter", "c", ("size",))),
    "rows": Series(Metric("rows", "histogram", "h", (), BOUNDS)),
}


@dataclass
class Stats:
    waiting: int = 0
    frames: int = 0
    by_size: dict = field(default_factory=lambda: {1: 0, 8: 0})
    rows: tuple = (0, 0, 0, 0)
    nobodys: int = 7


@pytest.fixture
def memory():
    return Memory()


def test_what_was_added_is_published_once(memory):
    stats = Stats()
    publisher = EnginePublisher(lambda: stats, TABLE, memory)
    publisher.publish()
    assert memory.counters == {
        ("frames", "all"): 0,
        ("by_size", "1"): 0,
        ("by_size", "8"): 0,
    }  # there from the start
    stats.frames, stats.by_size[8] = 5, 2
    publisher.publish()
    publisher.publish()
    stats.frames += 1
    publisher.publish()
    assert memory.counters == {("frames", "all"): 6, ("by_size", "1"): 0, ("by_size", "8"): 2}


def test_a_gauge_is_what_it_is_now(memory):
    stats = Stats(waiting=3)
    publisher = EnginePublisher(lambda: stats, TABLE, memory)
    publisher.publish()
    stats.waiting = 0
    publisher.publish()
    assert memory.gauges == {("waiting",): 0}


def test_a_tally_becomes_observations_in_the_same_buckets(memory):
    tally, published = Tally(BOUNDS), Tally(BOUNDS)
    publisher = EnginePublisher(lambda: Stats(rows=tally.counts()), TABLE, memory)
    for values in ([0.5, 1, 2, 3, 4, 100], [], [3]):
        for value in values:
            tally.add(value)
        publisher.publish()
    for value in memory.observed["rows",]:
        published.add(value)
    assert published.counts() == tally.counts()


@pytest.mark.parametrize(
    ("table", "module", "name"),
    [
        (engine_metrics.TALKER_TABLE, "talker_engine", "TalkerStats"),
        (engine_metrics.CODEC_TABLE, "codec_engine", "CodecStats"),
        (memory_table("encoder"), "memo", "MemoStats"),
    ],
)
def test_every_stat_that_is_published_exists(table, module, name):
    stats = getattr(pytest.importorskip(f"qwen3tts_core.engine.{module}"), name)
    assert set(table) <= {known.name for known in dataclasses.fields(stats)}


def test_every_lookup_of_a_voice_is_published():
    assert set(engine_metrics.VOICES_TABLE) == {known.name for known in dataclasses.fields(VoiceLookups)}


async def test_publishing_goes_on_after_a_second_that_failed(memory, caplog):
    answers = iter([Stats(frames=1), ZeroDivisionError("a stat"), Stats(frames=3)])

    def read():
        answer = next(answers, None)
        if isinstance(answer, Exception):
            raise answer
        return answer or Stats(frames=3)

    with caplog.at_level(logging.ERROR, "asyncio"):
        start_publishing(read, TABLE, memory, period_s=0.001)
        assert memory.counters["frames", "all"] == 1  # the first at once
        async with asyncio.timeout(30):
            while memory.counters["frames", "all"] < 3:  # noqa: ASYNC110 - a timer's work
                await asyncio.sleep(0.001)
    assert "ZeroDivisionError" in caplog.text


def test_a_memorys_lookups_are_told_apart(memory):
    read = lambda: MemoStats(num_hits=4, num_joined=1, num_runs=2, num_evicted=9)  # noqa: E731
    EnginePublisher(read, memory_table("ingress"), memory).publish()
    assert memory.counters == {
        ("cache_lookups", "ingress", "hit"): 4,
        ("cache_lookups", "ingress", "joined"): 1,
        ("cache_lookups", "ingress", "miss"): 2,
    }
