import pytest
from hypothesis import given
from hypothesis import strategies as st

from load_tests.adapters import BYTES_PER_FRAME
from load_tests.measurement import (
    ClientCost,
    busy_rate,
    missing_audio,
    odd_durations,
    over_repeats,
    percentile,
    summarise,
)
from load_tests.records import SpeechRecord


def answer(number=0, sent_at=0.0, frames=25, ttfa_s=0.1, total_s=1.0, **fields):
    fields = {
        "outcome": "ok",
        "arrivals": [(ttfa_s, BYTES_PER_FRAME), (total_s, frames * BYTES_PER_FRAME)],
        **fields,
    }
    return SpeechRecord(number, sent_at, total_s=total_s, **fields)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_a_value_with_its_share_of_the_others_below(values, fraction):
    found = percentile(values, fraction)
    assert found in values
    index = fraction * (len(values) - 1)
    assert sum(value < found for value in values) <= index + 0.5
    assert sum(value <= found for value in values) >= index + 0.5 - 1e-9


def test_percentiles_of_a_hundred_and_one_values_are_their_ranks():
    values = list(range(100, -1, -1))
    assert [percentile(values, rank / 100) for rank in (0, 50, 95, 99, 100)] == [0, 50, 95, 99, 100]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_a_summary_counts_whole_answers_alone():
    records = [
        answer(0, frames=25),
        answer(1, frames=50, total_s=3.0, ttfa_s=0.3),
        answer(2, outcome="failed", error="cut"),
        SpeechRecord(3, 0.0, outcome="refused", total_s=0.02),
    ]
    summary = summarise(records, [ClientCost(0.5, 2.0, 0.001)], wall_s=3.0)
    assert (summary["num_ok"], summary["num_failed"], summary["num_refused"]) == (2, 1, 1)
    assert summary["audio_s"] == pytest.approx(6.0)
    assert summary["audio_per_s"] == pytest.approx(2.0)
    assert summary["rtf_mean"] == pytest.approx((1.0 / 2.0 + 3.0 / 4.0) / 2)
    assert summary["refused_s_p99"] == pytest.approx(0.02)
    assert summary["refused_without_retry_after"] == 1
    assert summary["client_busiest"] == pytest.approx(0.25)
    assert summary["errors"] == {"cut": 1}


def test_the_busy_rate_leaves_out_what_comes_after_the_last_request_was_sent():
    records = [
        SpeechRecord(0, 10.0, arrivals=[(1.0, 48_000), (5.0, 480_000)]),
        SpeechRecord(1, 12.0, arrivals=[(1.0, 48_000)]),
    ]
    assert busy_rate(records) == pytest.approx(0.5)
    assert busy_rate(records[:1]) is None


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (answer(frames=25, num_frames=26), "25 frames came of 26 told"),
        (answer(frames=25, max_frames=24), "limit 24"),
        (answer(arrivals=[(0.1, BYTES_PER_FRAME + 2)]), "no whole frames"),
        (answer(frames=25, max_frames=30), "25 of 30"),
    ],
)
def test_audio_that_is_missing_is_told(record, problem):
    (line,) = missing_audio([record], ends_by_limit=True)
    assert problem in line


def test_whole_answers_are_not_complained_of():
    whole = [answer(frames=25, num_frames=25, max_frames=25), answer(frames=9)]
    assert missing_audio(whole, ends_by_limit=True) == []
    assert missing_audio([answer(frames=25, max_frames=30)], ends_by_limit=False) == []


def test_over_repeats_values_are_medians_counts_are_sums_and_the_worst_stays():
    def repeat(ttfa, failed, worst):
        records = [answer(ttfa_s=ttfa, total_s=1.0 + ttfa)] + [answer(outcome="failed", error="x")] * failed
        return summarise(records, [], 1.0) | {"worst_underrun_s": worst}

    level = over_repeats([repeat(0.1, 0, 0.0), repeat(0.9, 2, 0.4), repeat(0.2, 0, 0.1)])
    assert level["ttfa_s_p50"] == 0.2
    assert level["num_failed"] == 2
    assert level["worst_underrun_s"] == 0.4
    assert level["errors"] == {"x": 2}
    assert level["refused_s_p50"] is None


def test_a_row_that_lasts_unlike_the_others_is_told():
    rows = [{"name": str(number), "mean_audio_s": mean} for number, mean in enumerate((6.9, 7.0, 6.2, 6.95))]
    (line,) = odd_durations(rows)
    assert line.startswith("2: 6.20 s")
    assert odd_durations(rows[:2]) == []
