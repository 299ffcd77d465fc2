"""What one request cost and how it ended: names and units of its line in the log; `exported.py` has the metrics'.

ttfa_s   accepted -> first audio byte written, seconds (a whole body: its first and only write)
audio_s  seconds of audio sent, at the speed asked for
rtf      accepted -> end, per second of audio; below 1 keeps up with playback
outcome  ok | rejected (the caller's fault: param and code say which) | refused (overload, nothing sent)
         | cancelled (the caller left) | failed (with its error)
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

from deployments.handles import root_cause
from deployments.http_errors import describe
from qwen3tts_core.streaming.pcm import duration_s
from qwen3tts_core.streaming.player import Player
from qwen3tts_core.types import AudioChunk, FinishReason

logger = logging.getLogger(__name__)

Stage = Literal["prepared", "first_audio"]
"""Body read and turned into a prompt; the engines' first audio in our hands."""
Outcome = Literal["ok", "rejected", "refused", "cancelled", "failed"]


_LONGEST_ERROR = 300  # characters


class RequestRecord:
    """Counts one request from `with` to its end, then logs one JSON line, whatever the end was.

    report: called with the record after that. outcome and reason are there from then on; reason: the finish, the
    error's code, or who left. player: what the client's goes through. num_resumes: lost engines it outlived.
    """

    outcome: Outcome
    reason: str

    def __init__(
        self,
        client_request_id: str,
        sample_rate_hz: int,
        clock: Callable[[], float] = time.perf_counter,
        report: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self._clock, self._report = clock, report
        self.player = Player()
        self.num_resumes = 0
        self.sample_rate_hz = sample_rate_hz
        self.speed = 1.0
        self._accepted_at = clock()
        self._fields: dict[str, Any] = {"request_id": client_request_id}
        self.num_frames = 0
        self.num_chunks = 0
        self._num_bytes = 0
        self.ttfa_s: float | None = None
        self.rtf: float | None = None
        self._stages: dict[str, float] = {}
        self.finish: FinishReason | None = None

    def note(self, **fields: Any) -> None:
        """Add what is known of the request to its line."""
        self._fields.update(fields)

    def add(self, chunk: AudioChunk) -> None:
        self.num_frames += chunk.num_frames
        self.num_chunks += bool(chunk.num_frames)
        self._num_bytes += len(chunk.pcm)
        self.finish = chunk.finish

    def wrote_audio(self) -> None:
        """Call after each write that held audio."""
        elapsed_s = self._clock() - self._accepted_at
        if self.ttfa_s is None:
            self.ttfa_s = elapsed_s
        self.player.got(elapsed_s, self.audio_s)

    def resumed(self, _: BaseException) -> None:
        """Engines died, and others are to go on."""
        self.num_resumes += 1

    def reached(self, stage: Stage) -> None:
        """Note when: once for each stage."""
        self._stages.setdefault(stage, self._clock() - self._accepted_at)

    def timings(self) -> dict[str, float]:
        """Seconds from the request's acceptance to each stage reached so far, and to now."""
        so_far = {**self._stages, "total": self._clock() - self._accepted_at}
        return {f"{stage}_s": round(seconds, 4) for stage, seconds in so_far.items()}

    def server_timing(self) -> str:
        """The same in milliseconds, as browsers' tools read it. Source: W3C Server Timing, section 2."""
        return ", ".join(
            f"{stage.removesuffix('_s')};dur={1000 * seconds:.1f}"
            for stage, seconds in self.timings().items()
        )

    @property
    def request_id(self) -> str:
        """As the client knows it."""
        return str(self._fields["request_id"])

    @property
    def model(self) -> str | None:
        """As served; None before the body was read."""
        return self._fields.get("model")

    @property
    def is_streamed(self) -> bool:
        return bool(self._fields.get("streamed"))

    @property
    def audio_s(self) -> float:
        return duration_s(self._num_bytes, self.sample_rate_hz) / self.speed

    def __enter__(self) -> RequestRecord:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        elapsed_s = self._clock() - self._accepted_at
        self.outcome, status = _outcome(error, has_sent_audio=self.ttfa_s is not None)
        self.reason = _reason(self.outcome, self.finish, error)
        self.rtf = elapsed_s / self.audio_s if self._num_bytes else None
        line = {
            **self._fields,
            "outcome": self.outcome,
            "status": status,
            "finish": self.finish,
            "frames": self.num_frames,
            "chunks": self.num_chunks,
            **({"resumes": self.num_resumes} if self.num_resumes else {}),
            "ttfa_s": _rounded(self.ttfa_s),
            "audio_s": _rounded(self.audio_s),
            "rtf": _rounded(self.rtf),
        }
        if error is not None and self.outcome == "failed":
            line["error"] = _one_line(root_cause(error))
        if error is not None and self.outcome == "rejected":  # the message may quote the text
            described = describe(error).error
            line["param"], line["code"] = described["param"], described["code"]
        logger.info("request %s", json.dumps(line, ensure_ascii=False), extra={"speech": line})
        if self._report is not None:
            self._report(self)


def _outcome(error: BaseException | None, has_sent_audio: bool) -> tuple[Outcome, int | None]:
    """With the status that the client gets, or got: after its first audio that is 200, and any fault is ours."""
    sent = 200 if has_sent_audio else None
    if error is None:
        return "ok", 200
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled", sent
    described = describe(error)
    if described.status == 499:
        return "cancelled", sent
    if has_sent_audio:
        return "failed", sent
    if described.error["code"] == "overloaded":
        return "refused", described.status
    return ("rejected" if described.status < 500 else "failed"), described.status


def _reason(outcome: Outcome, finish: FinishReason | None, error: BaseException | None) -> str:
    """One of few: what `http_errors.py` calls errors, and what ends a request without one."""
    if outcome == "cancelled":
        return "client_left"
    if error is not None:
        return str(describe(error).error["code"])
    return finish or "none"


def _one_line(error: BaseException) -> str:
    """Its type, and what it says, without the traceback that Ray's errors carry."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:_LONGEST_ERROR]}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
