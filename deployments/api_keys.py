"""Who may use this server, where that is asked: API keys, known here by their SHA-256 alone.

    Authorization: Bearer KEY      or      X-API-Key: KEY

A key is compared by its hash and in constant time, with every hash there is; it is kept nowhere and
never logged. `/health` stays open, for whoever watches over the server, and so does the page at `/`, which
holds nothing of the server's and asks its user for a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.edge import request_id_of
from deployments.page_files import is_page_path

logger = logging.getLogger(__name__)

_LONGEST_KEY = 512


def read_key_hashes(file: Path | None, variable: str | None, variable_name: str) -> tuple[bytes, ...]:
    """Hashes of the keys in a file (one a line; `#` begins a comment) and in a variable (comma-separated).

    Both absent: none, and no key is asked for. Raises ValueError where one is there and holds no
    key, or holds what no header can carry; a server that was meant to be closed doesn't start open.
    """
    hashes: list[bytes] = []
    if file is not None:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        hashes += _hash_all(str(file), [line for line in lines if line and not line.startswith("#")])
    if variable is not None:
        keys = [key.strip() for key in variable.split(",")]
        hashes += _hash_all(variable_name, [key for key in keys if key])
    return tuple(dict.fromkeys(hashes))


class ApiKeys:
    """ASGI middleware: requests and WebSockets without a known key end here, with HTTPException 401."""

    def __init__(self, app: ASGIApp, hashes: Iterable[bytes]) -> None:
        self._app = app
        self._hashes = tuple(hashes)
        assert self._hashes, "without keys this layer is left out"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not _is_open(_route_path(scope)):
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        presented = _presented(Headers(scope=scope))
        if any(self._knows(key) for key in presented):
            return
        logger.info("request %s: refused, %s API key", request_id_of(scope), "unknown" if presented else "no")
        raise HTTPException(
            401,
            "send a valid API key, as Authorization: Bearer … or X-API-Key: …",
            {"WWW-Authenticate": 'Bearer realm="qwen3tts-serve"'},
        )

    def _knows(self, key: str) -> bool:
        """Compares with every hash, so that the time tells nothing of which one it was."""
        presented = _hash(key)
        return sum(hmac.compare_digest(presented, known) for known in self._hashes) > 0


def _presented(headers: Headers) -> list[str]:
    """Either header may hold the key; clients that fill in one of them with nonsense may use the other."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    keys = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "").strip()]
    return [key for key in keys if key]


def _is_open(path: str) -> bool:
    return path == "/health" or is_page_path(path)


def _route_path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _hash_all(where: str, keys: Sequence[str]) -> list[bytes]:
    if not keys:
        raise ValueError(f"{where} holds no API key; leave it out to serve without keys")
    for number, key in enumerate(keys, start=1):
        if len(key) >= _LONGEST_KEY or not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError(
                f"{where}: key {number} must be printable ASCII without spaces, under {_LONGEST_KEY} characters"
            )
    return [_hash(key) for key in keys]


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
