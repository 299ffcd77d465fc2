"""Who asks when, with a server that answers at once or says no."""

import asyncio
import itertools
import random
import time

import pytest

from load_tests.jobs import JobMaker
from load_tests.records import SpeechRecord
from load_tests.scenarios import LEAVER, STEADY, WARM_UP, Closed, OpenLoop, Players, Share, Storm, draw_leave
from tests.fakes import until

JOBS = JobMaker(["one", "two", "three"])


class FakeServer:
    """Answers after `answer_s`, or once it was asked by `all_of` at once; counts how many that were at most."""

    def __init__(self, answer_s=0.001, outcome="ok", all_of=0):
        self.answer_s, self.outcome, self.all_of = answer_s, outcome, all_of
        self.records, self.leaves = [], []
        self.now = self.most = 0

    async def __call__(self, job, leave=None, tag=""):
        self.now += 1
        self.most = max(self.most, self.now)
        record = SpeechRecord(job.number, time.perf_counter(), outcome=self.outcome, tag=tag)
        await asyncio.sleep(self.answer_s)
        await until(lambda: self.most >= self.all_of, timeout_s=60)
        self.now -= 1
        record.total_s = time.perf_counter() - record.sent_at
        self.records.append(record)
        self.leaves.append(leave)
        return record

    @property
    def numbers(self):
        return sorted(record.number for record in self.records)


def shares(count):
    numbers = itertools.count()
    return [Share(lambda: next(numbers), worker, count) for worker in range(count)]


async def run_in_parts(scenario, server, count):
    await asyncio.gather(*(scenario.run(server, JOBS, share) for share in shares(count)))


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_a_closed_loop_sends_every_number_once_and_never_more_at_a_time(workers):
    server = FakeServer()
    await run_in_parts(Closed(concurrency=5, num_requests=23), server, workers)
    assert server.numbers == list(range(23))
    assert server.most == 5


async def test_more_client_processes_than_clients_leave_nothing_out():
    server = FakeServer()
    await run_in_parts(Closed(concurrency=1, num_requests=4), server, 3)
    assert server.numbers == [0, 1, 2, 3]
    assert server.most == 1


async def test_a_repeats_numbers_begin_where_it_does():
    server = FakeServer()
    numbers = itertools.count()
    await Closed(2, 3).run(server, JOBS, Share(lambda: next(numbers), first_number=1_000))
    assert server.numbers == [1_000, 1_001, 1_002]


async def test_a_closed_loop_bounded_in_time_ends():
    server = FakeServer(0.01)
    await run_in_parts(Closed(concurrency=2, seconds=0.1), server, 1)
    assert 2 <= len(server.records) <= 2 * 11, "each client once, and none for much longer"


async def test_a_refused_client_waits_before_it_asks_again():
    server = FakeServer(0.0, outcome="refused")
    await run_in_parts(Closed(concurrency=1, seconds=0.2, pause_s=0.1), server, 1)
    assert len(server.records) <= 5


@pytest.mark.parametrize("workers", [1, 2])
async def test_an_open_loop_sends_at_its_times_however_slow_the_answers(workers):
    scenario = OpenLoop(rate_per_s=40, warm_up_s=0.1, window_s=0.2, seed=1)
    server = FakeServer(all_of=scenario.num_requests)
    await run_in_parts(scenario, server, workers)
    assert server.numbers == list(range(scenario.num_requests))
    assert server.most == scenario.num_requests
    early = sum(at < 0.1 for at in scenario.arrivals)
    assert 0 < sum(record.tag == WARM_UP for record in server.records) == early < scenario.num_requests


async def test_a_player_hears_its_answer_before_it_asks_again():
    class Talkative(FakeServer):
        async def __call__(self, job, leave=None, tag=""):
            record = await super().__call__(job, leave, tag)
            record.arrivals = [(0.001, 4_800)]  # 0.1 s
            return record

    server = Talkative()
    await run_in_parts(Players(concurrency=1, seconds=0.25, spread_s=0.0), server, 1)
    starts = [record.sent_at for record in server.records]
    assert len(starts) >= 1
    assert all(later - earlier >= 0.1 for earlier, later in itertools.pairwise(starts))


async def test_in_a_storm_the_steady_stay_and_the_others_leave():
    server = FakeServer(0.005)
    await run_in_parts(Storm(leavers=3, steady=1, seconds=0.1), server, 2)
    by_tag = {LEAVER: [], STEADY: []}
    for record, leave in zip(server.records, server.leaves, strict=True):
        by_tag[record.tag].append(leave)
    assert set(by_tag[STEADY]) == {None}
    assert None not in by_tag[LEAVER]


def test_leavers_go_before_the_first_audio_after_it_and_later():
    generator = random.Random(0)
    leaves = [draw_leave(generator) for _ in range(300)]
    early = [leave for leave in leaves if leave.after_s is not None]
    first = [leave for leave in leaves if leave.after_reads == 1]
    later = [leave for leave in leaves if leave.after_reads is not None and leave.after_reads > 1]
    assert len(early) + len(first) + len(later) == 300
    assert min(len(early), len(first), len(later)) > 70
