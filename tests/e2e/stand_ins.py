"""The deployments of a real app, in its order and with its names, without its models: they start at once, and
say which GPU they were given."""

import ray
from ray import serve
from starlette.responses import JSONResponse

from deployments.app import AppArgs, build_app


class StandIn:
    async def gpus(self):
        return ray.get_gpu_ids()


class Front:
    """`GET /health` is 200 when all are there; `GET /` says which GPUs the replicas of each have."""

    def __init__(self, handles):
        self._handles = handles

    async def __call__(self, request):
        if request.url.path.endswith("health"):
            return JSONResponse({})
        return JSONResponse(
            {name: await handle.broadcast("gpus").results_async() for name, handle in self._handles.items()}
        )


def build(args: dict):
    """args: those of the real app."""
    from ray.serve._private.build_app import build_app as build_graph

    graph = build_graph(build_app(AppArgs.model_validate(args)), name="real")
    names = [deployment.name for deployment in graph.deployments if deployment.name != "Ingress"]
    handles = {name: serve.deployment(StandIn).options(name=name).bind() for name in names}
    return serve.deployment(Front).options(name="Ingress").bind(handles)
