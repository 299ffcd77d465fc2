import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qwen3tts_core.text.sentences import LongText, cut_again, cut_text

sizes = LongText()
small = LongText(from_chars=41, aim_chars=20, max_piece_chars=40, max_chars=1000)

ENGLISH = (
    "The harbour lay still in the early light, and nobody had yet come down to the boats. "
    "An old man mended nets by the wall; his dog slept beside him! Was it going to rain? "
)
CHINESE = "清晨的港口十分安静，还没有人来到船边。老人坐在墙边补网，他的狗睡在旁边！今天会下雨吗？"


def squeezed(text):
    return "".join(text.split())


# ---------------------------------------------------------------- sizes
def test_shorter_texts_are_one_piece_as_they_are():
    text = ("\n " + ENGLISH * 4)[:599]
    assert cut_text(text) == (text,)
    assert len(cut_text(text + "x")) > 1


@pytest.mark.parametrize("text", [ENGLISH, CHINESE])
def test_long_texts_are_cut_at_sentence_ends_into_pieces_that_last_a_breath_or_two(text):
    pieces = cut_text(text * 20)
    assert all(piece[-1] in ".!?。！？" for piece in pieces)
    assert all(200 <= len(piece) <= 400 for piece in pieces[:-1])
    assert squeezed("".join(pieces)) == squeezed(text * 20)


def test_no_scrap_is_left_at_the_end():
    for length in range(600, 1200, 7):
        pieces = cut_text((ENGLISH * 9)[:length].rstrip())
        assert min(map(len, pieces)) >= sizes.min_piece_chars - 1  # a space at the cut is dropped


@pytest.mark.parametrize(
    "wrong",
    [{"aim_chars": 0}, {"aim_chars": 401}, {"max_piece_chars": 600}, {"from_chars": 400}, {"max_chars": 0}],
)
def test_sizes_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(ValueError, match=r"aim_chars|max_chars"):
        LongText(**wrong)


# ---------------------------------------------------------------- places
def pieces_around(left, right):
    """Cut `left right` with as many words on both sides that the cut must fall near the joint."""
    before, after = "word " * 50, " word" * 50
    return cut_text(f"{before}{left}{right}{after}", LongText(500, len(before) + len(left), 400))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("It ended.", " Then it rained"),
        ("It ended!", " Then it rained"),
        ("Did it?!", " Then it rained"),
        ("It ended...", " Then it rained"),
        ("It ended…", " Then it rained"),
        ('"It ended."', " Then it rained"),
        ("(It ended.)", " Then it rained"),
        ("“It ended.”", " Then it rained"),
        ("« C'est fini. »", " Puis il a plu"),
        ("« C'est fini\u00a0!\u00a0»", " Puis il a plu"),
        ("»Es ist aus.«", " Dann regnete es"),
        ("„Es ist aus.“", " Dann regnete es"),
        ("in 1999.", " Then it rained"),
        ("that is 3.14.", " Then it rained"),
        ("Apples, pears, etc.", " Then it rained"),
        ("She said No.", " Then it rained"),
        ("It ended.", ' "Then it rained'),
        ("¿Terminó?", " ¡Luego llovió"),
        ("It ended", "\n\nthen it rained"),
        ("结束了。", "然后下雨了"),
        ("“结束了！”", "然后下雨了"),
        ("「終わった？」", "そして雨が"),
        ("結束了｡", "然後"),
        ("结束了；", "然后下雨了"),
    ],
)
def test_a_sentence_ends_behind_its_stop_and_what_closes_there(left, right):
    first, second = pieces_around(left, right)
    assert first.endswith(left)
    assert second.startswith(right.strip())


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("Mr.", " Li came"),
        ("Dr.", " No came"),
        ("e.g.", " This one"),
        ("i.e.", " This one"),
        ("the U.S.", " Senate"),
        ("J.", " Smith"),
        ("z.B.", " Dieses"),
        ("bzw.", " Dieses"),
        ("No.", " 5 is here"),
        ("Fig.", " 12 shows"),
        ("Jan.", " 5 was cold"),
        ("am 3.", " Mai"),
        ("3.", "14"),
        ("１．", "５"),
        ("1,", "000"),
        ("12：", "30"),
        ("see example.", "org"),
        ("http://a.b/c?", "d=e"),
        ("mail a.", "b@c.de"),
        ("The end.", ")"),
        ("The end.", '"'),
        ("完。", "”"),
        ("\n1.", " First"),
    ],
)
def test_what_only_looks_like_an_end_is_never_cut(left, right):
    pieces = pieces_around(left, right)
    assert not any(piece.endswith(left.strip()) for piece in pieces)


def test_a_quotation_stays_whole_where_another_end_is_in_reach():
    said = "He said: “" + "I came. I saw. I won. " * 6 + "That was it.”"
    pieces = cut_text(f"{ENGLISH}{said} {ENGLISH * 2}")
    assert any(said in piece for piece in pieces)


def test_an_unclosed_quotation_is_soon_forgotten():
    _, *others = cut_text('He said: "' + ENGLISH * 10)
    assert all(piece[-1] in ".!?" for piece in others)
    wrapped = re.sub(
        r"(.{30,40}) ", r"\1\n", "He said: (" + ENGLISH * 12
    )  # a line beats an end within brackets
    assert all(piece[-1] in ".!?" for piece in cut_text(wrapped)[3:])


def test_paragraphs_come_before_sentences_and_sentences_before_clauses():
    sentence, clause = "one two three four. ", "one two three four, "
    text = "".join(clause * 4 + sentence for _ in range(20))
    assert all(piece.endswith(".") for piece in cut_text(text))
    pieces = cut_text(ENGLISH + "\n\nA title\n\n" + ENGLISH * 5)
    assert pieces[0].endswith("\n\nA title")


def test_hard_wrapped_lines_are_cut_at_their_sentences():
    wrapped = re.sub(r"(.{30,40}) ", r"\1\n", ENGLISH * 6)
    assert all(piece[-1] in ".!?" for piece in cut_text(wrapped))


def test_lines_without_stops_are_cut_at_their_ends():
    poem = "The wind, the rain, and then the sea\n" * 30
    assert all(piece.endswith("the sea") for piece in cut_text(poem))


def test_without_sentences_clauses_then_spaces_then_characters_are_taken():
    assert all(piece.endswith(",") for piece in cut_text("one two three, " * 60)[:-1])
    assert all(set(piece.split()) == {"word"} for piece in cut_text("word " * 200))
    assert [len(piece) for piece in cut_text("字" * 1000)] == [400, 400, 200]
    assert [len(piece) for piece in cut_text("x" * 1000)] == [400, 400, 200]


def test_between_characters_no_word_number_or_accent_is_parted():
    mixed = "价格三点一四约等于3.14159元而OpenSource是英文e\u0301字" * 40
    voiced = cut_text("か\u3099" * 600, LongText(max_piece_chars=399))
    assert all(piece.startswith("か") for piece in voiced)
    pieces = cut_text(mixed)
    assert "".join(pieces) == mixed
    for piece in pieces[1:]:
        assert piece[0] >= "\u2e80" or piece.startswith(("3.14159", "OpenSource", "e\u0301"))


# ---------------------------------------------------------------- for any text
marks = st.sampled_from(
    list(".!?。！？；…,，、:;\"'“”„«»()（）「」\n\r\t \u00a0\u3000\u2028-—1９aZé字\u0301\u200d😀")
)
bits = st.sampled_from(
    ["Mr. ", "e.g. ", "No. 5 ", "3.14", "http://a.b/c?d=e ", "\n\n", "...", "word ", "Word. ", "好。"]
)
texts = st.lists(st.one_of(marks, bits, st.text(max_size=5)), max_size=150).map("".join)


@given(texts)
@example(" " * 100)
@example("a" * 41)
@example("." * 41 + " " * 41 + "a")
def test_pieces_lose_and_double_nothing_are_never_blank_or_too_long_and_stay_as_they_are(text):
    pieces = cut_text(text, small)
    if len(text) < small.from_chars or not text.strip():
        assert pieces == (text,)
        return
    assert squeezed("".join(pieces)) == squeezed(text)
    position = 0
    for piece in pieces:
        assert piece == piece.strip() != ""
        assert len(piece) <= small.max_piece_chars
        assert cut_text(piece, small) == (piece,)
        position = text.index(piece, position) + len(piece)  # in order, and none overlaps another


@given(
    st.lists(st.sampled_from(["word", "Word.", "Mr.", "3.14", "end,", '"Yes!"', "(so)", "12."]), min_size=20)
)
def test_where_there_are_spaces_no_word_is_parted(words):
    text = " ".join(words)
    assert " ".join(cut_text(text, small)).split() == words


@given(texts.filter(lambda text: len(text) > 1 and text.strip()))
def test_cutting_again_gives_at_most_half_and_loses_nothing(text):
    pieces = cut_again(text)
    assert squeezed("".join(pieces)) == squeezed(text)
    assert max(map(len, pieces)) <= len(text) // 2
    assert all(piece.strip() for piece in pieces)


@pytest.mark.parametrize(
    "unit",
    [".", "(", ". ", '"', " ", "a", ". (", "\u0301", "Mr. ", "...\n", "。", "(((. ", ".   ", "?'", "\u00a0", '. "', "“", "\n", ","],
)  # fmt: skip
def test_time_grows_linearly_whatever_the_text_is(unit):
    def seconds(length):
        text = (unit * length)[:length] + "x"
        began = time.process_time()
        cut_text(text)
        return time.process_time() - began

    seconds(1000)
    assert seconds(100_000) < 20.0  # linear: 0.2; quadratic: minutes
