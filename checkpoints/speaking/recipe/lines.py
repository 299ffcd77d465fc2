"""The text that is spoken: sentences of common words, WordNet's examples and glosses, templates, and what is held out.

`collect` reads the dictionary once and leaves `lines.txt.gz`, which is all that later steps need.
Which lines make utterance i is a pure function of (seed, i), so shards can be made in any order.
Source of the text: WordNet 3.0 (Debian `wordnet-base`), Princeton's licence.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from random import Random

from checkpoints.speaking.recipe import templates
from checkpoints.speaking.recipe.common import REQUIRED_VERBS, CommonSentences
from checkpoints.speaking.recipe.layout import VOICES
from checkpoints.speaking.recipe.words import Word, collect_words

WORDNET = Path("/usr/share/wordnet")
HELD_OUT = Path(__file__).with_name("held_out.txt")
NUM_HELD_OUT_LINES = 300
_ALLOWED = re.compile(r"[A-Za-z0-9 ,.'?!;:-]+")
_SHORTEST, _LONGEST = 3, 24  # words
COMMON_SHARE, EXAMPLE_SHARE, GLOSS_SHARE, TEMPLATE_SHARE = 0.50, 0.27, 0.08, 0.15  # of the lines
_NEAR_COPY = 5  # so many words in a row
_SENTENCE_CASE_SHARE = 0.6
_LONGEST_CHARACTERS = 200  # about 13 s
_COUNTS, _COUNT_WEIGHTS = (1, 2, 3, 4), (0.55, 0.25, 0.13, 0.07)


@dataclass(frozen=True, slots=True)
class Utterance:
    """lines: each spoken alone, with a short pause between; text: what the talker reads."""

    lines: tuple[str, ...]
    voice: str

    @property
    def text(self) -> str:
        return " ".join(self.lines)


@dataclass(frozen=True)
class Lines:
    """The corpus' sentences, and words to make more of; held_out: never spoken in training."""

    examples: Sequence[str]
    glosses: Sequence[str]
    held_out: Sequence[str]
    words: Sequence[Word]

    @cached_property
    def _common(self) -> CommonSentences:
        return CommonSentences(self.words)

    def utterance(self, seed: int, number: int) -> Utterance:
        """Number `number` of the corpus; the same for the same arguments, on every machine."""
        rng = Random(f"{seed}/{number}")
        count = rng.choices(_COUNTS, _COUNT_WEIGHTS)[0]
        lines: list[str] = []
        for _ in range(count):
            line = self._line(rng)
            if lines and sum(map(len, lines)) + len(line) > _LONGEST_CHARACTERS:
                break
            lines.append(line)
        return Utterance(tuple(lines), rng.choice(VOICES))

    def _line(self, rng: Random) -> str:
        while is_near_held_out(line := self._any_line(rng)) or len(line.split()) > _LONGEST:
            pass
        return line

    def _any_line(self, rng: Random) -> str:
        shares = (COMMON_SHARE, TEMPLATE_SHARE, EXAMPLE_SHARE, GLOSS_SHARE)
        source = rng.choices(("common", "template", "example", "gloss"), shares)[0]
        if source == "common":
            return self._common.sentence(rng)
        if source == "template":
            return templates.sentence(rng)
        line = rng.choice(self.examples if source == "example" else self.glosses)
        if rng.random() >= _SENTENCE_CASE_SHARE:
            return line
        mark = "" if line[-1] in ".?!" else rng.choices(".?!", (0.85, 0.08, 0.07))[0]
        return line[0].upper() + line[1:] + mark


def held_out_sentences() -> list[str]:
    """The 40 plain sentences of the evaluation; own, and in no corpus."""
    return HELD_OUT.read_text(encoding="utf-8").splitlines()


def is_near_held_out(line: str) -> bool:
    """Whether five words in a row are those of a sentence of the evaluation, whatever their case and marks."""
    return not _held_out_runs().isdisjoint(_runs(line))


@cache
def _held_out_runs() -> frozenset[tuple[str, ...]]:
    return frozenset(run for sentence in held_out_sentences() for run in _runs(sentence))


def _runs(line: str) -> Iterator[tuple[str, ...]]:
    words = _words(line).split()
    return (tuple(words[i : i + _NEAR_COPY]) for i in range(len(words) - _NEAR_COPY + 1))


def collect(target: Path, seed: int, wordnet: Path = WORDNET) -> tuple[int, int, int]:
    """Write the usable lines and the common words of WordNet; the numbers of examples, glosses and words.

    Raises FileNotFoundError when the dictionary isn't there.
    """
    examples: dict[str, None] = {}
    glosses: dict[str, None] = {}
    for definition in _definitions(wordnet):
        quoted = [" ".join(line.split()) for line in re.findall(r'"([^"]+)"', definition)]
        examples.update(dict.fromkeys(filter(is_usable, quoted)))
        first = " ".join(re.sub(r"\([^)]*\)", "", definition.split(";")[0]).split())
        if is_usable(first):
            glosses[first] = None
    kept = [line for line in examples if not is_near_held_out(line)]
    words = collect_words(wordnet, REQUIRED_VERBS)
    Random(seed).shuffle(kept)
    target.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(target, "wt", encoding="utf-8") as file:
        for kind, lines in (
            ("h", kept[:NUM_HELD_OUT_LINES]),
            ("e", kept[NUM_HELD_OUT_LINES:]),
            ("g", [line for line in glosses if not is_near_held_out(line)]),
            ("w", [word.row() for word in words]),
        ):
            file.writelines(f"{kind}\t{line}\n" for line in lines)
    return len(kept) - NUM_HELD_OUT_LINES, len(glosses), len(words)


def read_lines(file: Path) -> Lines:
    """What `collect` wrote."""
    kinds: dict[str, list[str]] = {"h": [], "e": [], "g": [], "w": []}
    with gzip.open(file, "rt", encoding="utf-8") as source:
        for row in source:
            kind, _, line = row.rstrip("\n").partition("\t")
            kinds[kind].append(line)
    return Lines(kinds["e"], kinds["g"], kinds["h"], [Word.of_row(row) for row in kinds["w"]])


def is_usable(line: str) -> bool:
    """Plain ASCII prose of a speakable length."""
    return bool(_ALLOWED.fullmatch(line)) and _SHORTEST <= len(line.split()) <= _LONGEST and line[0].isalnum()


def _words(line: str) -> str:
    return " ".join(re.findall(r"[a-z']+", line.lower()))


def _definitions(wordnet: Path) -> Iterator[str]:
    """The text after the bar of every synset. Source: WordNet 3.0, wndb(5)."""
    files = sorted(wordnet.glob("data.*"))
    if not files:
        raise FileNotFoundError(f"no data files of WordNet in {wordnet}: install Debian's wordnet-base")
    for file in files:
        for row in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if not row.startswith("  ") and "|" in row:
                yield row.split("|", 1)[1].strip()
