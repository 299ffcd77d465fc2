"""Pages of other sites, open in the browser of somebody who can reach this server, may not use it.

A browser sends some requests for any page that asks, and lets only the answer be read by the page's
own site: forms, so voice uploads, and WebSockets, which it doesn't guard at all. It tells in
`Sec-Fetch-Site` (Fetch Metadata, W3C) where a request comes from, so these end here, unless the
operator has named the site; programs send no such header.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

_ONLY_READ = ("GET", "HEAD", "OPTIONS")
ANY = "*"


class OtherSites:
    """ASGI middleware. allowed: origins whose pages may, like https://app.example; `*` is all of them."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app, self._allowed = app, frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        changes = scope["type"] == "websocket" or (
            scope["type"] == "http" and scope["method"] not in _ONLY_READ
        )
        if changes and ANY not in self._allowed:
            self._check(Headers(scope=scope))
        await self._app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        origin = headers.get("origin", "")
        if headers.get("sec-fetch-site") == "cross-site" and origin not in self._allowed:
            raise HTTPException(
                403, f"pages of {origin or 'other sites'} may not use this server: allowed_origins"
            )
