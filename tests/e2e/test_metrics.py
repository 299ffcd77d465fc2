"""`GET /metrics` of a real cluster: what was asked for is counted there, and the dashboard asks for nothing else."""

import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

from deployments.cluster_metrics import NODE_UP
from deployments.exported import METRICS
from tests.dashboard import metric_names

SPEECH = "v1/audio/speech"
ARRIVE_WITHIN_S = 240
"""A replica's count is with the node's agent a second or two later; this machine may be busy."""
SETTLED_AFTER = 12
"""Scrapes, half a second apart, in which no count has moved."""
ADDED = {
    "application",
    "deployment",
    "replica",
    "Component",
    "NodeAddress",
    "SessionName",
    "Version",
    "WorkerId",
    "le",
}
ADDED |= {"otel_scope_name", "otel_scope_schema_url", "otel_scope_version"}


class Scrape:
    """One page; families by the names that their samples have."""

    def __init__(self, app, response):
        assert response.status_code == 200, response.text[:300]
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        self.text, self._app = response.text, app.name
        self.samples = [s for family in text_string_to_metric_families(response.text) for s in family.samples]
        self.names = {sample.name for sample in self.samples}

    def total(self, name, **labels):
        """Of this application's replicas."""
        wanted = {"application": self._app, **labels}
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == f"ray_qwen3tts_{name}" and wanted.items() <= sample.labels.items()
        )


def scrape_when(app, predicate):
    deadline = time.monotonic() + ARRIVE_WITHIN_S
    while True:
        response = app.client.get("metrics")
        if response.status_code != 503:  # of a node's agent that is slow
            scrape = Scrape(app, response)
            if predicate(scrape):
                return scrape
        assert time.monotonic() < deadline, response.text[-2000:]
        time.sleep(0.5)


def settled():
    """Of scrapes one after the other: whether nothing is spoken, and what earlier requests did is all in them."""
    counts = [
        f"{name}_total" for name in ("audio_frames", "talker_frames", "codec_frames", "streams", "requests")
    ]
    seen = []

    def is_settled(scrape):
        seen.append([scrape.total(name) for name in counts])
        is_quiet = scrape.total("slots_used") == scrape.total("codec_rows_used") == 0
        return is_quiet and len(seen) > SETTLED_AFTER and seen[-1] == seen[-1 - SETTLED_AFTER]

    return is_settled


@pytest.fixture(scope="module")
def before(app):
    """When the replicas' counts are there, and what earlier tests did is all in them."""
    scrape_when(app, lambda scrape: scrape.total("slots") and scrape.total("codec_rows"))
    return scrape_when(app, settled())


@pytest.fixture(scope="module")
def spoken(app, before):
    """One stream of several chunks, one whole body, one refusal; frames sent by both."""
    body = {"input": "Not a word of this in any label.", "seed": 5, "max_new_tokens": 9}
    whole = app.client.post(SPEECH, json=body)
    stream = app.client.post(SPEECH, json={**body, "stream": True, "response_format": "pcm"})
    bad = app.client.post(SPEECH, json={**body, "voice": "a-secret-voice"})
    assert (whole.status_code, stream.status_code, bad.status_code) == (200, 200, 400)
    return int(whole.headers["x-num-frames"]) + len(stream.content) // 3840


@pytest.fixture(scope="module")
def after(app, before, spoken):
    names = [f"{name}_frames_total" for name in ("audio", "talker", "codec")]

    def has_arrived(scrape):
        """What each replica counted last, too: the end of the stream, and the refusal."""
        is_counted = all(added(scrape, before, name) >= spoken for name in names)
        return is_counted and added(scrape, before, "requests_total") >= 3

    scrape_when(app, has_arrived)
    return scrape_when(app, settled())


def added(after, before, name, **labels):
    return after.total(name, **labels) - before.total(name, **labels)


def test_what_was_sent_is_counted_by_every_stage(before, spoken, after):
    assert added(after, before, "audio_frames_total") == spoken
    assert added(after, before, "audio_seconds_total") == pytest.approx(0.08 * spoken)
    assert added(after, before, "talker_frames_total") >= spoken
    assert added(after, before, "codec_frames_total") == spoken
    assert added(after, before, "streams_total") == 1
    assert added(after, before, "ttfa_seconds_count", streamed="true") == 1
    assert added(after, before, "ttfa_seconds_count", streamed="false") == 1
    assert added(after, before, "rtf_count") == 2
    assert added(after, before, "chunk_gap_seconds_count") == 2  # chunks of 1, 3 and 5 frames
    assert added(after, before, "requests_total", outcome="ok") == 2
    assert added(after, before, "requests_total", outcome="rejected", reason="unknown_voice") == 1
    assert added(after, before, "prefill_tokens_total") > 0


def test_a_step_is_counted_once_whatever_way_one_looks_at_it(before, after):
    steps = added(after, before, "decode_steps_total")
    assert steps == added(after, before, "decode_rows_total") >= 9  # one stream at a time
    assert added(after, before, "talker_step_seconds_count") == steps
    batches = added(after, before, "codec_batches_total")
    assert (
        batches
        == added(after, before, "codec_batch_rows_count")
        == added(after, before, "codec_step_seconds_count")
    )
    assert added(after, before, "eager_steps_total", deployment="Talker") > steps  # prefills, too
    assert added(after, before, "eager_steps_total", deployment="Codec") == batches
    assert after.total("graph_replays_total") == 0  # on CPU nothing is captured


def test_a_quiet_server_holds_nothing(after):
    assert (after.total("slots"), after.total("slots_used"), after.total("pages_used")) == (8, 0, 0)
    assert (after.total("queue_length"), after.total("codec_rows_used")) == (0, 0)
    assert after.total("pages") > 0


def test_every_metric_is_exported(after):
    for metric in METRICS:
        suffixes = ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
        assert {metric.exported + suffix for suffix in suffixes} <= after.names


def test_the_dashboard_names_only_metrics_that_exist(app, after):
    on_gpus_only = {f"ray_{name}" for name in METRICS_GAUGES if "gpu" in name or "gram" in name}
    absent = metric_names() - after.names
    if not absent <= on_gpus_only:  # Ray's daemons tell of themselves every few seconds
        absent = metric_names() - scrape_when(app, lambda it: metric_names() - it.names <= on_gpus_only).names
    assert len(absent) <= 2


def test_labels_are_the_servers_own_words(after):
    known = {
        name: set(metric.labels)
        for metric in METRICS
        for name in after.names
        if name.startswith(metric.exported)
    }
    ours = [sample for sample in after.samples if sample.name.startswith("ray_qwen3tts_")]
    assert ours
    for sample in ours:
        assert set(sample.labels) <= ADDED | known[sample.name]
        assert not {"Not a word", "a-secret-voice"} & set(sample.labels.values())
    assert "secret" not in after.text


def test_the_page_tells_which_nodes_are_on_it(after):
    up = [sample for sample in after.samples if sample.name == NODE_UP]
    assert [sample.value for sample in up] == [1]
