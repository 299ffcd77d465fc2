"""The outermost layer of the HTTP app: every response has a request id, every error one face.

Errors of routes end here. Before the response has begun they become a status and an error object;
afterwards they go on up, so that the server breaks the connection: a body that failed must never
look complete.
"""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.handles import root_cause
from deployments.http_errors import describe

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(scope: Scope) -> str:
    """The id this request is known by: the client's own where it is sane, else one we made."""
    return str(scope["state"][REQUEST_ID_HEADER])


class Edge:
    """ASGI middleware; HTTP only, everything else passes untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})[REQUEST_ID_HEADER] = request_id
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if has_started:
                logger.error("request %s: cut after its header: %r", request_id, root_cause(error))
                raise
            described = describe(error)
            if described.is_ours:
                logger.exception("request %s: failed", request_id)
            await described.response()(scope, receive, send_with_id)
