"""The outermost layer of the HTTP app: every error gets one face, of a WebSocket's handshake too.

Errors of routes end here. Before the response has begun they become a status and an error object;
afterwards they go on up, so that the server breaks the connection: a body that failed must never
look complete.
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from deployments.handles import root_cause
from deployments.http_errors import describe

logger = logging.getLogger(__name__)

_LONGEST_ID = 128


def request_id_of(scope: Scope) -> str:
    """What the log calls this request: the client's id, or the one Serve gave it.

    Serve puts the id on requests that have none, and on every response.
    """
    return Headers(scope=scope).get("x-request-id", "")[:_LONGEST_ID]


class Edge:
    """ASGI middleware; what is neither HTTP nor a WebSocket passes untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._shake_hands(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def watch(message: Message) -> None:
            nonlocal has_started
            has_started = has_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception as error:
            request_id = request_id_of(scope)
            described = describe(error)
            if has_started:
                if described.status != 499:  # the client left: nobody's fault
                    logger.error("request %s: cut after its header: %r", request_id, root_cause(error))
                raise
            if described.is_ours:
                logger.exception("request %s: failed", request_id)
            await described.response()(scope, receive, watch)

    async def _shake_hands(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A refusal comes before the WebSocket is accepted, as the status that HTTP would have; later errors are
        the session's own."""
        try:
            await self._app(scope, receive, send)
        except HTTPException as error:
            if "websocket.http.response" in scope.get("extensions", {}):
                response = describe(error).response()
                await WebSocket(scope, receive, send).send_denial_response(response)
            else:  # this server can only say 403
                await send({"type": "websocket.close", "code": 1008, "reason": str(error.detail)[:120]})
