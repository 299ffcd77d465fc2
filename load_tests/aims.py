"""The numbers that a measurement stands beside: the best of the published engines, and our aims.

Published: M*'s benchmark of vllm-omni 0.28.0, sglang-omni 0.1.5 and itself, one H100, 1.7B CustomVoice, 200
English sentences of about 7 s, medians of three repeats. Aims: one H200, over HTTP, through Ray Serve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Aim:
    """One row. Limits are seconds, audio-s/s at least."""

    published: str
    published_audio_per_s: float | None = None
    ttfa_p50_s: float | None = None
    ttfa_p95_s: float | None = None
    rtf: float | None = None
    audio_per_s: float | None = None
    no_underrun: bool = False

    @property
    def text(self) -> str:
        parts = []
        if self.ttfa_p50_s is not None:
            tail = "" if self.ttfa_p95_s is None else f" / {self.ttfa_p95_s * 1000:.0f}"
            parts.append(f"TTFA p50{' / p95' if tail else ''} ≤ {self.ttfa_p50_s * 1000:.0f}{tail} ms")
        if self.rtf is not None:
            parts.append(f"RTF ≤ {self.rtf}")
        if self.audio_per_s is not None:
            parts.append(f"≥ {self.audio_per_s:.0f} audio-s/s")
        if self.no_underrun:
            parts.append("no underrun")
        return "; ".join(parts)

    def missed(self, level: dict[str, Any]) -> list[str]:
        """What the level does not reach, by name."""
        limits = {"ttfa_s_p50": self.ttfa_p50_s, "ttfa_s_p95": self.ttfa_p95_s, "rtf_mean": self.rtf}
        missed = [
            name
            for name, limit in limits.items()
            if limit is not None and (level[name] is None or level[name] > limit)
        ]
        if self.audio_per_s is not None and level["audio_per_s"] < self.audio_per_s:
            missed.append("audio_per_s")
        if self.no_underrun and level["num_underruns"]:
            missed.append("num_underruns")
        if level["num_failed"] or level["num_refused"] or level["missing"]:
            missed.append("completeness")
        return missed


AIMS = {
    1: Aim("TTFA p50 22, p95 24 ms; RTF 0.085", 12.0, ttfa_p50_s=0.015, rtf=0.035),
    8: Aim("TTFA 40 / 53 ms; 63 audio-s/s", 63.2, ttfa_p50_s=0.020, ttfa_p95_s=0.030, audio_per_s=190),
    32: Aim(
        "TTFA p50 56, best p95 149 ms; 128 audio-s/s",
        127.9,
        ttfa_p50_s=0.035,
        ttfa_p95_s=0.070,
        audio_per_s=450,
    ),
    128: Aim("not published", audio_per_s=800, no_underrun=True),
}
"""By concurrent streams of a closed loop."""

READY_AIM_S = 30.0
"""From Ray's own start to ready, graphs captured, weights on disk; published: 180 s."""
