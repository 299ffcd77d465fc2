import asyncio
import json

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.cluster_metrics import NODE_UP, ClusterMetrics, NoMetrics, join_pages, node_agents

PAGE = """\
# HELP ray_qwen3tts_slots streams that can run at once
# TYPE ray_qwen3tts_slots gauge
ray_qwen3tts_slots{replica="%(replica)s"} 8.0
# HELP ray_tasks of Ray's insides
# TYPE ray_tasks gauge
ray_tasks{replica="%(replica)s"} 3.0
# HELP ray_qwen3tts_rtf seconds from accepted to the end, per second of audio
# TYPE ray_qwen3tts_rtf histogram
ray_qwen3tts_rtf_bucket{le="0.5",replica="%(replica)s"} 1.0
ray_qwen3tts_rtf_bucket{le="+Inf",replica="%(replica)s"} 2.0
ray_qwen3tts_rtf_count{replica="%(replica)s"} 2.0
ray_qwen3tts_rtf_sum{replica="%(replica)s"} 1.5
"""


def page(replica):
    return PAGE % {"replica": replica}


def samples(text):
    """{(name, labels): value}, by Prometheus' own parser; no family twice, no series twice."""
    found, names = {}, []
    for family in text_string_to_metric_families(text):
        names.append(family.name)
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    assert len(set(names)) == len(names)
    return found


def test_pages_of_several_nodes_are_one_page_with_each_metric_together():
    joined = join_pages({"a:1": page("x"), "b:2": page("y"), "c:3": None})
    found = samples(joined)
    own = {key: value for text in (page("x"), page("y")) for key, value in samples(text).items()}
    expected = {key: value for key, value in own.items() if key[0] != "ray_tasks"}
    for agent, up in {"a:1": 1, "b:2": 1, "c:3": 0}.items():
        expected[NODE_UP, frozenset({("node", agent)})] = up
    assert found == expected
    assert joined.count("# TYPE ray_qwen3tts_slots ") == 1


class Agents:
    """Nodes by address; a page, or what reading it raises."""

    now = 100.0

    def __init__(self, **pages):
        self.pages, self.num_read = pages, 0

    def find(self):
        return list(self.pages)

    async def read(self, address):
        self.num_read += 1
        await asyncio.sleep(0.01)
        if isinstance(self.pages[address], Exception):
            raise self.pages[address]
        return self.pages[address]

    def metrics(self):
        return ClusterMetrics(self.find, self.read, lambda: self.now)


async def test_many_who_ask_at_once_share_one_reading_and_the_next_second_has_its_own():
    agents = Agents(a=page("x"))
    metrics = agents.metrics()
    pages = await asyncio.gather(*(metrics.page() for _ in range(20)))
    assert (len(set(pages)), agents.num_read) == (1, 1)
    agents.now += 1.0
    await metrics.page()
    assert agents.num_read == 2


async def test_a_node_that_does_not_answer_is_told_and_hides_no_other():
    agents = Agents(a=httpx.ConnectError("gone"), b=page("y"))
    found = samples(await agents.metrics().page())
    assert found[NODE_UP, frozenset({("node", "a")})] == 0
    assert found["ray_qwen3tts_slots", frozenset({("replica", "y")})] == 8


async def test_no_answer_at_all_is_no_page():
    agents = Agents(a=httpx.ConnectError("gone"))
    metrics = agents.metrics()
    with pytest.raises(NoMetrics):
        await metrics.page()
    agents.pages["a"] = page("x")
    assert "ray_qwen3tts_slots" in await metrics.page()


async def test_a_fault_of_ours_is_not_taken_for_a_silent_node():
    with pytest.raises(ZeroDivisionError):
        await Agents(a=ZeroDivisionError(), b=page("y")).metrics().page()


def test_outside_a_cluster_there_is_nothing_to_ask_and_none_is_started():
    with pytest.raises(NoMetrics):
        node_agents()


async def test_without_a_cluster_the_route_is_a_503_that_says_so(open_chain):
    async with open_chain() as chain:
        call = await chain.call("GET", "/metrics").finish()
    assert (call.status, call.headers["retry-after"]) == (503, "1")
    assert json.loads(call.body)["error"]["type"] == "server_error"
