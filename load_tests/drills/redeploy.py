"""A rolling redeploy under load: every replica is replaced, and no request fails."""

from __future__ import annotations

from typing import Any

from load_tests.drills.report import DrillResult, drilling
from load_tests.drills.server import App, DrillServer
from load_tests.drills.under_load import Listeners, speeches

_NUM_LISTENERS = 4
_NUM_FRAMES = 60
_DEPLOYMENTS = ("Ingress", "Codec", "Talker")


async def redeploy(server: DrillServer, app: App, changes: list[dict[str, Any]]) -> DrillResult:
    """changes: of the app's args, one redeployment after the other."""
    with drilling("redeploy") as result:
        listeners = Listeners(app, result, speeches(_NUM_FRAMES))
        before = _pids(app)
        async with listeners.listening(_NUM_LISTENERS):
            for change in changes:
                await server.redeploy(app, change)
        after = _pids(app)
        if stayed := sorted(name for name in _DEPLOYMENTS if before[name] & after[name]):
            result.problem(f"not replaced: {', '.join(stayed)}")
        result.leaks(await app.held_at_rest())
        result.notes = {
            "redeployments": len(changes),
            "refused and tried again": listeners.num_refused,
            "longest s": round(listeners.longest_s, 1),
        }
    return result


def _pids(app: App) -> dict[str, set[int]]:
    return {name: set(app.pids(name)) for name in _DEPLOYMENTS}
