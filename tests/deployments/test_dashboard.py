"""The Grafana dashboard against what there is to show; tests/e2e/test_metrics.py asks a real scrape."""

import re

import pytest

from deployments.exported import METRICS
from tests.dashboard import DASHBOARD, OURS, expressions, metric_names

SERIES = {
    metric.exported + suffix: metric
    for metric in METRICS
    for suffix in (("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",))
}


def test_every_metric_of_ours_has_its_place():
    shown = {SERIES[name].name for name in metric_names() if name.startswith(OURS)}
    assert shown == {metric.name for metric in METRICS}


@pytest.mark.parametrize("expression", [text for text in expressions() if "label_values" not in text])
def test_labels_that_are_asked_for_exist(expression):
    """`by (…)` and matchers of our own metrics; what Serve and Ray add, the scrape shows."""
    added = {"application", "deployment", "replica", "le", "job"}
    for name, metric in SERIES.items():
        if re.search(rf"\b{name}\b", expression):
            matched = re.search(rf"\b{name}\{{([^}}]*)\}}", expression)[1]
            grouped = re.findall(r"by \(([^)]*)\)", expression)
            labels = set(re.findall(r"(\w+)(?:!?=)", matched))
            labels |= {label.strip() for group in grouped for label in group.split(",")}
            assert labels <= added | set(metric.labels), name


def test_counters_are_shown_as_rates_and_histograms_by_their_buckets():
    for expression in expressions():
        for name in re.findall(rf"\b{OURS}\w+", expression):
            kind = SERIES[name].kind
            is_rate = f"rate({name}{{" in expression
            assert is_rate == (kind != "gauge"), name
            assert name.endswith("_bucket") == (kind == "histogram"), name


def test_panels_have_titles_of_their_own_and_do_not_overlap():
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Users", "Engine (Talker)", "Codec and voices", "Ray"]
    cells = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        cells |= own
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["title"] and panel["targets"] for panel in panels)
