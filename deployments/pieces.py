"""The pieces of a long text, each an utterance of its own, joined into one stream of audio.

    piece 0   1 3 8 16 25 … 25 stop
    piece 1                 └ started …… 1 3 8 16 25 … stop
    piece 2                                          └ started …… 1 3 …
              ──────────── one stream, frames counted on ────────────>

When a piece's last chunk is here the next piece is started, before that chunk is passed on: its first audio, some
milliseconds away, is there long before the seconds that were sent are played. Not earlier, for two reasons: a long
text holds one place in the engines like any other request, and its pieces are never batched with each other. That
would flip the last bit of samples now and then (a batch's size shows in the rounding), and a whole response would
differ from a streamed one. A later piece may be refused by a full server: the stream that runs already
is worth waiting for a place. The first piece never waits, unless it goes on with what was said before.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from deployments.utterance import Chains, OnDeath, Utterance, ignore_death
from qwen3tts_core.types import AudioChunk, FinishReason, SpeechRequest

PATIENCE_S = 30.0
"""How long a later piece may be refused: about as long as the piece before it is heard."""


async def join_pieces(
    chains: Chains,
    requests: Sequence[SpeechRequest],
    samples_per_frame: int,
    max_frames: int | None = None,
    patience_s: float = PATIENCE_S,
    first_patience_s: float = 0.0,
    on_death: OnDeath = ignore_death,
) -> AsyncGenerator[AudioChunk, None]:
    """The audio of the requests, one after the other, as one utterance's.

    max_frames: of all pieces together; what is beyond is cut off. patience_s: see PATIENCE_S; first_patience_s: the
    same for the first piece, where that goes on with something that is heard already. on_death: see Utterance.
    Frames are in order, none is missing, and the last chunk has a finish: "length" if any piece reached its
    limit, or all together theirs. Raises what `Utterance.next_chunk` raises.
    Closing it, or any error, cancels the running piece and the one started ahead.
    """
    total = _Total(max_frames)
    piece = Utterance(chains, requests[0], samples_per_frame, first_patience_s, on_death)
    ahead: Utterance | None = None
    try:
        for following in (*requests[1:], None):
            is_over = False
            while not is_over:
                own = await piece.next_chunk()
                is_over = own.finish is not None
                chunk = total.add(own, is_last_piece=following is None)
                if is_over and chunk.finish is None:
                    assert following is not None, "the last piece's end is the end of all"
                    ahead = Utterance(chains, following, samples_per_frame, patience_s, on_death)
                    ahead.open_ahead()
                if chunk.num_frames or chunk.finish:
                    yield chunk
                if chunk.finish is not None:
                    return
            assert ahead is not None, "started with the last chunk of this one"
            piece, ahead = ahead, None
    finally:
        for unfinished in (piece, ahead):
            if unfinished is not None:
                unfinished.cancel()


class _Total:
    """Counts frames on from piece to piece, and knows when all is said."""

    def __init__(self, max_frames: int | None) -> None:
        self._max_frames = max_frames
        self._num_frames = 0
        self._was_limited = False

    def add(self, chunk: AudioChunk, is_last_piece: bool) -> AudioChunk:
        """The chunk at its place in the whole, without what is too much."""
        room = None if self._max_frames is None else self._max_frames - self._num_frames
        kept = chunk if room is None or chunk.num_frames <= room else _first_frames(chunk, room)
        first_frame, self._num_frames = self._num_frames, self._num_frames + kept.num_frames
        self._was_limited |= chunk.finish == "length"
        finish: FinishReason | None = None
        if is_last_piece and kept.finish is not None:
            finish = "length" if self._was_limited else "stop"
        elif self._num_frames == self._max_frames:
            finish = "length"
        return kept._replace(first_frame=first_frame, finish=finish)


def _first_frames(chunk: AudioChunk, num_frames: int) -> AudioChunk:
    """The chunk's beginning; not the end of its piece."""
    num_pcm, num_codes = (len(part) // chunk.num_frames * num_frames for part in (chunk.pcm, chunk.codes))
    return chunk._replace(
        num_frames=num_frames, pcm=chunk.pcm[:num_pcm], codes=chunk.codes[:num_codes], finish=None
    )
