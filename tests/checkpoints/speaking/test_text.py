"""The corpus' text: own sentences, WordNet's lines, and what is held out."""

import re
from random import Random

import pytest

from checkpoints.speaking.recipe import templates
from checkpoints.speaking.recipe.common import REQUIRED_VERBS
from checkpoints.speaking.recipe.lines import (
    Lines,
    collect,
    held_out_sentences,
    is_usable,
    read_lines,
)
from checkpoints.speaking.recipe.words import Word

NOUNS = [("person", "child", "children"), ("thing", "window", "windows"), ("place", "town", "towns")]
NOUNS += [("mass", "music", "music"), ("people", "people", "people"), ("many", "clothes", "clothes")]
WORDS = [
    *(Word("noun", (one, many), (name,), 1.0) for name, one, many in NOUNS),
    *(
        Word("verb", (v, f"{v}s", f"{v}ed", f"{v}ed", f"{v}ing"), ("something", "somebody", "alone"), 1.0)
        for v in sorted(REQUIRED_VERBS)
    ),
    Word("adj", ("old", "older"), ("attribute", "predicate"), 1.0),
    Word("adj", ("useful", ""), ("attribute", "predicate"), 1.0),
    Word("adv", ("slowly",), ("manner",), 1.0),
]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (20, "twenty"),
        (99, "ninety nine"),
        (100, "one hundred"),
        (305, "three hundred five"),
        (4_021, "four thousand twenty one"),
        (9_999, "nine thousand nine hundred ninety nine"),
    ],
)
def test_numbers_in_words(value, words):
    assert templates.number_words(value) == words


@pytest.mark.parametrize("value", [-1, 10_000])
def test_numbers_beyond_are_refused(value):
    with pytest.raises(ValueError, match="expected 0 to 9,999"):
        templates.number_words(value)


def test_every_number_has_words_of_its_own():
    assert len({templates.number_words(value) for value in range(10_000)}) == 10_000


@pytest.mark.parametrize(
    ("year", "words"),
    [
        (1998, "nineteen ninety eight"),
        (1905, "nineteen oh five"),
        (1900, "nineteen hundred"),
        (2000, "two thousand"),
        (2007, "two thousand seven"),
        (2026, "twenty twenty six"),
    ],
)
def test_years_in_words(year, words):
    assert templates.year_words(year) == words


def test_days_in_words():
    days = {day: templates.ordinal_words(day) for day in range(1, 32)}
    assert days[1] == "first"
    assert days[12] == "twelfth"
    assert days[20] == "twentieth"
    assert days[23] == "twenty third"
    assert days[31] == "thirty first"
    assert len(set(days.values())) == 31


def test_sentences_are_filled_in_plain_ascii_and_capitalised():
    for i in range(2_000):
        sentence = templates.sentence(Random(i))
        assert re.fullmatch(r"[A-Za-z0-9 ,.'?!:]+", sentence), sentence
        assert sentence[0].isupper() or sentence[0].isdigit(), sentence
        assert "  " not in sentence


def test_every_template_comes_up_and_names_only_slots_that_exist():
    for template in templates.SENTENCES:
        for slot in re.findall(r"{(\w+)}", template):
            assert slot in templates._SLOTS, template


def wordnet_of(folder, *definitions):
    folder.mkdir()
    rows = [f"00{i} 00 n 01 word 0 000 | {definition}" for i, definition in enumerate(definitions)]
    (folder / "data.noun").write_text("\n".join(["  1 a licence line | no", *rows]))
    (folder / "cntlist.rev").write_text("word%1:00:00:: 1 5\n")
    return folder


def test_wordnets_examples_and_first_definitions_are_taken_and_others_left(tmp_path):
    plain = held_out_sentences()[5].rstrip(".").lower()
    examples = "; ".join(f'"this is  example number {i} of the day"' for i in range(320))
    folder = wordnet_of(
        tmp_path / "wn",
        f'(in  music) a thing  that sounds; "too short"; "une phrase fran\u00e7aise ici"; {examples}; "{plain}"',
    )
    assert collect(tmp_path / "lines.gz", 0, folder) == (20, 1, 1)
    lines = read_lines(tmp_path / "lines.gz")
    assert list(lines.glosses) == ["a thing that sounds"]
    assert len(lines.held_out) == 300
    assert not set(lines.held_out) & set(lines.examples)
    assert all(line.startswith("this is example number") for line in [*lines.held_out, *lines.examples])
    assert plain not in {*lines.examples, *lines.held_out}


def test_a_dictionary_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="wordnet-base"):
        collect(tmp_path / "lines.gz", 0, tmp_path)


def test_utterances_follow_from_seed_and_number():
    lines = Lines(
        [f"example {i} is here" for i in range(50)], [f"gloss {i} is here" for i in range(50)], [], WORDS
    )
    utterances = [lines.utterance(7, i) for i in range(300)]
    assert utterances == [lines.utterance(7, i) for i in range(300)]
    assert len({utterance.text for utterance in utterances}) > 250
    assert {utterance.voice for utterance in utterances} == {"slt", "rms", "awb"}
    assert {len(utterance.lines) for utterance in utterances} == {1, 2, 3, 4}
    assert max(len(utterance.text) for utterance in utterances) <= 210
    assert lines.utterance(8, 0) != lines.utterance(7, 0)


@pytest.mark.parametrize(
    "line", ["two words", "caf\u00e9 is a word", "`quoted' thing is here", "- no beginning here"]
)
def test_lines_that_cannot_be_read_out_are_left(line):
    assert not is_usable(line)


def test_the_held_out_sentences_are_forty_and_plain():
    sentences = held_out_sentences()
    assert len(set(sentences)) == 40
    assert all(is_usable(sentence) for sentence in sentences)
