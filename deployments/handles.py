"""The little that we use of Serve's handles: calls that stream items, calls that answer once.

Handles with their options and method are bound once, when a deployment starts: `handle.method`
alone costs 0.1 ms. Tests pass fakes of the same shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, Protocol

import grpc
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError

from qwen3tts_core.errors import EngineDown, StreamCancelled
from qwen3tts_core.types import SpeechRequest

Transport = Literal["object_ref", "value"]
"""How the items of a stream travel: each as a Ray object, or inside a gRPC stream between replicas."""


class ItemStream(Protocol):
    """One streaming call in flight. `cancel` may be called at any time, and twice."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def __anext__(self) -> Awaitable[bytes]: ...

    def cancel(self) -> None: ...


_DEATHS = (RayActorError, EngineDown, TaskCancelledError, StreamCancelled)
"""Of a replica, of the engine in it, or of the call: Serve cancels the calls of a replica that it must stop at last.
A call that we cancel ourselves is no longer listened to."""
_DEAD_PEERS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
"""How by-value streams end when the other side does; what is raised over there arrives as itself, not as these."""

StartStream = Callable[[SpeechRequest], ItemStream]
Ask = Callable[..., Awaitable[Any]]
Tell = Callable[..., Awaitable[None]]


def bind_stream(handle: Any, method: str, transport: Transport) -> StartStream:
    """A caller of the streaming `method` of another deployment."""
    bound = getattr(handle.options(stream=True, _by_reference=transport == "object_ref"), method)
    start: StartStream = bound.remote
    return start


def bind_ask(handle: Any, method: str, transport: Transport = "value") -> Ask:
    """A caller of a `method` that answers once; it may be cancelled while it waits."""
    remote = getattr(handle.options(_by_reference=transport == "object_ref"), method).remote

    async def ask(*arguments: Any) -> Any:
        response = remote(*arguments)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise

    return ask


def bind_tell(handle: Any, method: str) -> Tell:
    """A caller of a `method` of every replica that a deployment has at that moment; the dead ones are passed over."""

    async def tell(*arguments: Any) -> None:
        await handle.broadcast(method, *arguments).results_async(return_exceptions=True)

    return tell


def root_cause(error: BaseException) -> BaseException:
    """The error as it was raised in the other replica, without Ray's wrapping."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def is_death(error: BaseException) -> bool:
    """Whether a root cause says that a replica or its engine is gone, and nothing about the request."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() in _DEAD_PEERS
    return isinstance(error, _DEATHS)
