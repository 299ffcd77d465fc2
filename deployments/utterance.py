"""One utterance, over as many chains of engines as it takes.

    chain 1   1 3 8 16 ✗ its Codec or its Talker died
    chain 2              └ resume after 28 frames ── 25 25 … stop

Codes ride along with the PCM, so the frames that were sent are all here; engines that get them go on as if they had
made them. Not a sample that was sent is sent again, and none is left out. Serve itself never tries an accepted stream
again. What a request does wrong itself, or an engine does wrong with it alone, is nobody's death: that is raised.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.admission import Admission
from deployments.handles import ItemStream, StartStream, is_death, root_cause
from deployments.roll_call import RollCall
from qwen3tts_core.errors import EngineFault, Overloaded, StreamLost
from qwen3tts_core.streaming.pcm import num_pcm_bytes
from qwen3tts_core.types import AudioChunk, Resume, SpeechRequest

logger = logging.getLogger(__name__)

RESUME_TIMEOUT_S = 60.0
"""How long a broken stream waits for engines that take it over: about what a new replica needs on a GPU."""
_RETRY_S = 0.25
_LONGEST_WAIT_S = 1.0
_LONGEST_WORDS = 200
_MOST_DEATHS = 30
"""Of one utterance's engines, each after some audio of it: then it is taken for what kills them."""
_REFUSALS = (Overloaded, BackPressureError, DeploymentUnavailableError)


@dataclass(frozen=True, slots=True)
class Chains:
    """How utterances get engines. start: opens a chain. resume_timeout_s: see RESUME_TIMEOUT_S; 0 cuts at once.
    roll_call: by which engines hear of a stream's end where the stream itself can't tell them.
    admission: whether it is worth asking them."""

    start: StartStream
    resume_timeout_s: float = RESUME_TIMEOUT_S
    roll_call: RollCall = field(default_factory=RollCall)
    admission: Admission = field(default_factory=Admission)


OnDeath = Callable[[BaseException], None]


def ignore_death(_: BaseException) -> None:
    """For those who need not know."""


class Utterance:
    """From its start to its last chunk; checks what comes. One reader."""

    def __init__(
        self,
        chains: Chains,
        request: SpeechRequest,
        samples_per_frame: int,
        patience_s: float = 0.0,
        on_death: OnDeath = ignore_death,
    ) -> None:
        """patience_s: how long the start may be refused. on_death: called when other engines are to go on."""
        self._chains, self._request, self._samples_per_frame = chains, request, samples_per_frame
        self._patience_s, self._on_death = patience_s, on_death
        self._stream: ItemStream | None = None
        self._running_id = ""
        self._opening: asyncio.Task[AudioChunk] | None = None
        self._num_attempts = self._num_deaths = 0
        self._codes: list[bytes] = []
        self._cuts: list[int] = []
        self._num_frames = 0

    def open_ahead(self) -> None:
        """Start it now; its first chunk is awaited in the background, and kept until somebody asks."""
        self._open()
        self._opening = asyncio.create_task(self._receive())

    async def next_chunk(self) -> AudioChunk:
        """Raises what the chain raises, StreamLost when no engines went on in time, EngineFault for wrong audio."""
        if self._opening is not None:
            chunk, self._opening = await self._opening, None
        else:
            chunk = await self._receive()
        num_bytes = num_pcm_bytes(chunk.num_frames, self._samples_per_frame)
        if chunk.first_frame != self._num_frames or len(chunk.pcm) != num_bytes:
            raise EngineFault(
                f"expected frame {self._num_frames} next with {num_bytes} bytes of PCM, "
                f"got frame {chunk.first_frame} with {len(chunk.pcm)}"
            )
        if chunk.num_frames:
            self._codes.append(chunk.codes)
            self._cuts.append(chunk.num_frames)
        self._num_frames += chunk.num_frames
        if chunk.finish is not None:
            self._ended()
        return chunk

    def cancel(self) -> None:
        if self._opening is not None:
            self._opening.cancel()  # if it has failed by now, nobody needs to hear of it: this says so, too
        self._close()

    # ------------------------------------------------------------ chains
    async def _receive(self) -> AudioChunk:
        """The next chunk; of another chain if this one is refused for a while, or dies."""
        if not self._num_attempts and not self._patience_s:
            self._chains.admission.enter()
        patience_s = 0.0 if self._num_frames else self._patience_s
        trial = _Trial(patience_s, self._chains.resume_timeout_s, self._died)
        while True:
            try:
                async with trial.limit():
                    return AudioChunk.from_bytes(await self._next_item())
            except Exception as error:  # noqa: BLE001 - raised again by whoever knows what may be tried again
                wait_s = trial.wait_after(error)
            self._close()
            await asyncio.sleep(wait_s)

    async def _next_item(self) -> bytes:
        stream = self._stream or self._open()
        try:
            item = await anext(stream)
        except StopAsyncIteration:
            self._ended()
            raise EngineFault("the codec's stream ended without a finish") from None
        except Exception as error:
            cause = root_cause(error)
            if isinstance(cause, (Overloaded, BackPressureError)):
                self._ended(had_place=False)
                self._chains.admission.refused(cause)
            elif not is_death(cause):  # it has failed, and is over everywhere
                self._ended()
            raise
        if not self._num_frames:
            self._chains.admission.served()
        return item

    def _open(self) -> ItemStream:
        """A chain that goes on after the frames so far, under an id of its own: the last may not have ended everywhere."""
        request = self._request
        if self._num_attempts:
            request = dataclasses.replace(request, request_id=f"{request.request_id}-{self._num_attempts}")
        if self._cuts:
            request = dataclasses.replace(request, resume=Resume(b"".join(self._codes), tuple(self._cuts)))
        self._num_attempts += 1
        self._running_id = request.request_id
        self._chains.roll_call.want(self._running_id)
        self._stream = self._chains.start(request)
        return self._stream

    def _ended(self, had_place: bool = True) -> None:
        self._stream = None
        self._chains.roll_call.ended(self._running_id)
        if had_place:
            self._chains.admission.freed()

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
            self._chains.roll_call.give_up(self._running_id)
            self._chains.admission.freed()

    def _died(self, death: BaseException) -> None:
        """Others are to go on, unless it is this utterance that kills them."""
        self._num_deaths += 1
        if self._num_deaths > _MOST_DEATHS:
            raise StreamLost(
                f"{self._num_deaths} engines died of it", self._chains.resume_timeout_s
            ) from death
        logger.warning(
            "request %s: %s after %d frames; going on with other engines",
            self._request.request_id,
            type(death).__name__,
            self._num_frames,
        )
        self._on_death(death)


class _Trial:
    """How long one chunk is tried for: while it is refused, for `patience_s`; from a death on, `resume_timeout_s`."""

    def __init__(self, patience_s: float, resume_timeout_s: float, on_death: OnDeath) -> None:
        """on_death: called with the first."""
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + patience_s
        self._resume_timeout_s, self._on_death = resume_timeout_s, on_death
        self._death: BaseException | None = None
        self._retry_s = _RETRY_S

    def limit(self) -> asyncio.Timeout:
        """Around an attempt. A chain that lives has all the time it wants; one after a death, until the deadline."""
        self._limit = asyncio.timeout_at(None if self._death is None else self._deadline)
        return self._limit

    def wait_after(self, error: Exception) -> float:
        """Seconds until the next attempt. Raises the error, or StreamLost, if there is to be none."""
        cause, wait_s = root_cause(error), self._retry_s
        if self._limit.expired():
            raise self._lost()
        if not is_death(cause):
            if not isinstance(cause, _REFUSALS):
                raise error
        elif self._death is None:
            self._death, self._deadline = cause, self._clock() + self._resume_timeout_s
            wait_s = 0.0  # other replicas may be alive
        if self._clock() + wait_s >= self._deadline:
            raise error if self._death is None else self._lost()
        if wait_s:
            self._retry_s = min(1.5 * self._retry_s, _LONGEST_WAIT_S)
        else:
            self._on_death(cause)
        return wait_s

    def _lost(self) -> StreamLost:
        words = " ".join(str(self._death).split())[:_LONGEST_WORDS]
        return StreamLost(f"{type(self._death).__name__} ({words})", self._resume_timeout_s)
