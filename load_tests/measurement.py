"""Records to numbers: percentiles, a pass's summary, medians over repeats, and whether anything is missing.

TTFA, RTF and audio-s/s are as in `README.md` "Load tests"; percentiles as mstar's `tts_speech_bench` takes them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from load_tests.adapters import BYTES_PER_FRAME
from load_tests.playback import UNDERRUN_S, seconds_of
from load_tests.records import SpeechRecord

PERCENTILES = (50, 95, 99)
DURATION_TOLERANCE = 0.05
"""By how much a row's mean duration may differ from the median row's before audio is thought to be missing."""


@dataclass(frozen=True, slots=True)
class ClientCost:
    """What one client process needed for its share of a pass. loop_late_p99_s: how late its timers were."""

    cpu_s: float
    wall_s: float
    loop_late_p99_s: float


def percentile(values: Iterable[float], fraction: float) -> float:
    """The value at index round(fraction * (n - 1)) of the sorted ones. Raises ValueError for none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return ordered[int(fraction * (len(ordered) - 1) + 0.5)]


def percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """`{name}_p50` and so on; None for all where there is no value."""
    return {f"{name}_p{rank}": percentile(values, rank / 100) if values else None for rank in PERCENTILES}


def summarise(
    records: Sequence[SpeechRecord],
    clients: Sequence[ClientCost],
    wall_s: float,
    *,
    ends_by_limit: bool = False,
) -> dict[str, Any]:
    """One pass. Latencies and audio are those of answers that came whole.

    audio_per_s_busy: of all audio that came between the first request's start and the last one's, so without
        the end, when streams run out.
    server_first_audio_s: from the request's acceptance to the engines' first audio, as the server tells it.
    ends_by_limit: every answer must have all the frames it was limited to.
    """
    done = [record for record in records if record.outcome == "ok"]
    outcomes = Counter(record.outcome for record in records)
    audio_s = sum(record.audio_s for record in done)
    refused_s = [record.total_s for record in records if record.outcome == "refused"]
    server_s = [record.server_s["first_audio"] for record in done if "first_audio" in record.server_s]
    cpu_s = sum(client.cpu_s for client in clients)
    return {
        "num_requests": len(records),
        **{f"num_{outcome}": outcomes[outcome] for outcome in ("ok", "refused", "failed", "left")},
        "wall_s": wall_s,
        "audio_s": audio_s,
        "audio_per_s": audio_s / wall_s if wall_s > 0 else 0.0,
        "audio_per_s_busy": busy_rate(records),
        "requests_per_s": len(done) / wall_s if wall_s > 0 else 0.0,
        "mean_audio_s": audio_s / len(done) if done else None,
        **percentiles("ttfa_s", [record.ttfa_s for record in done if record.ttfa_s is not None]),
        **percentiles("audible_s", [record.audible_s for record in done if record.audible_s is not None]),
        **percentiles("server_first_audio_s", server_s),
        **percentiles("refused_s", refused_s),
        "rtf_mean": statistics.fmean(rtf for record in done if (rtf := record.rtf) is not None)
        if done
        else None,
        "num_at_limit": sum(
            record.num_bytes == (record.max_frames or 0) * BYTES_PER_FRAME for record in done
        ),
        "num_underruns": sum(record.underrun_s > UNDERRUN_S for record in done),
        "worst_underrun_s": max((record.underrun_s for record in done), default=None),
        "refused_without_retry_after": sum(
            record.outcome == "refused" and record.retry_after is None for record in records
        ),
        "client_cpu_s": cpu_s,
        "client_busiest": max((client.cpu_s for client in clients), default=0.0)
        / max((client.wall_s for client in clients), default=1.0),
        "client_late_p99_s": max((client.loop_late_p99_s for client in clients), default=0.0),
        "missing": missing_audio(done, ends_by_limit=ends_by_limit),
        "errors": dict(
            Counter(record.error for record in records if record.outcome == "failed").most_common(5)
        ),
    }


def span_s(records: Sequence[SpeechRecord]) -> float:
    """From the first request's start to the last answer's end, seconds."""
    if not records:
        return 0.0
    return max(record.ended_at for record in records) - min(record.sent_at for record in records)


def busy_rate(records: Sequence[SpeechRecord]) -> float | None:
    """Seconds of audio per second from the first request's start to the last one's; None for a single one."""
    if len(records) < 2:
        return None
    began = min(record.sent_at for record in records)
    ended = max(record.sent_at for record in records)
    if ended <= began:
        return None
    num_bytes = 0
    for record in records:
        for (_, before), (at_s, so_far) in zip([(0.0, 0), *record.arrivals], record.arrivals, strict=False):
            num_bytes += (so_far - before) * (record.sent_at + at_s <= ended)
    return seconds_of(num_bytes) / (ended - began)


def missing_audio(done: Sequence[SpeechRecord], *, ends_by_limit: bool) -> list[str]:
    """What is wrong with the length of answers that seemed whole, a line for each; at most ten."""
    problems = []
    for record in done:
        num_frames, rest = divmod(record.num_bytes, BYTES_PER_FRAME)
        if rest:
            problems.append(f"request {record.number}: {record.num_bytes} bytes are no whole frames")
        elif record.num_frames is not None and record.num_frames != num_frames:
            problems.append(f"request {record.number}: {num_frames} frames came of {record.num_frames} told")
        elif record.max_frames is not None and num_frames > record.max_frames:
            problems.append(f"request {record.number}: {num_frames} frames, limit {record.max_frames}")
        elif ends_by_limit and record.max_frames is not None and num_frames < record.max_frames:
            problems.append(f"request {record.number}: {num_frames} of {record.max_frames} frames")
    return problems[:10]


_ADDED_UP = ("num_", "refused_without", "client_cpu_s")
_WORST = ("worst_", "client_busiest", "client_late")


def over_repeats(repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of every number over the repeats; counts are added up, and the worst stays the worst."""
    level: dict[str, Any] = {"num_repeats": len(repeats)}
    for name, first in repeats[0].items():
        values = [repeat[name] for repeat in repeats]
        known = [value for value in values if value is not None]
        if isinstance(first, list):
            level[name] = [line for value in values for line in value]
        elif isinstance(first, dict):
            level[name] = dict(sum((Counter(value) for value in values), Counter()))
        elif name.startswith(_ADDED_UP):
            level[name] = sum(known)
        elif name.startswith(_WORST):
            level[name] = max(known, default=None)
        else:
            level[name] = statistics.median(known) if known else None
    return level


def odd_durations(levels: Sequence[dict[str, Any]]) -> list[str]:
    """Rows whose mean duration is far from the others': a sign of speech that was cut short."""
    means = [level["mean_audio_s"] for level in levels if level.get("mean_audio_s")]
    if len(means) < 2:
        return []
    usual = statistics.median(means)
    return [
        f"{level['name']}: {level['mean_audio_s']:.2f} s of audio a request, {usual:.2f} s in other rows"
        for level in levels
        if level.get("mean_audio_s") and abs(level["mean_audio_s"] / usual - 1) > DURATION_TOLERANCE
    ]
