"""`make chaos` on a small scale: engines killed and clients leaving, on a server that the command starts and ends itself.

In a process of its own, since this one may be connected to the session's Ray. Counts, never times.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT, TEST_TIMEOUT_S

DRILLS = ["disconnects", "kill"]


@pytest.fixture(scope="module")
def report():
    run = subprocess.run(
        [sys.executable, "-m", "load_tests.chaos", "--scale", "0.02", "--only", ",".join(DRILLS)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT_S - 60,
        check=False,
    )
    assert run.returncode == 0, f"{run.stdout[-4_000:]}\n{run.stderr[-2_000:]}"
    return json.loads(run.stdout.splitlines()[-1])


def drill(report, name):
    (found,) = (one for one in report["drills"] if one["drill"] == name)
    return found


def test_every_drill_that_was_asked_for_keeps_its_promises(report):
    assert [one["drill"] for one in report["drills"]] == DRILLS
    for one in report["drills"]:
        assert one["problems"] == []
        zeros = ("failed", "lost_samples", "repeated_samples", "leaked_slots", "leaked_pages", "leaked_rows")
        assert {name: one[name] for name in zeros} == dict.fromkeys(zeros, 0)
    assert report["is_good"]


def test_a_talker_and_a_codec_died_under_streams(report):
    notes = drill(report, "kill")["notes"]
    assert (notes["Talkers killed"], notes["Codecs killed"]) == (1, 1)
    assert notes["streams hit"] >= 2
    assert drill(report, "kill")["requests"] >= 4


def test_clients_left_over_every_transport_while_one_stayed(report):
    left = drill(report, "disconnects")
    assert left["notes"]["left"] == 20
    assert left["requests"] > 20
