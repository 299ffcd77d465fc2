"""KV pages: who owns which. Pure bookkeeping, no tensors.

A request's pages are taken whole before it starts and given back whole when it ends, so a running
stream never waits for one.
"""

from __future__ import annotations


class PagePool:
    """Pages 0 … num_pages - 1, each owned by at most one request.

    The cache holds one page more, `trash_page`, where padding rows write.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(reversed(range(num_pages)))
        self._owned: dict[str, list[int]] = {}

    @property
    def trash_page(self) -> int:
        return self.num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, owner: str, count: int) -> list[int] | None:
        """`count` pages for `owner`, or None when there aren't as many."""
        assert owner not in self._owned, f"{owner} already owns pages"
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._owned[owner] = pages
        return pages

    def give_back(self, owner: str) -> None:
        self._free.extend(reversed(self._owned.pop(owner)))
