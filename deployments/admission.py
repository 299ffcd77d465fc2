"""What an ingress knows of full engines, so that under overload a refusal costs no trip to them.

    refused ── 0.1 s of refusals on the spot ── next request asks again
       └── a stream of this ingress ends: next request asks at once

Engines decide who is let in. A refusal of theirs is remembered for a moment, in which no place can have come free
through this ingress. A place that came free through another is found when that moment is over. Without this every
refused request takes turns with running streams in each process on its way, where overload is felt most.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ray.serve.exceptions import BackPressureError

from qwen3tts_core.errors import Overloaded

MEMORY_S = 0.1
"""How long a refusal is believed: next to the `Retry-After` of a second, nobody waits longer for it."""


class Admission:
    """Of one model's engines, as one ingress replica sees them; on one event loop."""

    def __init__(self, memory_s: float = MEMORY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory_s, self._clock = memory_s, clock
        self._refusal: Overloaded | None = None
        self._believed_until = 0.0

    def check(self) -> None:
        """Raises Overloaded, in the words of the engines, where they would surely say so."""
        if self._refusal is not None and self._clock() < self._believed_until:
            raise Overloaded(self._refusal.what, self._refusal.retry_after_s)

    def refused(self, by: Overloaded | BackPressureError) -> None:
        """The engines have no place: by themselves, or by Serve, whose queue for them is full."""
        self._refusal = by if isinstance(by, Overloaded) else Overloaded(f"Ray Serve's queue is full: {by}")
        self._believed_until = self._clock() + self._memory_s

    def freed(self) -> None:
        """A stream of this ingress has ended, or was given up."""
        self._refusal = None
