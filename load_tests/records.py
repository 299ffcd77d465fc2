"""What one request came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from load_tests.playback import Arrival, seconds_of, underrun_s

Outcome = Literal["ok", "refused", "failed", "left"]
"""refused: 503. left: this client went away, on purpose."""


@dataclass(slots=True)
class SpeechRecord:
    """What one request came to. Times are seconds since `sent_at`, which is this machine's monotonic clock.

    max_frames: the limit asked for. num_frames: as the server told it; a raw stream tells none.
    retry_after: the header of a refusal. arrivals: one for each read that held audio. server_s: by stage, when
    the server itself says it got there (W3C Server Timing), counted from when it accepted the request.
    """

    number: int
    sent_at: float
    max_frames: int | None = None
    outcome: Outcome = "failed"
    status: int | None = None
    error: str | None = None
    retry_after: str | None = None
    total_s: float = 0.0
    audible_s: float | None = None
    num_frames: int | None = None
    arrivals: list[Arrival] = field(default_factory=list)
    server_s: dict[str, float] = field(default_factory=dict)
    tag: str = ""

    @property
    def ttfa_s(self) -> float | None:
        return self.arrivals[0][0] if self.arrivals else None

    @property
    def num_bytes(self) -> int:
        return self.arrivals[-1][1] if self.arrivals else 0

    @property
    def audio_s(self) -> float:
        return seconds_of(self.num_bytes)

    @property
    def rtf(self) -> float | None:
        return self.total_s / self.audio_s if self.num_bytes else None

    @property
    def underrun_s(self) -> float:
        return underrun_s(self.arrivals)

    @property
    def ended_at(self) -> float:
        return self.sent_at + self.total_s

    def as_json(self, began: float) -> dict[str, Any]:
        """For a file. began: when its pass did, on the clock of `sent_at`."""
        return {
            "number": self.number,
            "tag": self.tag,
            "sent_s": round(self.sent_at - began, 6),
            "outcome": self.outcome,
            "status": self.status,
            "error": self.error,
            "retry_after": self.retry_after,
            "max_frames": self.max_frames,
            "num_frames": self.num_frames,
            "ttfa_s": self.ttfa_s,
            "audible_s": self.audible_s,
            "server_s": self.server_s,
            "total_s": self.total_s,
            "audio_s": self.audio_s,
            "underrun_s": self.underrun_s,
            "arrivals": [(round(at_s, 6), num_bytes) for at_s, num_bytes in self.arrivals],
        }
