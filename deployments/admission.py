"""What an ingress knows of full engines, so that under overload a refusal costs no trip to them.

    three refusals in a row ──> full: let in one request for each stream of this ingress that ends,
                                      and one each second, for places that came free otherwise
              no refusal for 2 s ──> open: let in whoever comes

Engines decide who is let in; this only keeps from them what they would surely refuse. Without it every refused
request takes turns with running streams in each process on its way, where overload is felt most.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ray.serve.exceptions import BackPressureError

from qwen3tts_core.errors import Overloaded

FULL_AFTER = 3
"""Refusals with no first audio between: one replica of several may be full while Serve finds room in the others."""
PROBE_EACH_S = 1.0
"""As `Retry-After` tells clients: through another ingress, or in a new replica, places may have come free."""
FULL_FOR_S = 2.0
"""How long engines count as full after a refusal: until a probe has not been refused for a while."""


class Admission:
    """Of one model's engines, as one ingress replica sees them; on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refusal: Overloaded | None = None
        self._full_until = self._next_probe = 0.0
        self._num_freed = self._num_refused = 0

    def check(self) -> None:
        """Raises Overloaded, in the words of the engines, where `enter` would do so now."""
        if (refusal := self._refusal) is None:
            return
        now = self._clock()
        if now >= self._full_until:
            self._refusal, self._num_refused = None, 0
        elif not self._num_freed and now < self._next_probe:
            raise Overloaded(refusal.what, refusal.retry_after_s)

    def enter(self) -> None:
        """Before the engines are asked. Raises Overloaded when there can be no place for this one."""
        self.check()
        if self._refusal is None:
            return
        if self._num_freed:
            self._num_freed -= 1
        else:
            self._next_probe = self._clock() + PROBE_EACH_S

    def refused(self, by: Overloaded | BackPressureError) -> None:
        """The engines have no place: by themselves, or by Serve, whose queue for them is full."""
        now = self._clock()
        self._num_refused += 1
        if self._refusal is None:
            if self._num_refused < FULL_AFTER:
                return
            self._num_freed, self._next_probe = 0, now + PROBE_EACH_S
        self._refusal = by if isinstance(by, Overloaded) else Overloaded("every replica's queue is full")
        self._full_until = now + FULL_FOR_S

    def served(self) -> None:
        """A request got its first audio."""
        self._num_refused = 0

    def freed(self) -> None:
        """A stream of this ingress has ended, or was given up."""
        self._num_freed += 1
