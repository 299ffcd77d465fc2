"""Sentences of common words: inflection, grammar by property, coverage, what is held out."""

import re
from collections import Counter
from random import Random

import pytest

from checkpoints.speaking.recipe import common, lines, words
from checkpoints.speaking.recipe.common import PATTERNS, REQUIRED_VERBS, CommonSentences, with_article
from checkpoints.speaking.recipe.lines import Lines, collect, held_out_sentences, is_near_held_out, read_lines
from checkpoints.speaking.recipe.templates import DAYS, MONTHS, NAMES
from checkpoints.speaking.recipe.words import Word, collect_words

NOUNS = {  # lemma: lexicographer file
    "child": "18", "woman": "18", "editor": "18", "uncle": "18", "hour": "28", "uniform": "06", "window": "06",
    "city": "15", "area": "15", "music": "10", "iron": "27", "box": "06", "church": "06", "people": "14", "bus": "06",
}  # fmt: skip
VERBS = {
    "open": "8",
    "carry": "8",
    "hurt": "8",
    "stop": "8",
    "meet": "9",
    "sleep": "2",
    "sing": "2",
    "begin": "2",
}
ADJECTIVES = ("old", "big", "happy", "honest", "useful", "alone(p)", "former(a)", "asleep(p)")
EXCEPTIONS = {
    "noun": ["children child"],
    "verb": [
        "told tell", "bought buy", "began begin", "begun begin", "sang sing", "sung sing", "slept sleep", "met meet",
        "carried carry", "stopped stop", "stopping stop", "gave give", "given give", "said say", "wrote write",
        "written write", "ran run", "came come", "wrought work", "tried try",
    ],
    "adj": ["bigger big", "biggest big", "happier happy"],
}  # fmt: skip
SYLLABLES = [a + b + c for a in "bdfgklmnprtv" for b in "aou" for c in "bdgkmnprt"]


def wordnet_of(folder, extra_things=0):
    """A small dictionary in WordNet's format, with nouns made up besides."""
    folder.mkdir()
    nouns = NOUNS | {SYLLABLES[i // 300] + SYLLABLES[i % 300]: "06" for i in range(extra_things)}
    verbs = dict.fromkeys(sorted(REQUIRED_VERBS), "8") | VERBS
    rows = {
        "noun": [f"{i:08} {file} n 01 {word} 0 000 | thing" for i, (word, file) in enumerate(nouns.items())],
        "verb": [
            f"{i:08} 30 v 01 {w} 0 000 01 + {int(f):02} 00 | do" for i, (w, f) in enumerate(verbs.items())
        ],
        "adj": [f"{i:08} 00 a 01 {word} 0 000 | so" for i, word in enumerate(ADJECTIVES)],
        "adv": ["00000001 02 r 02 slowly 0 hardly 0 000 | so"],
    }
    tags = [f"{w}%1:{file}:00:: 1 {900 - i}" for i, (w, file) in enumerate(nouns.items()) if i < 900]
    tags += [f"{w}%1:06:00:: 1 1" for w in list(nouns)[900:]]
    tags += [f"{w}%2:30:00:: 1 50" for w in verbs] + [
        f"{w.partition('(')[0]}%3:00:00:: 1 50" for w in ADJECTIVES
    ]
    tags += ["slowly%4:02:00:: 1 9", "hardly%4:02:00:: 1 9", "window%2:30:00:: 1 1"]
    for kind, content in rows.items():
        (folder / f"data.{kind}").write_text("\n".join(["  1 a licence line", *content]))
        (folder / f"{kind}.exc").write_text("\n".join(EXCEPTIONS.get(kind, ())))
    (folder / "cntlist.rev").write_text("\n".join(tags))
    return folder


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return collect_words(wordnet_of(tmp_path_factory.mktemp("small") / "wn"), REQUIRED_VERBS)


@pytest.fixture(scope="module")
def drawn(vocabulary):
    sentences = CommonSentences(vocabulary)
    return [sentences.sentence(Random(i)) for i in range(6_000)]


# ---------------------------------------------------------------- words
@pytest.mark.parametrize(
    ("lemma", "forms"),
    [
        ("tell", "tell tells told told telling"),
        ("begin", "begin begins began begun beginning"),
        ("sing", "sing sings sang sung singing"),
        ("run", "run runs ran run running"),
        ("write", "write writes wrote written writing"),
        ("carry", "carry carries carried carried carrying"),
        ("stop", "stop stops stopped stopped stopping"),
        ("hurt", "hurt hurts hurt hurt hurting"),
        ("work", "work works worked worked working"),
        ("die", "die dies died died dying"),
        ("agree", "agree agrees agreed agreed agreeing"),
        ("watch", "watch watches watched watched watching"),
        ("play", "play plays played played playing"),
    ],
)
def test_verbs_are_inflected_with_the_exceptions_of_the_dictionary(lemma, forms):
    listed = {"begin": ["began", "beginning", "begun"], "run": ["ran", "running"], "sing": ["sang", "sung"]}
    listed |= {
        "tell": ["told"],
        "write": ["wrote", "written"],
        "stop": ["stopped", "stopping"],
        "work": ["wrought"],
    }
    made = (lemma, words.third_person(lemma), *words.past_forms(lemma, listed), words.ing_form(lemma, listed))
    assert " ".join(made) == forms


def test_plurals_and_comparatives_are_inflected_with_the_exceptions_of_the_dictionary():
    listed = {
        "child": ["children"],
        "big": ["bigger", "biggest"],
        "happy": ["happier"],
        "camera": ["camerae"],
    }
    plurals = [
        words.plural(noun, listed) for noun in ("child", "city", "box", "woman", "day", "camera", "human")
    ]
    assert plurals == ["children", "cities", "boxes", "women", "days", "cameras", "humans"]
    compared = [
        words.comparative(word, listed) for word in ("big", "happy", "old", "wide", "useful", "whole")
    ]
    assert compared == ["bigger", "happier", "older", "wider", "", ""]


def test_irregular_words_are_drawn_more_often(vocabulary):
    weights = {word.forms[0]: word.weight for word in vocabulary}
    assert weights["begin"] == weights["sing"] == words.DAILY * words.IRREGULAR
    assert weights["child"] == words.DAILY * words.IRREGULAR
    assert weights["city"] == weights["carry"] == words.DAILY
    assert weights["hurt"] == words.IRREGULAR
    assert weights["uniform"] == 1.0


def test_words_are_classed_by_the_dictionary(vocabulary):
    classes = {(word.kind, word.forms[0]): word.classes for word in vocabulary}
    assert classes["noun", "child"] == ("person", "people")
    assert classes["noun", "editor"] == ("person",)
    assert classes["noun", "city"] == ("place",)
    assert classes["noun", "music"] == classes["noun", "iron"] == ("mass",)
    assert classes["noun", "people"] == ("people",)
    assert classes["verb", "meet"] == ("somebody",)
    assert classes["verb", "sleep"] == ("alone",)
    assert classes["adj", "asleep"] == ("predicate",)
    assert ("adj", "former") not in classes
    assert ("adv", "hardly") not in classes
    assert ("verb", "window") not in classes


def test_what_the_dictionary_calls_a_slur_is_no_word_of_ours(tmp_path):
    """As a sense, not as a word: one that means something else as well stays."""
    folder = wordnet_of(tmp_path / "wn")
    with (folder / "data.noun").open("a") as file:
        file.write("\n00000099 18 n 02 ugly 0 child 1 000 | (ethnic slur) offensive term")
    with (folder / "cntlist.rev").open("a") as file:
        file.write("\nugly%1:18:00:: 1 999")
    nouns = {word.forms[0] for word in collect_words(folder, REQUIRED_VERBS) if word.kind == "noun"}
    assert "child" in nouns
    assert "ugly" not in nouns


def test_words_travel_with_the_lines(tmp_path):
    folder = wordnet_of(tmp_path / "wn")
    assert collect(tmp_path / "lines.gz", 0, folder)[2] == len(collect_words(folder, REQUIRED_VERBS))
    assert list(read_lines(tmp_path / "lines.gz").words) == collect_words(folder, REQUIRED_VERBS)


def test_verbs_that_patterns_need_are_named_when_missing(vocabulary):
    with pytest.raises(ValueError, match=r"\['give', 'tell'\]"):
        CommonSentences(word for word in vocabulary if word.forms[0] not in {"tell", "give"})


def test_a_dictionary_without_tags_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="wordnet-base"):
        collect_words(tmp_path)


# ---------------------------------------------------------------- sentences
def test_sentences_are_plain_capitalised_and_ended(drawn):
    for sentence in drawn:
        assert lines._ALLOWED.fullmatch(sentence), sentence
        assert sentence[0].isupper(), sentence
        assert sentence[-1] in ".?!", sentence
        assert not re.search(r"[.?!] [a-z]|  | [,.?!]|[{}]", sentence), sentence


def test_every_word_is_of_the_vocabulary_or_of_the_patterns(vocabulary, drawn):
    fixed = " ".join([*common_texts(), *DAYS, *MONTHS, *NAMES])
    known = set(re.findall(r"[a-z]+(?:'[a-z]+)?", fixed.lower()))
    known |= {form for word in vocabulary for form in word.forms}
    for sentence in drawn:
        for word in re.findall(r"[a-z']+", sentence.lower()):
            stem = re.sub(r"(n't|'ll|'m|'s|'re)$", "", word)
            assert word in known or stem in known, f"{word}: {sentence}"


def common_texts():
    """Whatever is written in the module itself: patterns, times, function words; and numbers."""
    with open(common.__file__, encoding="utf-8") as file:
        code = file.read()
    numbers = {common.number_words(i) for i in range(101)}
    return [code, *numbers]


def test_articles_fit_the_sound_that_follows(drawn):
    vowels = {"editor", "uncle", "hour", "iron", "area", "old", "honest"}
    seen = Counter()
    for sentence in drawn:
        for article, word in re.findall(r"\b(an?) (\w+)", sentence.lower()):
            if word in {"few", "lot", "long", "day", "week", "quarter"}:
                continue
            assert (article == "an") == (word in vowels or word in {"hour", "honest"}), sentence
            seen[article] += 1
    assert min(seen["a"], seen["an"]) > 200


@pytest.mark.parametrize(
    "phrase",
    [
        "a uniform",
        "an hour",
        "an honest man",
        "a one",
        "a useful thing",
        "an uncle",
        "a European city",
        "an eye",
    ],
)
def test_articles_of_words_that_sound_unlike_their_spelling(phrase):
    assert with_article(phrase.partition(" ")[2]) == phrase


def test_subjects_agree_with_their_verbs(drawn):
    joined = "\n".join(drawn).lower()
    for wrong in (
        r"(?m:^)(he|she|it) (are|were|have|don't|do not|weren't|haven't)\b",
        r"(?m:^)(we|they) (is|was|has|am|doesn't|wasn't)\b",
        r"(?m:^)(he|she|it) (always |never |often )?(tell|give|open|carry|meet|sleep|want|need) ",
        r"(?m:^)i (is|are|were|has|doesn't)\b",
        r"\b(did|does|can|will|could|should|must|didn't|doesn't|to|cannot|won't) (he |she |it )?(told|bought|gave|said|wrote|tells|buys)\b",
        r"\b(this|that|every|each|another|a|an) (old |big |happy |honest |useful )?(children|women|cities|windows|boxes)\b",
        r"\b(these|those|many|few|several|two|three) (old |big |happy |honest |useful )?(child|woman|city|window|box)\b",
        r"\b(musics|irons|peoples|childs|womans|telled|buyed|gived)\b",
    ):
        hit = re.search(wrong, joined)
        assert not hit, joined[max(0, hit.start() - 60) : hit.end() + 30]
    for right in (
        "told",
        "bought",
        "children",
        "women",
        "said",
        "given",
        "begun",
        "were",
        "hasn't",
        "bigger",
    ):
        assert len(re.findall(rf"\b{right}\b", joined)) >= 1, right


def test_every_pattern_has_only_slots_that_exist():
    for pattern in PATTERNS:
        for slot in re.findall(r"{(\w+)}", pattern):
            assert slot.lower() in common._SLOTS or slot.lower() in common._CLAUSES, pattern


def test_sentences_follow_from_the_generator_alone(vocabulary, drawn):
    again = CommonSentences(vocabulary)
    assert [again.sentence(Random(i)) for i in range(200)] == drawn[:200]
    assert len(set(drawn)) > 5_500


# ---------------------------------------------------------------- the corpus
@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """4,000 utterances with 900 nouns that are as common, and 2,000 that are rare."""
    folder = wordnet_of(tmp_path_factory.mktemp("large") / "wn", 2_900)
    vocabulary = collect_words(folder, REQUIRED_VERBS)
    source = Lines(["an example of something"] * 9, ["a gloss of something"] * 9, [], vocabulary)
    return vocabulary, [source.utterance(3, i) for i in range(4_000)]


def test_common_words_come_up_evenly_and_rare_ones_less(corpus):
    vocabulary, utterances = corpus
    counts = Counter()
    for utterance in utterances:
        counts.update(set(re.findall(r"[a-z']+", utterance.text.lower())))
    things = [word for word in vocabulary if word.classes == ("thing",)]
    seen = {
        weight: [counts[w.forms[0]] + counts[w.forms[1]] for w in things if w.weight == weight]
        for weight in (1.0, 0.2)
    }
    means = {weight: sum(c) / len(c) for weight, c in seen.items()}
    assert len(seen[1.0]) > 800
    assert means[0.2] * 3 < means[1.0] < means[0.2] * 8
    # Counts of words that are drawn evenly vary as chance does: variance = mean.
    even = [count for count in seen[1.0] if count < 30]  # some are in templates as well
    mean = sum(even) / len(even)
    assert sum((count - mean) ** 2 for count in even) / len(even) < 1.5 * mean
    for word in ("yesterday", "half", "told", "said", "bought", "children", "women"):
        assert counts[word] * 10 > 100, word  # of 40,000


def test_shares_of_the_sources_are_those_written(corpus):
    texts = [line.lower() for utterance in corpus[1] for line in utterance.lines]
    shares = Counter(re.sub(r"[.?!]", "", text) for text in texts)
    assert shares["an example of something"] / len(texts) == pytest.approx(lines.EXAMPLE_SHARE, abs=0.03)
    assert shares["a gloss of something"] / len(texts) == pytest.approx(lines.GLOSS_SHARE, abs=0.02)
    total = lines.COMMON_SHARE + lines.EXAMPLE_SHARE + lines.GLOSS_SHARE + lines.TEMPLATE_SHARE
    assert total == pytest.approx(1.0)


@pytest.mark.parametrize("sentence", held_out_sentences())
def test_held_out_sentences_and_near_copies_are_known(sentence):
    changed = f"Yesterday {sentence.lower().rstrip('.?!')}, again"
    assert is_near_held_out(sentence)
    assert is_near_held_out(changed)


def test_near_copies_and_long_lines_are_not_spoken_whatever_their_source(monkeypatch):
    near = held_out_sentences()[3].replace("London", "Rome")
    source = Lines(["a plain example of this"], ["a plain gloss of this"], [], [])
    supply = iter([near, near.lower(), "long " * 25, "Something else is said here."])
    monkeypatch.setattr(Lines, "_any_line", lambda self, rng: next(supply))
    assert source._line(Random(0)) == "Something else is said here."


def test_a_word_survives_its_row():
    word = Word("adj", ("useful", ""), ("attribute", "predicate"), 0.2)
    assert Word.of_row(word.row()) == word
