"""The page at `/` for people: the plain files of `page/`, sent as they are.

Its addresses are relative, so that it works under any route prefix. It holds nothing of this server's, so it
needs no API key; what it asks the API for does.
"""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PAGE_PATHS = ("/", "/page/")
"""The page itself, and the folder of what it loads."""

_FOLDER = Path(__file__).parent / "page"
_ALLOWED = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",  # no text, of a voice's name say, ever becomes markup
    "trusted-types": "'none'",
}
_HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for again by its ETag: a new release shows at once
    "Content-Security-Policy": "; ".join(f"{what} {whence}" for what, whence in _ALLOWED.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFiles:
    """Content types, ETags, and refusal of what lies outside the folder are starlette's."""

    def __init__(self) -> None:
        self._files = StaticFiles(directory=_FOLDER)

    async def answer(self, name: str, scope: Scope) -> Response:
        """The file, or 304 for a client that has it. Raises HTTPException 404."""
        response = await self._files.get_response(name, scope)
        response.headers.update(_HEADERS)
        return response


def is_page_path(path: str) -> bool:
    """path: without the route prefix."""
    index, folder = PAGE_PATHS
    return path == index or path.startswith(folder)
