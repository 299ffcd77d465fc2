"""Health of the deployments' own threads and tasks; test_readiness.py has what the ingress hears of others."""

import asyncio
import json

import pytest

from qwen3tts_core.errors import EngineFault
from tests.fakes import until

pytestmark = pytest.mark.both_shapes


async def test_an_ingress_whose_watch_has_died_says_so_to_clients_and_to_serve(open_chain, monkeypatch):
    async with open_chain() as chain:
        await until(lambda: not chain.ingress._readiness.problems())
        chain.ingress.check_health()
        assert (await chain.call("GET", "/health").finish()).status == 200
        (watch,) = [task for task in chain.ingress._watching if task.get_name() == "readiness"]
        watch.cancel()
        await asyncio.wait([watch])
        call = await chain.call("GET", "/health").finish()
        assert call.status == 503
        assert "Ingress" in json.loads(call.body)["error"]["message"]
        with pytest.raises(EngineFault, match="readiness"):
            chain.ingress.check_health()


@pytest.mark.parametrize("name", ["talker", "codec"])
async def test_an_engine_whose_thread_is_dead_turns_its_deployment_and_the_ingress_unhealthy(
    open_chain, name
):
    async with open_chain() as chain:
        await until(lambda: not chain.ingress._readiness.problems())
        deployment, engine = getattr(chain, name), getattr(chain, f"{name}_engine")
        deployment.check_health()
        engine.stop()
        with pytest.raises(EngineFault):
            deployment.check_health()
        await until(lambda: name.title() in chain.ingress._readiness.problems())
        assert (await chain.call("GET", "/health").finish()).status == 503
        chain.ingress.check_health()  # its own tasks are well: Serve replaces the other
