"""Where a long text may be cut, so that each piece can be spoken as an utterance of its own.

Knows punctuation, Latin and CJK, and nothing of tokens or models. One pass marks every place at which
the text could be cut with how good a place it is; a second takes the best one within reach, piece by piece:

    paragraph > sentence end > line > sentence end within a quotation, or before a small letter
    > comma and the like > space > between two characters, where a script has no spaces

Only whitespace at a cut is dropped. What looks like a sentence end and isn't: "Mr. Li", "e.g. this",
"No. 5", "3.14", "U.S. law", "1. First", "example.org/a?b". Missing a real end costs little, since there
is nearly always another one within reach; so a doubtful full stop counts as none.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass
from enum import IntEnum


@dataclass(frozen=True, slots=True)
class LongText:
    """From when on a text is cut, and how. All in characters.

    from_chars: shorter texts stay whole. aim_chars: of a piece; some 20 seconds of English.
    max_piece_chars: no piece is longer. max_chars: no text is.
    """

    from_chars: int = 600
    aim_chars: int = 300
    max_piece_chars: int = 400
    max_chars: int = 20_000

    def __post_init__(self) -> None:
        if not 1 <= self.aim_chars <= self.max_piece_chars < self.from_chars:
            raise ValueError(
                "long_text needs 1 <= aim_chars <= max_piece_chars < from_chars, got "
                f"{self.aim_chars}, {self.max_piece_chars}, {self.from_chars}"
            )
        if self.max_chars < 1:
            raise ValueError(f"long_text.max_chars must be at least 1, got {self.max_chars}")

    @property
    def min_piece_chars(self) -> int:
        """A piece is only shorter where whitespace was dropped: one word alone is spoken badly."""
        return max(1, self.aim_chars // 4)


def cut_text(text: str, sizes: LongText = LongText()) -> tuple[str, ...]:
    """The pieces of a text, in order; a short text, or a blank one, as it is.

    Time grows linearly with the text, whatever is in it.
    """
    if len(text) < sizes.from_chars or text.isspace():
        return (text,)
    breaks = mark_breaks(text, sizes.max_piece_chars)
    positions = [position for position, _ in breaks]
    pieces: list[str] = []
    start, end = skip_space(text, 0), len(text.rstrip())
    while end - start > sizes.max_piece_chars:
        # What is left behind the cut should be no scrap, either.
        furthest = min(sizes.max_piece_chars, end - start - sizes.min_piece_chars)
        low, high = start + sizes.min_piece_chars, start + furthest
        within = breaks[bisect_left(positions, low) : bisect_right(positions, high)]
        cut = best_break(within, start + sizes.aim_chars) or between_characters(text, low, high)
        pieces.append(text[start:cut].rstrip())
        start = skip_space(text, cut)
    return (*pieces, text[start:end])


def cut_again(piece: str) -> tuple[str, ...]:
    """A piece that is too long by another measure than characters, cut into ones of at most half its length."""
    half = len(piece) // 2
    assert half > 0, "one character can't be cut"
    return cut_text(piece, LongText(half + 1, max(1, half * 3 // 4), half, len(piece)))


# ---------------------------------------------------------------- places
class Strength(IntEnum):
    SPACE = 1
    CLAUSE = 2
    WEAK = 3  # a sentence end within a quotation or brackets, or before a small letter
    LINE = 4
    SENTENCE = 5
    PARAGRAPH = 6


_Break = tuple[int, Strength]  # a piece may end before this position

_FIRST_CJK = "\u2e80"  # from here on, scripts that need no space between sentences
_OPENING = {"(": ")", "[": "]", "{": "}", "“": "”", "„": "“", "«": "»", "»": "«", '"': '"', "「": "」", "『": "』",
            "（": "）", "【": "】", "《": "》", "〈": "〉", "［": "］", "＂": "＂"}  # fmt: skip
_EITHER_WAY = '"＂«»'  # opening where a space stands before them
_CLOSING = "".join(dict.fromkeys("".join(_OPENING.values()) + "’'*_"))
_WIDE_STOPS = "。！？｡．‼⁇⁈⁉"
_ELLIPSES = "…⋯"

_MARK = re.compile(
    rf"""
      (?P<gap>     \s+ )
    | (?P<stop>    [.!?؟{_WIDE_STOPS}{_ELLIPSES}；]+ )  (?P<closers> (?:[\u00a0\u202f]?[{re.escape(_CLOSING)}]|\x20»(?!\S))* )
    | (?P<clause>  [,;:–—，、：]+                    )  (?P<behind>  [{re.escape(_CLOSING)}]* )
    | (?P<bracket> [{re.escape("".join(dict.fromkeys("".join(_OPENING) + _CLOSING)))}] )
    """,
    re.VERBOSE,
)
_AHEAD = re.compile(rf"\s*[{re.escape(''.join(_OPENING))}¿¡‘'*_-]*\s?")
_WORD_BEFORE = re.compile(r"[^\W_](?:[\w.&-]*\w)?\Z")
_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")


def _words(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


# Lower case, in the languages that the model speaks. What is as often the last word of a sentence isn't here.
_ABBREVIATIONS = _words(
    """
    mr mrs ms mx dr prof st rev hon gov sen rep pres gen col lt sgt capt cmdr adm messrs mt ft vs viz cf ca approx
    hr fr frl bzw evtl ggf inkl exkl sog vgl mme mlle mgr sra srta dña dn dott sig avv ing ud uds ej г ул стр
    """
)
_BEFORE_NUMBER = _words(
    "no nos nr núm num n vol vols fig figs tab art abs kap ch sec p pp pg pág cap eq op ed"
)
_MAY_END = _words("""
    etc usw ecc inc ltd co corp bros jr sr dept est jan feb mar apr jun jul aug sep sept oct nov dec
""")
_LONGEST_ABBREVIATION = 12


def mark_breaks(text: str, reach: int) -> list[_Break]:
    """In order of position. reach: a bracket that isn't closed within as many characters is no bracket."""
    breaks: list[_Break] = []
    opened = _Opened(text, reach)
    glued_at = -1  # an abbreviation ends here: it stays with what follows
    for match in _MARK.finditer(text):
        start, end = match.span()
        strength: Strength | None = None
        position = end
        if match["gap"] is not None:
            strength, position = _gap_strength(match["gap"]), start
            if strength is Strength.PARAGRAPH:
                opened.clear()
            elif strength is Strength.SPACE and start == glued_at:
                strength = None
        elif match["stop"] is not None:
            opened.see(match["closers"], match.start("closers"))
            strength = _stop_strength(text, match["stop"], start, end)
            if strength is None:
                glued_at = end
            elif opened.within(end):
                strength = min(strength, Strength.WEAK)
        elif match["clause"] is not None:
            opened.see(match["behind"], match.start("behind"))
            strength = _clause_strength(text, match["clause"], start, end)
        else:
            opened.see(match["bracket"], start)
        if strength is not None:
            breaks.append((position, strength))
    return breaks


class _Opened:
    """The quotations and brackets that are open while the text is read."""

    def __init__(self, text: str, reach: int) -> None:
        self._text, self._reach = text, reach
        self._open: deque[tuple[int, str]] = deque()  # where it was opened, and what closes it

    def clear(self) -> None:
        self._open.clear()

    def see(self, marks: str, position: int) -> None:
        """The marks that stand at that position, and what they open or close."""
        for offset, mark in enumerate(marks):
            where = position + offset
            if self._open and self._open[-1][1] == mark:
                self._open.pop()
            elif mark in _OPENING and (mark not in _EITHER_WAY or self._starts_word(where)):
                self._open.append((where, _OPENING[mark]))

    def within(self, position: int) -> bool:
        while self._open and position - self._open[0][0] > self._reach:
            self._open.popleft()  # never closed, or so far away that it doesn't matter
        return bool(self._open)

    def _starts_word(self, position: int) -> bool:
        before = self._text[position - 1] if position else " "
        return before.isspace() or before in _OPENING


def is_settled(text: str, position: int) -> bool:
    """Whether a break of `mark_breaks` at that position stays what it is, whatever text may follow this one."""
    ahead = _AHEAD.match(text, position)
    assert ahead is not None, "the pattern matches nothing as well"
    return ahead.end() < len(text)


def _gap_strength(gap: str) -> Strength | None:
    num_lines = max(gap.count("\n"), gap.count("\r")) + gap.count("\u2028") + 2 * gap.count("\u2029")
    if num_lines >= 2:
        return Strength.PARAGRAPH
    if num_lines == 1:
        return Strength.LINE
    return (
        None if gap.strip("\u00a0\u202f\u2007") == "" else Strength.SPACE
    )  # those hold together what they part


def _stop_strength(text: str, stop: str, start: int, end: int) -> Strength | None:
    """What a run of stops is worth; None if it ends nothing. end: behind the closing marks."""
    behind = text[end] if end < len(text) else " "
    before = text[start - 1] if start else " "
    if not behind.isspace():
        if behind.isdigit() and before.isdigit():
            return None  # a number in full-width digits
        if any(mark in _WIDE_STOPS for mark in stop):
            return Strength.SENTENCE
        if "；" in stop:
            return Strength.WEAK
        if max(before, behind) < _FIRST_CJK:
            return None  # within a word, a number, an address
        return Strength.CLAUSE
    ahead = _AHEAD.match(text, end)
    assert ahead is not None, "the pattern matches nothing as well"
    first = text[ahead.end()] if ahead.end() < len(text) else ""
    if stop == "." and _is_abbreviation(text[max(0, start - _LONGEST_ABBREVIATION) : start], first):
        return None
    return Strength.WEAK if first.islower() or stop == "；" else Strength.SENTENCE


def _is_abbreviation(tail: str, first: str) -> bool:
    """Whether the full stop belongs to the word before it. tail: what stands before. first: the next letter."""
    found = _WORD_BEFORE.search(tail)
    if found is None:
        return False
    word = found[0]
    if word.isdigit():  # a list's number, an ordinal, or the end of a sentence about a small number
        return len(word) <= 2 and not first.islower()
    if _DOTTED.fullmatch(word) or (len(word) == 1 and word.isupper()):
        return True  # U.S., e.g., p.m., J.
    word = word.casefold()
    if word in _ABBREVIATIONS:
        return True
    if word in _BEFORE_NUMBER:
        return first.isdigit()
    return word in _MAY_END and (first.islower() or first.isdigit())


def _clause_strength(text: str, clause: str, start: int, end: int) -> Strength | None:
    behind = text[end] if end < len(text) else " "
    before = text[start - 1] if start else " "
    if behind.isdigit() and before.isdigit():
        return None
    is_free = behind.isspace() or any(mark in "，、：—" for mark in clause)
    return Strength.CLAUSE if is_free else None


# ---------------------------------------------------------------- choice
def best_break(breaks: list[_Break], aim: int) -> int | None:
    """The strongest, and of equals the one nearest to what is aimed at."""
    if not breaks:
        return None
    position, _ = max(breaks, key=lambda each: (each[1], -abs(each[0] - aim)))
    return position


def between_characters(text: str, low: int, high: int) -> int:
    """The last place that parts no word and no character of several code points; if there is none, the last."""
    return next((cut for cut in range(high, low, -1) if not _holds_together(text[cut - 1], text[cut])), high)


def _holds_together(before: str, behind: str) -> bool:
    if unicodedata.combining(behind) or behind in "\u200d\ufe0e\ufe0f" or before == "\u200d":
        return True
    if before in _OPENING or behind in _CLOSING or _MARK.match(behind):
        return True
    return before < _FIRST_CJK and behind < _FIRST_CJK


def skip_space(text: str, position: int) -> int:
    """The first position from there on that isn't whitespace."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position
