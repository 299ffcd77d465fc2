import json

import pytest

from load_tests.adapters import BYTES_PER_FRAME
from load_tests.aims import AIMS
from load_tests.measurement import over_repeats, summarise
from load_tests.records import SpeechRecord
from load_tests.report import main, read_runs, report, start_line


def level(concurrency, ttfa_s, total_s, frames=90, name=None, **fields):
    size = frames * BYTES_PER_FRAME
    records = [
        SpeechRecord(
            number,
            number * 0.01,
            outcome="ok",
            total_s=total_s,
            audible_s=ttfa_s,
            arrivals=[(ttfa_s, size // 2), (total_s, size)],
        )
        for number in range(concurrency)
    ]
    summary = over_repeats([summarise(records, [], total_s)])
    about = {"name": name or str(concurrency), "scenario": "closed", "concurrency": concurrency}
    return about | summary | fields, records


@pytest.fixture
def folder(tmp_path):
    """Two runs: one that reaches its aims, one that doesn't."""
    environment = {
        "at": "now",
        "commit": "abc",
        "python": "3.12",
        "packages": {"ray": "2.60"},
        "cpus": 2,
        "gpus": [],
    }
    for name, ttfa_s in (("fast", 0.01), ("slow", 0.5)):
        (one, some), (many, others) = level(1, ttfa_s, 0.2), level(32, ttfa_s + 0.01, 0.4)
        run = {"label": name, "environment": environment | {"command": "x"}, "levels": [one, many]}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
        lines = [
            {"level": row["name"], **record.as_json(0)}
            for row, records in ((one, some), (many, others))
            for record in records
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_the_table_stands_beside_the_published_numbers_and_the_aims(folder):
    text = report(read_runs(folder))
    head, _, one, many = text.splitlines()[:4]
    assert head == "|  | best published (H100) | aim (H200) | fast | slow |"
    assert one.startswith("| 1 stream | TTFA p50 22, p95 24 ms; RTF 0.085 | TTFA p50 ≤ 15 ms; RTF ≤ 0.035 |")
    assert one.count("reached") == 1
    assert "missed ttfa_s_p50" in one.split("|")[5]
    assert many.startswith("| 32 streams |")


def test_a_report_is_written_with_its_plots(folder, capsys):
    assert main([str(folder)]) == 0
    assert "32 streams" in capsys.readouterr().out
    for name in ("ttfa_cdf", "audio_per_s", "playback_fast", "playback_slow"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"]({name}.png)" in (folder / "report.md").read_text()


def test_a_folder_without_results_is_told(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "no results" in capsys.readouterr().err


def test_a_level_that_reaches_everything_misses_nothing():
    row, _ = level(32, 0.02, 0.4)
    assert AIMS[32].missed(row) == []


@pytest.mark.parametrize(
    ("fields", "missed"),
    [
        ({"ttfa_s_p95": 0.071}, ["ttfa_s_p95"]),
        ({"audio_per_s": 449.0}, ["audio_per_s"]),
        ({"num_refused": 1}, ["completeness"]),
        ({"missing": ["x"]}, ["completeness"]),
    ],
)
def test_what_is_missed_is_named(fields, missed):
    row, _ = level(32, 0.02, 0.4)
    assert AIMS[32].missed(row | fields) == missed


def test_an_underrun_misses_the_aim_at_128_streams():
    row, _ = level(128, 0.02, 0.4)
    assert AIMS[128].missed(row) == []
    assert AIMS[128].missed(row | {"num_underruns": 1}) == ["num_underruns"]


def test_rows_that_last_unlike_the_others_are_told(folder):
    run = json.loads((folder / "slow.json").read_text())
    run["levels"][0]["mean_audio_s"] /= 2
    (folder / "slow.json").write_text(json.dumps(run))
    assert "- slow, 1: 3.60 s of audio a request, 7.20 s in other rows" in report(read_runs(folder))


def test_word_error_rates_and_storms_are_noted(folder):
    (folder / "fast_wer.json").write_text(json.dumps({"1": {"wer_percent": 1.234}}))
    run = json.loads((folder / "slow.json").read_text())
    row, _ = level(4, 0.1, 0.4, name="4 leavers", scenario="storm", num_left=9, recovered_s=0.5)
    run["levels"].append(row)
    (folder / "slow.json").write_text(json.dumps(run))
    text = report(read_runs(folder))
    assert "- fast, 1: WER 1.23 %" in text
    assert "- slow, 4 leavers: 9 left, the server was whole again 0.50 s after it" in text


def test_a_start_is_told_with_the_part_that_is_not_ours():
    assert start_line({"ready_s": 31.26, "ray_s": 8.04}).startswith(
        "From start to ready: 31.3 s, of them 8.0 s for Ray"
    )
    assert start_line({"levels": []}) == ""
