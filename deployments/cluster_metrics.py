"""The whole cluster's metrics as one page, for a Prometheus that sees nothing but the ingress.

    GET /metrics ──> any ingress replica ──> the metrics agent of every Ray node ──> one page

Each node's agent has the metrics of all replicas on it. A replica's own would be of little use here: the
next scrape may reach another one. Ray's own export, one page a node and everything on it, stays what it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import httpx
import ray

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PASSED_ON = ("ray_qwen3tts_", "ray_serve_", "ray_node_")
"""Ours, Serve's, and the machines'; a node's agent has five times as much, of Ray's insides."""
NODE_UP = "qwen3tts_metrics_node_up"
_TIMEOUT_S = 5.0
_FRESH_FOR_S = 1.0


class NoMetrics(Exception):
    """Not one node's agent answered."""


def node_agents() -> list[str]:
    """host:port of each live node's metrics agent. Raises NoMetrics outside a Ray cluster. Blocks."""
    if not ray.is_initialized():
        raise NoMetrics("this process is in no Ray cluster")
    return [
        f"[{host}]:{port}" if ":" in (host := node["NodeManagerAddress"]) else f"{host}:{port}"
        for node in ray.nodes()
        if node["Alive"] and (port := node["MetricsExportPort"]) > 0
    ]


async def read_agent(address: str) -> str:
    """One node's page. Raises httpx.HTTPError."""
    async with httpx.AsyncClient(trust_env=False) as client:
        response = await client.get(f"http://{address}/metrics")
        response.raise_for_status()
        return response.text


class ClusterMetrics:
    """One per ingress replica. However many ask, the nodes are asked once a second."""

    def __init__(
        self,
        find: Callable[[], Sequence[str]] = node_agents,
        read: Callable[[str], Awaitable[str]] = read_agent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find, self._read, self._clock = find, read, clock
        self._asking = asyncio.Lock()
        self._page, self._read_at = "", -_FRESH_FOR_S

    async def page(self) -> str:
        """In Prometheus' text format, with the nodes that didn't answer told. Raises NoMetrics if none did."""
        async with self._asking:
            if self._clock() - self._read_at >= _FRESH_FOR_S:
                self._page = await self._ask_all()
                self._read_at = self._clock()
            return self._page

    async def _ask_all(self) -> str:
        agents = await asyncio.to_thread(self._find)
        pages = dict(zip(agents, await asyncio.gather(*map(self._ask, agents)), strict=True))
        if not any(pages.values()):
            raise NoMetrics(f"not one of {len(agents)} metrics agents answered")
        return await asyncio.to_thread(join_pages, pages)

    async def _ask(self, agent: str) -> str | None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._read(agent)
        except (httpx.HTTPError, TimeoutError):
            return None  # told on the page


def join_pages(pages: Mapping[str, str | None], passed_on: tuple[str, ...] = PASSED_ON) -> str:
    """One page of all: a metric's lines must stand together. None: that node didn't answer."""
    families: dict[str, list[str]] = {}
    for page in pages.values():
        for name, lines in _families((page or "").splitlines()):
            if name.startswith(passed_on):
                known = families.setdefault(name, [])
                known += [line for line in lines if not (known and line.startswith("#"))]
    told = [f"# HELP {NODE_UP} 1 where the metrics of the node are on this page.", f"# TYPE {NODE_UP} gauge"]
    told += [f'{NODE_UP}{{node="{agent}"}} {int(page is not None)}' for agent, page in pages.items()]
    return "\n".join([*told, *(line for lines in families.values() for line in lines), ""])


def _families(lines: Iterable[str]) -> Iterable[tuple[str, list[str]]]:
    """(name, its HELP, TYPE and samples), as the page has them one after the other."""
    name, own = "", list[str]()
    for line in lines:
        if line.startswith("# HELP "):
            if own:
                yield name, own
            name, own = line.split(" ", 3)[2], []
        if line:
            own.append(line)
    if own:
        yield name, own
