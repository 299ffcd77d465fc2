"""The autoscaling drill on a Ray cluster of its own: from nothing to two nodes and back, and no request lost.

In a process of its own, since this one may be connected to the session's Ray. Counts, never times.
"""

import json
import os
import subprocess
import sys
from itertools import pairwise

import pytest

from tests.e2e.conftest import ROOT, TEST_TIMEOUT_S


@pytest.fixture(scope="module")
def drill():
    run = subprocess.run(
        [sys.executable, "-m", "load_tests.autoscale", "--quick"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT_S - 60,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-4_000:]}\n{run.stderr[-2_000:]}"
    return json.loads(run.stdout.splitlines()[-1])


def test_load_grows_replicas_and_nodes_and_all_falls_back_to_nothing(drill):
    """The drill itself waits for each of these, and fails when one doesn't come."""
    timeline = drill["timeline"]
    assert (timeline[0]["replicas"], timeline[0]["nodes"]) == ([0, 0], 0)
    assert drill["most"]["Talker"] >= 2
    assert drill["most"]["Codec"] >= 1
    assert drill["most_nodes"] >= 2, "a second Talker has no room on the first node's GPU"
    assert (timeline[-1]["replicas"], timeline[-1]["nodes"]) == ([0, 0], 0)


def test_no_request_was_lost_or_refused_on_the_way(drill):
    assert drill["requests"] >= 1 + 6 + 2  # one to wake it, and what each client of the load sends at least
    assert (drill["failed"], drill["refused"]) == (0, 0)


def test_a_request_at_zero_replicas_woke_them(drill):
    phases = {phase["phase"]: phase for phase in drill["phases"]}
    assert phases["wake"]["Talker"].startswith("0 > ")
    assert drill["done_of"].get("wake") == 1


def test_a_talker_that_had_to_go_ended_its_streams_first(drill):
    """While it was going, streams ran, and all of them were heard to their last sample."""
    going = [
        now
        for before, now in pairwise(drill["timeline"])
        if now["phase"] == "shrink" and (now["stopping"][0] or now["replicas"][0] < before["replicas"][0])
    ]
    assert going
    assert all(moment["in_flight"] > 0 for moment in going)
