"""Which request runs where, and what the next prefill holds. Pure bookkeeping, no tensors.

    waiting ──admit──> prefilling ──whole prompt cached──> running ──finish or cancel──> gone

Admission is first come, first served: a request that doesn't fit waits at the head, and nobody
overtakes it but who is listened to already: streams that another engine began, and later pieces of a
text. A slot or a page is handed on only by `release`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from qwen3tts_core.config import TalkerEngineConfig
from qwen3tts_core.engine.pages import PagePool
from qwen3tts_core.errors import InvalidCodes, InvalidRequest, Overloaded, TextTooLong
from qwen3tts_core.types import SpeechRequest


@dataclass(slots=True)
class Placed:
    """An admitted request.

    num_rows: the prompt's, and those that follow from frames made elsewhere. num_cached: how many of
    them are in its pages.
    """

    request: SpeechRequest
    slot: int
    pages: list[int]
    num_rows: int
    num_cached: int = 0

    @property
    def num_prefill(self) -> int:
        """All rows but the last, which is the first decode step's input."""
        return self.num_rows - 1

    @property
    def can_decode(self) -> bool:
        return self.num_cached >= self.num_prefill


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """`num_rows` prompt rows of one request, the first of them row `first`."""

    placed: Placed
    first: int
    num_rows: int


class Scheduler:
    def __init__(self, config: TalkerEngineConfig) -> None:
        self.config = config
        self.pages = PagePool(config.num_pages)
        self._free_slots = list(reversed(range(config.num_slots)))
        self._waiting: deque[SpeechRequest] = deque()
        self._placed: dict[str, Placed] = {}
        self._prefilling: dict[str, Placed] = {}
        self._running: tuple[Placed, ...] | None = ()

    # ------------------------------------------------------------ looking
    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_placed(self) -> int:
        return len(self._placed)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._placed)

    def placed(self, request_id: str) -> Placed | None:
        return self._placed.get(request_id)

    def request_ids(self) -> list[str]:
        return [*self._placed, *(request.request_id for request in self._waiting)]

    def running(self) -> tuple[Placed, ...]:
        """Requests that a decode step advances, in the order they were admitted.

        The same object until the membership changes.
        """
        if self._running is None:
            self._running = tuple(placed for placed in self._placed.values() if placed.can_decode)
        return self._running

    # ------------------------------------------------------------ changing
    def check(self, request: SpeechRequest) -> None:
        """Raises TextTooLong or InvalidRequest for a request that could never run here."""
        prompt, limit = request.plan.num_rows, self.config.max_positions
        if prompt >= limit or len(request.plan.trailing_ids) >= limit:
            raise TextTooLong(max(prompt, len(request.plan.trailing_ids)), limit - 1)
        positions = self._num_positions(request)
        if positions > limit:
            raise InvalidRequest(
                f"max_new_tokens is {request.max_frames:,}; after a prompt of {prompt:,} positions "
                f"the limit is {limit - prompt + 1:,}",
                "max_new_tokens",
            )
        if request.resume is not None and request.resume.num_frames >= request.max_frames:
            raise InvalidCodes(
                f"{request.resume.num_frames} frames to resume after; the request ends at {request.max_frames}"
            )
        if self.config.pages_for(positions) > self.pages.num_pages:
            raise InvalidRequest(
                f"prompt and max_new_tokens need {self.config.pages_for(positions):,} KV pages, "
                f"this server has {self.pages.num_pages:,}",
                "max_new_tokens",
            )

    def enqueue(self, request: SpeechRequest) -> None:
        """Raises Overloaded when every slot is taken and the queue is full."""
        if len(self._waiting) - len(self._free_slots) >= self.config.max_queued:
            raise Overloaded(f"{self.config.num_slots} streams are running and {len(self._waiting)} wait")
        if _is_heard(request):
            self._waiting.insert(sum(map(_is_heard, self._waiting)), request)
        else:
            self._waiting.append(request)

    def admit(self) -> list[Placed]:
        """Move as many waiting requests into slots as fit, in order."""
        admitted = []
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            pages = self.pages.take(request.request_id, self.config.pages_for(self._num_positions(request)))
            if pages is None:
                break
            self._waiting.popleft()
            placed = Placed(request, self._free_slots.pop(), pages, self._num_rows(request))
            self._placed[request.request_id] = self._prefilling[request.request_id] = placed
            admitted.append(placed)
        return admitted

    def next_prefill(self) -> list[PrefillPiece]:
        """Prompt rows to cache now, oldest request first, within the token budget.

        Deterministic mode prefills one request at a time: packing changes the rounding.
        """
        budget = self.config.prefill_buckets[-1]
        pieces: list[PrefillPiece] = []
        for request_id, placed in list(self._prefilling.items()):
            rows = min(placed.num_prefill - placed.num_cached, budget)
            if rows > 0:
                pieces.append(PrefillPiece(placed, placed.num_cached, rows))
                placed.num_cached += rows
                budget -= rows
            if placed.can_decode:
                del self._prefilling[request_id]
                self._running = None
            if budget == 0 or (pieces and self.config.deterministic):
                break
        return pieces

    def release(self, request_id: str) -> bool:
        """Give slot and pages back, or leave the queue. False for an id that isn't here."""
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            self._prefilling.pop(request_id, None)
            self._running = None
            self._free_slots.append(placed.slot)
            self.pages.give_back(request_id)
            return True
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                return True
        return False

    def _num_rows(self, request: SpeechRequest) -> int:
        """Rows to prefill and the one to begin with. Deterministic mode steps through old frames instead."""
        if request.resume is None or self.config.deterministic:
            return request.plan.num_rows
        return request.plan.num_rows + request.resume.num_frames

    def _num_positions(self, request: SpeechRequest) -> int:
        """Prompt, then one input per frame but the last, whose input nobody needs."""
        return request.plan.num_rows + request.max_frames - 1


def _is_heard(request: SpeechRequest) -> bool:
    """Somebody listens to what came before it."""
    return request.resume is not None or request.piece > 0
