"""Plain sentences of common words: grammatical, mostly meaningless, each word in many contexts.

The spelling of English does not tell its sound, so a word is spoken right when it was heard often. WordNet's lines have
26,000 words, most of them once; here some two thousand come up evenly. A sentence is a pure function of
the generator passed in and of the words (`words.py`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from random import Random

from checkpoints.speaking.recipe.templates import DAYS, MONTHS, NAMES, number_words
from checkpoints.speaking.recipe.words import Word


def _list(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return text.split(", ")


BASE, THIRD, PAST, PARTICIPLE, ING = range(5)
_WITH_PREPOSITION = _phrases(
    "look at, listen to, wait for, talk about, talk to, think about, work for, work with, pay for, ask for, care about, "
    "laugh at, point at, smile at, walk around, sit near, stand behind, live near, run to, go to, come from, "
    "belong to, agree with, play with, read about, write about, hear about, learn about, dream about, worry about, "
    "speak to, speak with, travel with, move to, arrive at, stop at, look after, look for, depend on, turn to"
)
_GIVING = _list("give send show bring sell lend offer buy teach tell read write hand pass throw")
_THINKING = _list(
    "say think know believe hope hear forget remember see feel notice understand learn explain decide"
)
_TELLING = _list("tell remind show")
_INTENDING = _list(
    "want need try decide hope plan begin like learn promise forget start love prefer refuse continue"
)
_ASKING = _list("ask tell want help teach expect invite allow order force")
_DOING = _list("start stop finish keep enjoy begin avoid like love hate continue")
_STATES = _list("seem look feel become sound remain stay get")
REQUIRED_VERBS = frozenset(
    {
        *(pair.split()[0] for pair in _WITH_PREPOSITION),
        *(_GIVING + _THINKING + _TELLING + _INTENDING + _ASKING + _STATES + _DOING),
    }
)
_TIMES_PAST = _phrases(
    "yesterday, last night, last week, last month, last year, last {weekday}, {count} days ago, {count} years ago, this morning, "
    "yesterday morning, yesterday evening, on {weekday}, in {month}, at {hour}, a long time ago, a few minutes ago, "
    "the day before yesterday, half an hour ago, an hour ago, before {hour}, after lunch, during the {season}, at night"
)
_TIMES_FUTURE = _phrases(
    "tomorrow, tonight, next week, next month, next year, next {weekday}, in {count} days, in {count} minutes, soon, later, "
    "tomorrow morning, tomorrow afternoon, on {weekday}, in {month}, at {hour}, this evening, this weekend, "
    "in half an hour, in an hour, after dinner, before {hour}, some day, until {weekday}"
)
_TIMES_NOW = _phrases(
    "every day, every morning, every week, every {weekday}, every year, on weekends, at home, once a week, twice a day, "
    "all day, all the time, in the {season}, at {hour}, these days, right now, today, in the morning, in the evening, "
    "each month, three times a week, most of the time, even on {weekday}"
)
_OFTEN = _list(
    "always never often sometimes usually also still only hardly really just almost probably rarely finally"
)
_MODALS = _list(
    "can could should must will would might may cannot can't couldn't shouldn't won't wouldn't mustn't"
)
_PREPOSITIONS = _list(
    "in near behind under on in at by beside inside outside across along above below between around to from"
)
_SEASONS = _list("spring summer autumn winter night day week weekend holidays morning")
_SUBORDINATE = _list("because when while after before although if until since unless though as whenever")
_OWNERS = _list("my your his her our their its")
_DID_NOT = ("did not", "didn't")
_SAYINGS = (
    "Good morning! Good afternoon. Good evening! Hello there. Hi! Excuse me. Thanks. Thank you! I'm sorry. Yes, of course. "
    "No, thanks. Welcome back! See you soon. Well, all right. Never mind. Oh no! Please. Sure. Listen. Okay."
)
_OPENINGS = [saying.strip() for saying in re.findall(r"[^.!]+[.!]", _SAYINGS)]
_AN = re.compile(r"(?!one\b|once\b|uni[tvqfo]|use|usual|europe|eu)[aeiou]|hour|honest|honor|heir")

_REFLEXIVE = re.compile(r"\b(I\b.*\bme|we\b.*\bus|you\b.*\byou|he\b.*\bhim|they\b.*\bthem)\b", re.IGNORECASE)

# Slots: {past} and the like are whole clauses, {do} and the like a verb with all that follows it.
PATTERNS: Sequence[str] = [
    part.strip()
    for part in """
{past} {when_past}. | {past}. | {past} {when_past}. | {now} {when_now}. | {now}. | {future} {when_future}. | {future}.
{is}. | {was} {when_past}. | {be_doing}. | {was_doing} {when_past}. | {has_done}. | {modal}. | {modal} {when_future}.
{not_past}. | {not_now}. | {there}. | {past} {sub} {past}. | {Sub} {past}, {past}. | {now} {link} {now}. | {future} if {now}.
When {past}, {past}. | If {now}, {future}. | {past}, and {past}. | {past}, but {not_past}. | {now}, so {future}.
Did {np} {do}? | Did {np} {do} {when_past}? | Does {np1} {do}? | Do {nps} {do}? | Will {np} {do} {when_future}? | Can {np} {do}?
Why did {np} {do}? | When will {np} {do}? | Where did {np} {do}? | How can {np} {do}? | What did {person} say about {thing}?
Who {did}? | Who {does}? | What happened to {thing}? | Which {noun} did {person} {take}? | Whose {noun} is {adj}?
How many {nouns} are there {where}? | How much {mass} do {nps} need? | How {adj} is {thing}? | Is {thing} {adj}?
Are {things} {adj} or {adj}? | Were {nps} {adj} {when_past}? | Have {nps} {done}? | Has {np1} ever {done}?
Please {do}. | Please {do} {when_future}. | {Do}. | {Do}, please. | Please don't {do}. | Do not {do}. | Never {do}. | Let's {do}.
Let us {do} {when_future}. | Could you {do}, please? | Would you like to {do}? | Can you help me to {do}? | I'd like {a}, please.
May I {do}? | Shall we {do}? | I want to {do}. | I have to {do} {when_future}. | You need to {do}. | It's time to {do}.
It is {adj} to {do}. | It was {adj} that {past}. | {doing} is {adj}. | {Name} likes {doing}. | They stopped {doing}.
{thing} is {adjer} than {thing}. | {things} are more {adjlong} than {things}. | {thing} was as {adj} as {thing}. | {thing} was too {adj}.
{thing} and {thing} were {adj}. | Either {thing} or {thing} is {adj}. | Both {things} and {things} are {adj}. | Not only {thing}, but also {thing}.
{Name} said that {past}. | Nobody knows why {past}. | Everybody thinks that {now}. | Somebody told me that {past}. | I don't know if {now}.
I hope {future}. | Nothing about {thing} is {adj}. | Something {adj} happened {when_past}. | Everything in {place} was {adj}. | Anyone can {do}.
Here is {a}. | That is {a}. | This is {a} of {person}. | These are {things}. | Those were {things}. | It's {a}. | What {a}!
The {noun} of {thing} was {adj}. | {Person} who {did} {did}. | The {noun} that {person} {took} is {adj}. | {Count} {nouns} and {count} {nouns}.
{thing}, {thing}, and {thing}. | {mass} and {mass} are {adj}. | {Some} of {things} were {adj}. | {thing} was {made} by {person}. | {thing} is {made} {when_now}.
{things} were {made} {when_past}. | {thing} has been {made} {manner}. | {thing} will be {made} {when_future}. | {opening} {Future}. | {opening} {Past}.
{opening} {Now}. | {manner}, {past}. | {When_past} {past}. | {When_future} {future}. | Instead of {doing}, {past}. | Without {mass}, {person} couldn't {do}.
{adj}, {adj}, and {adj}. | {nouns}, {nouns}, {nouns}. | {doing} and {doing} are {adj}. | {person} used to {do}. | {person} was going to {do}.
""".replace("\n", "|").split("|")
    if part.strip()
]


class CommonSentences:
    """Draws of one kind are weighted as the words are.

    Raises ValueError naming the verbs that patterns need and `words` lacks.
    """

    def __init__(self, words: Iterable[Word]) -> None:
        pools: dict[str, list[Word]] = defaultdict(list)
        self._verbs: dict[str, Word] = {}
        for word in words:
            for name in word.classes:
                pools[name].append(word)
            if word.kind == "verb":
                self._verbs[word.forms[0]] = word
            if word.kind == "adj" and "predicate" in word.classes:
                pools["compared" if word.forms[1] else "uncompared"].append(word)
        missing = sorted(REQUIRED_VERBS - set(self._verbs))
        if missing:
            raise ValueError(f"expected the verbs of the patterns among the words, these are not: {missing}")
        pools["noun"] = [*pools["thing"], *pools["thing"], *pools["person"], *pools["place"]]
        self._pools = {
            name: (pool, list(accumulate(word.weight for word in pool))) for name, pool in pools.items()
        }

    def sentence(self, rng: Random) -> str:
        """One sentence; capitalised, and with its final mark."""
        while _REFLEXIVE.search(text := self._fill(rng, rng.choice(PATTERNS))):
            pass
        return text[0].upper() + text[1:]

    # ---------------------------------------------------------------- words
    def _draw(self, rng: Random, pool: str) -> Word:
        words, weights = self._pools[pool]
        return rng.choices(words, cum_weights=weights)[0]

    def _adjective(self, rng: Random) -> str:
        return self._draw(rng, "predicate").forms[0]

    def _described(self, rng: Random, noun: str) -> str:
        return f"{self._draw(rng, 'attribute').forms[0]} {noun}" if rng.random() < 0.4 else noun

    # ---------------------------------------------------------------- noun phrases
    def _one(self, rng: Random, pool: str) -> str:
        """A singular phrase with its article."""
        noun = self._described(rng, self._draw(rng, pool).forms[0])
        source = rng.random()
        if source < 0.3 and pool != "mass":
            return with_article(noun)
        owner = rng.choice(_OWNERS) if rng.random() < 0.8 else f"{rng.choice(NAMES)}'s"
        others = _list("this that every each another") if pool != "mass" else _list("this that some")
        return f"{'the' if source < 0.65 else owner if source < 0.85 else rng.choice(others)} {noun}"

    def _many(self, rng: Random, pool: str) -> str:
        noun = self._described(rng, self._draw(rng, pool).forms[1])
        many = _list("the the some many these those all most few several no other")
        source = rng.random()
        if source < 0.15:
            return f"{number_words(rng.choice([2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 15, 20, 30, 40, 50, 60, 100]))} {noun}"
        return f"{rng.choice(_OWNERS) if source < 0.35 else rng.choice(many)} {noun}"

    def _much(self, rng: Random) -> str:
        noun = self._described(rng, self._draw(rng, "mass").forms[0])
        return f"{rng.choice(['the', 'some', 'this', 'that', 'more', 'enough', rng.choice(_OWNERS)])} {noun}"

    def _person(self, rng: Random) -> str:
        source = rng.random()
        if source < 0.3:
            return rng.choice(NAMES)
        return self._one(rng, "person")

    def _thing(self, rng: Random) -> str:
        source = rng.random()
        return (
            self._one(rng, "thing")
            if source < 0.75
            else self._much(rng)
            if source < 0.93
            else self._place(rng)
        )

    def _things(self, rng: Random) -> str:
        source = rng.random()
        pool = (
            "thing" if source < 0.85 else "people" if source < 0.9 else "place" if source < 0.97 else "many"
        )
        return self._many(rng, pool if pool in self._pools else "thing")

    def _place(self, rng: Random) -> str:
        return f"{rng.choice(['the', 'the', 'this', 'that'])} {self._draw(rng, 'place').forms[0]}"

    def _where(self, rng: Random) -> str:
        preposition = rng.choice(_PREPOSITIONS)
        if preposition == "between":
            return f"between {self._one(rng, 'thing')} and {self._one(rng, 'thing')}"
        return f"{preposition} {self._one(rng, rng.choice(['thing', 'thing', 'place']))}"

    def _subject(self, rng: Random, number: str = "") -> tuple[str, str]:
        """A phrase, and how it agrees: I, one or many."""
        many = rng.random() < 0.4 if not number else number == "many"
        source = rng.random()
        if source < 0.35:
            pronouns = (
                _list("you we they")
                if many
                else _list("I he she it he she")
                if not number
                else _list("he she it")
            )
            subject = rng.choice(pronouns)
            return subject, "I" if subject == "I" else "many" if many else "one"
        if many:
            return (
                self._many(rng, rng.choice(["person", "person", "people"]))
                if source < 0.65
                else self._things(rng)
            ), "many"
        return (self._person(rng) if source < 0.7 else self._thing(rng)), "one"

    def _object(self, rng: Random) -> str:
        source = rng.random()
        if source < 0.1:
            return rng.choice(_list("it him her them me us you something nothing everything"))
        return self._thing(rng) if source < 0.65 else self._things(rng)

    def _somebody(self, rng: Random) -> str:
        source = rng.random()
        if source < 0.25:
            return rng.choice(_list("him her them me us you everybody somebody nobody"))
        return self._person(rng) if source < 0.7 else self._many(rng, rng.choice(["person", "people"]))

    # ---------------------------------------------------------------- verbs with what follows
    def _predicate(self, rng: Random, form: int, depth: int = 0) -> str:
        """A verb in a form, and its objects and adverbials."""
        source = rng.random()
        if source < 0.36:
            text = f"{self._draw(rng, 'something').forms[form]} {self._object(rng)}"
        elif source < 0.5:
            text = f"{self._draw(rng, 'somebody').forms[form]} {self._somebody(rng)}"
        elif source < 0.65:
            text = self._draw(rng, "alone").forms[form]
            text += f" {self._draw(rng, 'manner').forms[0]}" if rng.random() < 0.5 else f" {self._where(rng)}"
        elif source < 0.75:
            verb, preposition = rng.choice(_WITH_PREPOSITION).split()
            text = f"{self._verbs[verb].forms[form]} {preposition} {self._object(rng)}"
        elif source < 0.81:
            text = f"{self._form(rng, _GIVING, form)} {self._somebody(rng)} {self._one(rng, 'thing')}"
        elif source < 0.86:
            text = f"{self._form(rng, _STATES, form)} {self._adjective(rng)}"
        elif not depth and source < 0.88:
            text = f"{self._form(rng, _DOING, form)} {self._predicate(rng, ING, 1)}"
        elif depth or source < 0.89:
            text = f"{self._draw(rng, 'something').forms[form]} {self._object(rng)} {self._where(rng)}"
        elif source < 0.92:
            text = f"{self._form(rng, _INTENDING, form)} to {self._predicate(rng, BASE, 1)}"
        elif source < 0.95:
            text = (
                f"{self._form(rng, _ASKING, form)} {self._somebody(rng)} to {self._predicate(rng, BASE, 1)}"
            )
        elif source < 0.985:
            told = self._form(rng, _THINKING, form)
            text = f"{told} {'that ' if rng.random() < 0.6 else ''}{self._clause(rng, 'past', 1)}"
        else:
            text = (
                f"{self._form(rng, _TELLING, form)} {self._somebody(rng)} that {self._clause(rng, 'past', 1)}"
            )
        return (
            f"{text} {self._draw(rng, 'manner').forms[0]}" if source < 0.36 and rng.random() < 0.15 else text
        )

    def _form(self, rng: Random, verbs: Sequence[str], form: int) -> str:
        return self._verbs[rng.choice(verbs)].forms[form]

    def _made(self, rng: Random) -> str:
        return self._draw(rng, "something").forms[PARTICIPLE]

    # ---------------------------------------------------------------- clauses
    def _clause(self, rng: Random, tense: str, depth: int = 0) -> str:
        subject, agreement = self._subject(rng)
        third = THIRD if agreement == "one" else BASE
        often = f"{rng.choice(_OFTEN)} " if rng.random() < 0.12 else ""
        if tense == "past":
            return f"{subject} {often}{self._predicate(rng, PAST, depth)}"
        if tense == "now":
            return f"{subject} {often}{self._predicate(rng, third, depth)}"
        if tense == "future":
            will = " will" if subject not in _PRONOUNS or rng.random() < 0.5 else "'ll"
            return f"{subject}{will} {often}{self._predicate(rng, BASE, depth)}"
        if tense == "modal":
            return f"{subject} {rng.choice(_MODALS)} {self._predicate(rng, BASE, depth)}"
        if tense == "not_past":
            return f"{subject} {rng.choice(_DID_NOT)} {self._predicate(rng, BASE, depth)}"
        if tense == "not_now":
            do = rng.choice(["does not", "doesn't"] if agreement == "one" else ["do not", "don't"])
            return f"{subject} {do} {self._predicate(rng, BASE, depth)}"
        be = {"I": "am", "one": "is", "many": "are"}[agreement]
        was = "were" if agreement == "many" else "was"
        if tense == "has_done":
            has = rng.choice(
                ["has", "hasn't", "has already"] if agreement == "one" else ["have", "haven't", "have never"]
            )
            return f"{subject} {has} {self._predicate(rng, PARTICIPLE, depth)}"
        if tense == "be_doing":
            short = {"am": "'m", "is": "'s", "are": "'re"}[be]
            short = f"{subject}{short}" if subject in _PRONOUNS and rng.random() < 0.5 else f"{subject} {be}"
            return f"{short} {rng.choice(['', '', 'not ', 'still '])}{self._predicate(rng, ING, depth)}"
        if tense == "was_doing":
            return f"{subject} {was} {self._predicate(rng, ING, depth)}"
        if tense == "is":
            return f"{subject} {be} {rng.choice(['', '', 'very ', 'not ', 'quite ', 'always '])}{self._adjective(rng)}"
        maybe_not = rng.choice([was, was, f"{was}n't"])
        return f"{subject} {maybe_not} {self._adjective(rng)}"

    def _there(self, rng: Random) -> str:
        if rng.random() < 0.5:
            return f"there {rng.choice(['is', 'was'])} {with_article(self._described(rng, self._draw(rng, 'noun').forms[0]))} {self._where(rng)}"
        return f"there {rng.choice(['are', 'were'])} {rng.choice(['no', 'many', 'some', 'a few', 'two', 'three'])} {self._described(rng, self._draw(rng, 'noun').forms[1])} {self._where(rng)}"

    def _when(self, rng: Random, times: Sequence[str]) -> str:
        return self._fill(rng, rng.choice(times))

    # ---------------------------------------------------------------- slots
    def _fill(self, rng: Random, pattern: str) -> str:
        text = ""
        for part in pattern.split("{"):
            slot, brace, rest = part.partition("}")
            text += self._slot(rng, slot) + rest if brace else part
        return text

    def _slot(self, rng: Random, slot: str) -> str:
        if slot[0].isupper():
            text = self._slot(rng, slot.lower())
            return text[0].upper() + text[1:]
        if slot in _CLAUSES:
            return self._clause(rng, slot)
        return _SLOTS[slot](self, rng)


def with_article(noun: str) -> str:
    """
    >>> with_article("hour"), with_article("old uniform"), with_article("uniform")
    ('an hour', 'an old uniform', 'a uniform')
    """
    return f"{'an' if _AN.match(noun) else 'a'} {noun}"


_PRONOUNS = frozenset(_list("I you he she it we they"))
_CLAUSES = frozenset(_list("past now future modal not_past not_now has_done be_doing was_doing is was"))
_Slot = Callable[[CommonSentences, Random], str]
_SLOTS: dict[str, _Slot] = {
    "np": lambda s, rng: s._subject(rng)[0],
    "np1": lambda s, rng: s._subject(rng, "one")[0],
    "nps": lambda s, rng: s._subject(rng, "many")[0],
    "person": lambda s, rng: s._person(rng),
    "thing": lambda s, rng: s._thing(rng),
    "things": lambda s, rng: s._things(rng),
    "place": lambda s, rng: s._place(rng),
    "where": lambda s, rng: s._where(rng),
    "mass": lambda s, rng: s._draw(rng, "mass").forms[0],
    "noun": lambda s, rng: s._draw(rng, "noun").forms[0],
    "nouns": lambda s, rng: s._draw(rng, "noun").forms[1],
    "a": lambda s, rng: with_article(s._described(rng, s._draw(rng, "noun").forms[0])),
    "some": lambda s, rng: rng.choice(_list("some many most")),
    "adj": lambda s, rng: s._adjective(rng),
    "adjer": lambda s, rng: s._draw(rng, "compared").forms[1],
    "adjlong": lambda s, rng: s._draw(rng, "uncompared").forms[0],
    "manner": lambda s, rng: s._draw(rng, "manner").forms[0],
    "do": lambda s, rng: s._predicate(rng, BASE),
    "does": lambda s, rng: s._predicate(rng, THIRD),
    "did": lambda s, rng: s._predicate(rng, PAST),
    "done": lambda s, rng: s._predicate(rng, PARTICIPLE, 1),
    "doing": lambda s, rng: s._predicate(rng, ING, 1),
    "take": lambda s, rng: s._draw(rng, "something").forms[BASE],
    "took": lambda s, rng: s._draw(rng, "something").forms[PAST],
    "made": lambda s, rng: s._made(rng),
    "there": lambda s, rng: s._there(rng),
    "sub": lambda s, rng: rng.choice(_SUBORDINATE),
    "link": lambda s, rng: rng.choice(_list("and or but so because while")),
    "when_past": lambda s, rng: s._when(rng, _TIMES_PAST),
    "when_now": lambda s, rng: s._when(rng, _TIMES_NOW),
    "when_future": lambda s, rng: s._when(rng, _TIMES_FUTURE),
    "name": lambda s, rng: rng.choice(NAMES),
    "weekday": lambda s, rng: rng.choice(DAYS),
    "month": lambda s, rng: rng.choice(MONTHS),
    "season": lambda s, rng: rng.choice(_SEASONS),
    "count": lambda s, rng: number_words(
        rng.choice([2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 30, 40, 50, 70, 90])
    ),
    "hour": lambda s, rng: _hour(rng),
    "opening": lambda s, rng: rng.choice(_OPENINGS),
}


def _hour(rng: Random) -> str:
    hour = number_words(rng.randrange(1, 13))
    return rng.choice(
        [f"half past {hour}", f"a quarter to {hour}", f"{hour} o'clock", hour, "noon", f"{hour} thirty"]
    )
