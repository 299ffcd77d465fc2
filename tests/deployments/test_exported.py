"""What we export, as Prometheus sees it, and that the README says the same."""

import re
from pathlib import Path

import pytest
from ray.serve import metrics as ray_metrics

from deployments.exported import METRICS, RaySink

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
BOUNDED = {"model", "outcome", "reason", "streamed", "bucket", "cache", "result"}
SERVES_OWN = {"application", "deployment", "replica", "route"}


def test_names_are_ours_and_their_own():
    names = [metric.exported for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"ray_qwen3tts_[a-z0-9_]+", metric.exported)
        assert metric.exported.endswith("_total") == (metric.kind == "counter")
        assert metric.help


def test_labels_are_few_and_leave_serves_own_alone():
    labels = {label for metric in METRICS for label in metric.labels}
    assert labels <= BOUNDED
    assert not labels & SERVES_OWN


@pytest.mark.parametrize("metric", [m for m in METRICS if m.kind == "histogram"], ids=lambda m: m.name)
def test_buckets_rise_from_above_zero(metric):
    assert metric.buckets[0] > 0
    assert list(metric.buckets) == sorted(set(metric.buckets))


def test_ray_takes_every_metric_and_a_zero():
    sink = RaySink()
    for metric in METRICS:
        labels = dict.fromkeys(metric.labels, "x")
        {"counter": sink.add, "gauge": sink.set, "histogram": sink.observe}[metric.kind](metric, 0, labels)
        kind = {
            "counter": ray_metrics.Counter,
            "gauge": ray_metrics.Gauge,
            "histogram": ray_metrics.Histogram,
        }
        assert isinstance(sink._made[metric.name], kind[metric.kind])
        if metric.labels:
            with pytest.raises(ValueError, match="tag key"):
                sink.add(metric, 1, {})


def test_the_readme_has_every_metric_as_it_is():
    section = re.search(r"^## See\n(.*?)(?=^## )", README, re.DOTALL | re.MULTILINE)[1]
    told = [
        (name, re.findall(r"`(\w+)`", labels), meaning)
        for name, labels, meaning in re.findall(
            r"^\| `(qwen3tts_\w+)`(.*?) \| (.*) \|$", section, re.MULTILINE
        )
    ]
    assert told == [
        (metric.exported.removeprefix("ray_"), list(metric.labels), metric.help) for metric in METRICS
    ]
