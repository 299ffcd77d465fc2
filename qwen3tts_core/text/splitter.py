"""Text that arrives in pieces, cut into utterances as soon as their ends are certain.

    "Hello the" │ "re. How are" │ " you?" │ end
                └─ nothing yet   └─ "Hello there."    └─ "How are you?"

Where a text may be cut is `sentences.py`'s to say; here it is asked of text whose end isn't known yet. A cut
counts once the first letter behind it is here, since that decides ("No. 5", "3.14", 'he said "go." and'). So
however a text is handed over, whole or letter by letter, the utterances are the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Literal, get_args

from qwen3tts_core.text.sentences import (
    LongText,
    Strength,
    best_break,
    between_characters,
    is_settled,
    mark_breaks,
    skip_space,
)

SplitGranularity = Literal["sentence", "clause", "none"]
SPLIT_GRANULARITIES: tuple[SplitGranularity, ...] = get_args(SplitGranularity)

_WEAKEST = {"sentence": Strength.SENTENCE, "clause": Strength.CLAUSE}
_MIN_CLAUSE_CHARS = 12
"""What is shorter stays with what follows: "Well," alone is spoken badly."""
_SIZES = LongText()
_MARGIN_CHARS = 64
"""What is looked at behind the longest utterance: more than any mark, its closing quotes and a name before it."""


class TextSplitter:
    """One text at a time. Time grows linearly with it.

    granularity: "none" gives nothing before `finish`, then the whole. sizes: an utterance without an end is cut
    at `max_piece_chars`, at the best place there is, as a long text is.
    """

    def __init__(self, granularity: SplitGranularity, sizes: LongText = _SIZES) -> None:
        self._sizes = sizes
        self._weakest = _WEAKEST.get(granularity)
        self._min_chars = _MIN_CLAUSE_CHARS if granularity == "clause" else 1
        self._text = ""

    @property
    def num_waiting_chars(self) -> int:
        """Of text whose end isn't certain yet."""
        return len(self._text)

    def feed(self, text: str) -> list[str]:
        """The utterances that are complete with this text; none is blank, none begins or ends with whitespace."""
        return self._take(self._text + text, is_end=False)

    def finish(self) -> list[str]:
        """The rest; then the next text may begin."""
        return self._take(self._text, is_end=True)

    def clear(self) -> None:
        """Forget what hasn't been handed out."""
        self._text = ""

    def _take(self, text: str, is_end: bool) -> list[str]:
        taken: list[str] = []
        start = skip_space(text, 0)
        if self._weakest is not None:
            while cut := self._next_cut(
                text[start : (end := start + self._reach)], is_end and end >= len(text)
            ):
                taken.append(text[start : start + cut].rstrip())
                start = skip_space(text, start + cut)
        self._text = "" if is_end else text[start:]
        rest = text[start:].rstrip()
        return [*taken, rest] if is_end and rest else taken

    @property
    def _reach(self) -> int:
        return self._sizes.max_piece_chars + _MARGIN_CHARS

    def _next_cut(self, window: str, is_end: bool) -> int:
        """Where the utterance that begins the window ends, 0 if that can't be told.

        is_end: of the text, at the window's. What is behind the window never counts, so that the answer doesn't
        depend on how much of it has arrived.
        """
        assert self._weakest is not None, "a text that isn't cut has no next cut"
        longest = self._sizes.max_piece_chars
        breaks = mark_breaks(window, longest)
        for position, strength in breaks:
            if position > longest or not (is_end or is_settled(window, position)):
                break
            if strength >= self._weakest and position >= self._min_chars:
                return position
        if len(window) < self._reach and not (is_end and len(window) > longest):
            return 0
        positions = [position for position, _ in breaks]
        low = self._sizes.min_piece_chars
        within = breaks[bisect_left(positions, low) : bisect_right(positions, longest)]
        return best_break(within, self._sizes.aim_chars) or between_characters(window, low, longest)
