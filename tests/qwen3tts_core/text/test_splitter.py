import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qwen3tts_core.text.sentences import LongText
from qwen3tts_core.text.splitter import SPLIT_GRANULARITIES, TextSplitter

small = LongText(from_chars=41, aim_chars=20, max_piece_chars=40, max_chars=1000)

TEXTS = st.one_of(
    st.text(max_size=120),
    st.text(st.sampled_from('ab A1.!?,;: \n"()«»”“。，！」「…\u00a0-–e'), max_size=200),
    st.lists(
        st.sampled_from(
            ["Hello there. ", "Mr. Li said so. ", "No. ", "5 is 3.14, ", '"Go." he said. ', "你好。", "今天，", "»", " ",
             "\n\n", "etc. ", "and ", "e.g. this ", "Oui. »", "x" * 50, "U.S. law. ", "1. First. ", "Why?! ", "...", "‘I’ "]
        ),
        max_size=30,
    ).map("".join),
)  # fmt: skip


def split(pieces, granularity="sentence", sizes=None):
    splitter = TextSplitter(granularity, sizes or LongText())
    return [unit for piece in pieces for unit in splitter.feed(piece)] + splitter.finish()


def squeezed(text):
    return "".join(text.split())


# ---------------------------------------------------------------- when
def test_a_sentence_leaves_with_the_first_letter_of_the_next():
    splitter = TextSplitter("sentence")
    assert splitter.feed("Hello the") == splitter.feed("re.") == splitter.feed(" ") == []
    assert splitter.feed("How") == ["Hello there."]
    assert splitter.feed(" are you?") == []
    assert splitter.finish() == ["How are you?"]
    assert splitter.finish() == []


def test_none_gives_the_whole_at_the_end():
    splitter = TextSplitter("none")
    assert splitter.feed(" One. Two.\n\n") == splitter.feed("Three. ") == []
    assert splitter.finish() == ["One. Two.\n\nThree."]


def test_what_was_cleared_is_never_handed_out():
    splitter = TextSplitter("sentence")
    assert splitter.feed("One. Tw") == ["One."]
    splitter.clear()
    assert splitter.num_waiting_chars == 0
    assert splitter.feed("Three. ") + splitter.finish() == ["Three."]


# ---------------------------------------------------------------- where
@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("Mr. Li paid 3.14 for No. 5, e.g. in the U.S. today. Good.", 2),
        ('He said "Go. Now." and left. Then rain.', 2),
        ("你好。今天会下雨吗？", 2),
        ("A title\n\nand its text", 2),
        ("wrapped\nline", 1),
        ("Wait... what?! Yes.", 2),
    ],
)
def test_sentences_are_cut_where_a_long_text_would_be(text, units):
    assert len(split(text)) == units


def test_clauses_are_cut_at_commas_and_none_is_a_scrap():
    assert split("Well, I think so, since it rains; yes.", "clause") == [
        "Well, I think so,",
        "since it rains;",
        "yes.",
    ]


def test_an_endless_sentence_is_cut_within_the_longest_piece():
    units = split("word " * 100, sizes=small)
    assert all(10 <= len(unit) <= 40 for unit in units[:-1])
    assert squeezed("".join(units)) == "word" * 100


# ---------------------------------------------------------------- however it arrives
@pytest.mark.parametrize("granularity", SPLIT_GRANULARITIES)
@pytest.mark.parametrize("sizes", [small, LongText()], ids=["small", "default"])
@given(text=TEXTS, data=st.data())
def test_the_units_are_the_same_however_the_text_arrives(granularity, sizes, text, data):
    whole = split([text], granularity, sizes)
    assert split(text, granularity, sizes) == whole  # letter by letter
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(pieces, granularity, sizes) == whole


@given(text=TEXTS)
@example("。" * 100)
def test_nothing_but_whitespace_is_lost_and_no_unit_is_blank_or_too_long(text):
    for granularity in SPLIT_GRANULARITIES:
        units = split([text], granularity, small)
        assert squeezed("".join(units)) == squeezed(text)
        assert all(unit == unit.strip() != "" for unit in units)
        assert granularity == "none" or all(len(unit) <= small.max_piece_chars for unit in units)


def test_time_grows_with_the_text_and_no_faster():
    text = "word, " * 4_000
    began = time.perf_counter()
    for granularity in SPLIT_GRANULARITIES:
        split(text, granularity)
    assert time.perf_counter() - began < 60  # a second or two; quadratic work would take hours
