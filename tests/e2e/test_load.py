"""`python -m load_tests` against the real app: every kind of load, its files and its report. Counts, never times."""

import json
from collections import Counter

import pytest
import ray

from load_tests.__main__ import main
from load_tests.adapters import BYTES_PER_FRAME
from load_tests.bottleneck import engine_figures
from load_tests.engine_counters import EngineCounters, growth
from load_tests.report import write_report


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("load")


def load(app, out, kind, *options, workers=1, frames="2-5", name=None):
    """Run it; its summary and its requests. Answers that failed or lacked audio make its status 1."""
    name = name or kind
    common = ["--url", app.url, "--out", str(out), "--name", name, "--seed", "1"]
    assert main([kind, *common, "--frames", frames, "--workers", str(workers), *options]) == 0
    lines = (out / f"{name}.jsonl").read_text().splitlines()
    return json.loads((out / f"{name}.json").read_text()), [json.loads(line) for line in lines]


def test_a_closed_loop_has_every_answer_whole_from_two_client_processes(app, out):
    options = ["--concurrency", "1,3", "--sentences", "6", "--repeats", "2", "--warm-up", "1", "--save-wavs"]
    run, requests = load(app, out, "closed", *options, workers=2)
    assert [(level["num_ok"], level["num_repeats"]) for level in run["levels"]] == [(12, 2), (12, 2)]
    assert Counter(request["level"] for request in requests) == {"1": 12, "3": 12}
    one, three = ({r["number"]: r for r in requests if r["level"] == level} for level in ("1", "3"))
    assert one.keys() == three.keys(), "levels are paired"
    for number, request in one.items():
        assert request["audio_s"] == three[number]["audio_s"], "the same seed and text last as long"
        assert 0 < request["ttfa_s"] <= request["total_s"]
        assert request["server_s"]["first_audio"] > 0
        assert request["arrivals"][-1][1] % BYTES_PER_FRAME == 0
    assert len(list((out / "closed_wavs_3").glob("*.wav"))) == 12
    assert run["levels"][1]["client_cpu_s"] > 0
    assert run["environment"]["packages"]["ray"]


def test_events_tell_the_frames_that_came(app, out):
    options = ["--concurrency", "2", "--sentences", "4", "--repeats", "1", "--warm-up", "0", "--events"]
    _, requests = load(app, out, "closed", *options, name="events")
    assert len(requests) == 4
    assert [request["num_frames"] * BYTES_PER_FRAME for request in requests] == [
        request["arrivals"][-1][1] for request in requests
    ]


def test_an_open_loop_counts_its_window_alone(app, out):
    run, requests = load(app, out, "open", "--rates", "3", "--warm-up-s", "0.5", "--window-s", "1.5")
    measured = [request for request in requests if request["tag"] != "warm-up"]
    assert 0 < run["levels"][0]["num_ok"] == len(measured)


def test_players_and_long_texts(app, out):
    players, _ = load(app, out, "players", "--concurrency", "2", "--seconds", "1")
    assert players["levels"][0]["num_ok"] >= 1
    long, requests = load(
        app,
        out,
        "long",
        "--chars",
        "650",
        "--concurrency",
        "2",
        "--sentences",
        "2",
        "--repeats",
        "1",
        "--warm-up",
        "0",
    )
    assert long["levels"][0]["num_ok"] == len(requests) == 2


def test_after_a_storm_the_server_takes_as_many_as_before(app, out):
    options = ["--concurrency", "4", "--steady", "1", "--seconds", "1.5"]
    run, requests = load(app, out, "storm", *options, frames="10-20")
    (level,) = run["levels"]
    assert level["num_left"] >= 1
    assert level["num_ok"] == sum(r["outcome"] == "ok" and r["tag"] == "steady" for r in requests) >= 1
    assert level["recovered_s"] is not None
    app.wait_until_free()


def test_a_full_server_refuses_and_the_refusals_are_timed(deterministic, out):
    """Eight slots and no queue; the clients begin within the first second."""
    run, requests = load(
        deterministic, out, "refusals", "--concurrency", "12", "--seconds", "4", frames="20-30"
    )
    (level,) = run["levels"]
    refused = [request for request in requests if request["outcome"] == "refused"]
    assert level["num_refused"] == len(refused) >= 1
    assert level["refused_without_retry_after"] == 0
    assert level["refused_s_p50"] <= level["refused_s_p99"]


def test_another_driver_reads_the_engines_counters(app, deterministic, tmp_path):
    counters = EngineCounters(ray.get_runtime_context().gcs_address, tmp_path / "log")
    try:
        before = counters.read()
        for one in (app, deterministic):  # deployments of one name: either's may be read
            one.speak(seed=1, max_new_tokens=5)
        grown = growth(before, counters.read())
    finally:
        counters.close()
    assert grown["Talker"]["frames"] >= 5
    assert grown["Codec"]["frames"] >= 5
    assert engine_figures(grown, wall_s=1.0)["Talker frames per step"] > 0


def test_the_report_has_every_kind(out):
    text = write_report(out, plots=True)
    for kind in ("closed", "open", "players", "storm", "refusals"):
        assert f"### {kind}" in text
    assert "| 1 stream | TTFA p50 22, p95 24 ms; RTF 0.085 |" in text
    assert (out / "ttfa_cdf.png").exists()


def test_answers_that_fail_are_a_failure(app, out, capsys):
    options = [
        "--concurrency",
        "1",
        "--sentences",
        "1",
        "--repeats",
        "1",
        "--warm-up",
        "0",
        "--voice",
        "nobody",
    ]
    assert main(["closed", "--url", app.url, "--out", str(out), "--name", "wrong", *options]) == 1
    assert "not whole" in capsys.readouterr().err


def test_nobody_at_the_url_is_told(out, capsys):
    assert main(["closed", "--url", "http://127.0.0.1:1", "--out", str(out)]) == 1
    assert "http://127.0.0.1:1/v1/models" in capsys.readouterr().err
