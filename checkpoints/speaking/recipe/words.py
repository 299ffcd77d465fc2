"""Common words with their inflected forms: what `common.py` makes sentences of.

Which words are common, of which class, and with which irregular forms is read from WordNet 3.0
(Debian `wordnet-base`; cntlist(5), wndb(5), morphy(7)): tag counts of senses, lexicographer files, verb frames,
exception lists. `EVERYDAY` adds words of daily life that the tagged texts of 1961 happen to have seldom.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

NUM_COMMON = 1_500  # lemmas drawn evenly ...
NUM_WORDS = 3_000  # ... and the next ones at `RARER`
RARER, DAILY = 0.2, 2.0  # DAILY: of `EVERYDAY`
IRREGULAR = 2.0  # times as often, for the forms that no rule gives
_FILES = {"noun": ("1",), "verb": ("2",), "adj": ("3", "5"), "adv": ("4",)}
_PERSON, _ACTS, _PLACES, _MASS_FILES = "18", "04", {"15"}, {"12", "27"}
_SOMETHING, _SOMEBODY, _ALONE = {"8"}, {"9"}, {"2"}
_OFTEN_ENOUGH = 0.25  # of a verb's tags, for a frame to be its usual one


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


EVERYDAY = _set("""
apple banana bread butter cheese coffee tea milk sugar salt pepper egg rice soup meat chicken fish potato tomato onion
orange lemon cake cookie chocolate juice wine beer breakfast lunch dinner meal kitchen bathroom bedroom garden garage
roof ceiling wall floor window door table chair sofa lamp carpet mirror shelf cupboard oven fridge plate bowl glass cup
knife fork spoon bottle towel soap blanket pillow clock key bag box basket shirt coat jacket hat shoe sock dress skirt
glove scarf button pocket ring watch umbrella wallet car bus train plane bicycle truck boat ship taxi ticket airport
station bridge road street corner traffic map engine wheel doctor nurse teacher student farmer driver waiter cook baker
lawyer engineer artist singer actor writer painter soldier pilot manager secretary officer neighbor guest friend
brother sister mother father daughter son uncle aunt cousin grandmother grandfather baby husband wife child woman man
boy girl dog cat horse cow pig sheep bird mouse rabbit lion bear monkey duck snake spider bee tree flower grass leaf
forest mountain river lake beach island sea ocean sky cloud rain snow wind storm sun moon star weather spring summer
autumn winter morning afternoon evening night lesson school homework exam book pen pencil paper page letter notebook
computer phone screen keyboard message email picture camera radio television newspaper magazine movie song music guitar
piano violin drum game ball team player coach race bank market shop store hotel restaurant hospital church museum
library theater park office factory village city town country farm field museum nose ear eye mouth tooth tongue hair
hand arm leg foot knee finger shoulder head heart stomach medicine headache fever money dollar cent price bill present
party birthday wedding holiday vacation trip visit meeting student ladder hammer
happy sad angry tired hungry thirsty busy lazy clever polite kind rude brave quiet loud funny boring sick healthy hot
cold warm cool wet dry clean dirty fresh sweet sour bitter soft hard heavy light thick thin wide narrow tall short long
young old new big small huge tiny cheap expensive easy difficult early late fast slow empty full open red blue green
yellow black white brown gray pink purple orange dark bright round square sharp strong weak rich poor safe dangerous
beautiful ugly nice wonderful terrible strange famous important favorite sunny cloudy windy rainy foggy stormy
wash clean cook bake eat drink cut wake sleep rest sit stand walk run jump swim dance sing laugh cry smile shout whisper
speak talk read write draw paint learn teach study finish start begin open close lock break fix repair build buy sell
pay borrow lend carry push pull lift drop throw catch kick climb ride drive fly travel arrive leave wait visit meet call
invite thank forget remember choose win lose find hide steal count measure print play freeze
slowly quickly carefully quietly loudly happily sadly gently clearly easily badly politely
""")
_UNSPOKEN = _set("bastard christ damn devil hell rape redcoat savage sex sexual slave")  # need no practice
_GRAMMAR = _set("""
be have do can will shall may must let one other two such many first every all same more some much no next few each any another
most own both several enough three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty fifty
sixty hundred thousand million second third fourth fifth sixth last least less little only very else ago o'clock not
fewer former latter certain mere main very sheer utter a i am pm ii iii he it us un dr st ma pa ad th non anti ex re
hypothalamic tattered vocational anode thing way lot sort kind bit let's wont ought dare used oneself somebody someone
anyone one's everybody
""")  # `common.py` has them where they belong
_MASS = _set("""
music money bread butter cheese coffee tea milk sugar salt rice soup meat juice wine beer rain snow traffic homework
furniture information news advice knowledge help work weather luck luggage health food fruit grass hair soap paper glass
time life death business trade progress research evidence education training equipment electricity energy power heat
light fun peace war truth freedom justice love trouble behavior attention confidence courage patience strength wealth
poverty health safety security music literature poetry mathematics physics science history philosophy economics housing
clothing transportation production communication leadership membership traffic travel blood flesh skin dirt dust smoke
fire steam water ice sand mud land ground earth air sunlight darkness silence sleep labor land cash credit debt income
employment unemployment medicine cotton wool silk leather wood metal steel iron gold silver oil gas coal paint ink
chocolate pepper fish chicken cake violence intelligence assistance growth consciousness existence significance
data media publicity machinery scenery jewelry pottery vegetation permission protection supervision authority content vision
reality welfare agriculture aid stuff breath youth faith guilt pride shame
""")
_PLURAL_ONLY = _set("people police clothes trousers pants scissors goods cattle folk stairs headquarters")
_INVARIABLE = _set("""
cut put set let hit hurt shut cost cast burst split spread bet quit shed thrust rid read broadcast forecast
""")
_REGULAR = _set("""
work address curse heave learn burn smell dream spell leap spill clothe strive dwell spoil lean kneel brother gas camera
formula antenna apparatus vacuum cry hypothalamus chorus medium maximum focus abode
""")  # the listed form is archaic, learned or another sense's
_MANS = _set("human german roman talisman shaman norman ottoman")
_COMPARED = _set("""
new great old long high low small young dark full clear hard close white short tall deep wide light near wild sharp
thick warm soft cool fresh green brown black blue gray quiet rich slow strange safe sweet poor loud late nice huge pale
firm bright broad quick cheap clean fair rough weak tough brief calm smart tight plain swift wise fierce bold mild proud
faint brave cruel rude clever fast cold
""")  # those without a listed form that take -er
_NO_MANNER = _set("""
early only hardly nearly really daily fairly merely likely scarcely barely simply mainly mostly partly largely
virtually practically approximately particularly usually certainly probably apparently actually generally possibly
primarily essentially relatively extremely highly slightly namely yearly family lately recently finally widely solely
presumably evidently obviously exactly clearly fully previously originally newly equally nightly purely
presently currently eventually occasionally frequently ultimately initially equally
""")
_PARTICIPLES = {"come": "come", "become": "become", "overcome": "overcome", "run": "run"}
_PASTS = {
    "bear": ("bore", "born"),
    "beat": ("beat", "beaten"),
    "bid": ("bid", "bid"),
    "bind": ("bound", "bound"),
    "forget": ("forgot", "forgotten"),
    "get": ("got", "gotten"),
    "hang": ("hung", "hung"),
    "lie": ("lay", "lain"),
    "show": ("showed", "shown"),
    "prove": ("proved", "proven"),
    "light": ("lit", "lit"),
    "wake": ("woke", "woken"),
    "swell": ("swelled", "swollen"),
    "fly": ("flew", "flown"),
    "spit": ("spat", "spat"),
    "fit": ("fit", "fit"),
    "wet": ("wet", "wet"),
    "slide": ("slid", "slid"),
    "forbid": ("forbade", "forbidden"),
}


@dataclass(frozen=True, slots=True)
class Word:
    """forms: noun (one, many); verb (base, -s, past, participle, -ing); adjective (plain, comparative or "").

    classes: of person, thing, place, mass, people; something, somebody, alone; attribute, predicate; manner."""

    kind: str
    forms: tuple[str, ...]
    classes: tuple[str, ...]
    weight: float

    def row(self) -> str:
        return f"{self.kind} {','.join(self.classes)} {self.weight:g} {'/'.join(self.forms)}"

    @classmethod
    def of_row(cls, row: str) -> Word:
        kind, classes, weight, forms = row.split(" ")
        return cls(kind, tuple(forms.split("/")), tuple(classes.split(",")), float(weight))


# ---------------------------------------------------------------- inflection, with WordNet's exceptions
Exceptions = Mapping[str, Sequence[str]]  # the irregular forms of a lemma, as listed


def plural(noun: str, exceptions: Exceptions) -> str:
    """
    >>> plural("city", {}), plural("child", {"child": ["children"]})
    ('cities', 'children')
    """
    irregular = [form for form in exceptions.get(noun, ()) if form.isalpha()]
    if irregular and noun not in _REGULAR:
        return irregular[0]
    if noun.endswith("man") and noun not in _MANS:
        return f"{noun[:-3]}men"  # `women` is in no list
    return _ruled_plural(noun)


def _ruled_plural(noun: str) -> str:
    return third_person(noun) if not noun.endswith("o") else f"{noun}s"


def third_person(verb: str) -> str:
    if re.search(r"(s|x|z|ch|sh|[^aeiou]o)$", verb):
        return f"{verb}es"
    return f"{verb[:-1]}ies" if re.search(r"[^aeiou]y$", verb) else f"{verb}s"


def past_forms(verb: str, exceptions: Exceptions) -> tuple[str, str]:
    """Past and participle; a listed form before a ruled one.

    >>> past_forms("begin", {"begin": ["began", "begun"]}), past_forms("try", {})
    (('began', 'begun'), ('tried', 'tried'))
    """
    if verb in _PASTS:
        return _PASTS[verb]
    if verb in _INVARIABLE:
        return verb, verb
    listed = [form for form in exceptions.get(verb, ()) if not form.endswith("ing") and form.isalpha()]
    listed = [form for form in listed if form != third_person(verb)]
    if not listed or verb in _REGULAR:
        stem = (
            verb[:-1] if verb.endswith("e") else f"{verb[:-1]}i" if re.search(r"[^aeiou]y$", verb) else verb
        )
        return f"{stem}ed", f"{stem}ed"
    participles = [form for form in listed if re.search(r"([^a]n|one|[^aeiou]u[nm][gk]?)$", form)]
    pasts = [form for form in listed if form not in participles] or listed
    participle = _PARTICIPLES.get(verb) or (participles or pasts)[0]
    return pasts[0], participle


def ing_form(verb: str, exceptions: Exceptions) -> str:
    listed = [form for form in exceptions.get(verb, ()) if form.endswith("ing")]
    if listed:
        return listed[0]
    if verb.endswith("ie"):
        return f"{verb[:-2]}ying"
    return f"{verb[:-1]}ing" if re.search(r"[^eoy]e$", verb) else f"{verb}ing"


def comparative(adjective: str, exceptions: Exceptions) -> str:
    """Of short adjectives; "" for those that take `more`."""
    listed = [form for form in exceptions.get(adjective, ()) if form.endswith(("er", "worse", "more"))]
    if listed and (re.search(r"[^aeiou]y$", adjective) or f"{adjective}{adjective[-1]}er" in listed):
        return listed[0]
    if adjective not in _COMPARED:
        return ""
    return f"{adjective}r" if adjective.endswith("e") else f"{adjective}er"


def is_irregular(word: Word) -> bool:
    """Whether a form of it, of plural, past or participle, is none that the rules give.

    >>> is_irregular(Word("noun", ("child", "children"), ("person",), 1.0))
    True
    """
    base, *others = word.forms
    if word.kind == "noun":
        return word.forms[1] not in {base, _ruled_plural(base)}
    return word.kind == "verb" and not all(form.endswith("ed") for form in others[1:3])


# ---------------------------------------------------------------- WordNet's files
def collect_words(wordnet: Path, required: frozenset[str] = frozenset()) -> list[Word]:
    """The common words, the most frequent first. required: verbs that are taken however rare.

    Raises FileNotFoundError when the dictionary isn't there.
    """
    tags, senses = _tags(wordnet)
    known = {kind: _senses(wordnet, kind, senses) for kind in _FILES}
    ranked = sorted((-count, kind, lemma) for (kind, lemma), count in tags.items() if lemma in known[kind])
    common = {(kind, lemma) for _, kind, lemma in ranked[:NUM_COMMON]}
    # A word of daily life counts as what it mostly is: `a watch`, not `to watch`, is decided by the tags.
    everyday = {
        (kind, lemma)
        for lemma in EVERYDAY
        for kind in _FILES
        if lemma in known[kind] and tags[kind, lemma] >= 0.3 * max(tags[k, lemma] for k in _FILES)
    }
    common |= everyday | {("verb", lemma) for lemma in required if lemma in known["verb"]}
    chosen = dict.fromkeys((kind, lemma) for _, kind, lemma in ranked[:NUM_WORDS])
    chosen |= dict.fromkeys(sorted(common))
    exceptions = {kind: _exceptions(wordnet, kind) for kind in _FILES}
    words = []
    for kind, lemma in chosen:
        weight = DAILY if (kind, lemma) in everyday else 1.0 if (kind, lemma) in common else RARER
        word = _word(kind, lemma, known[kind], exceptions[kind], weight, required)
        if word is not None:
            words.append(replace(word, weight=weight * IRREGULAR) if is_irregular(word) else word)
    return words


def _word(
    kind: str,
    lemma: str,
    known: Mapping[str, Counter[str]],
    exceptions: Exceptions,
    weight: float,
    required: frozenset[str],
) -> Word | None:
    """None for what no pattern has a place for."""
    usual = known[lemma]
    forms: tuple[str, ...] = (lemma,)
    classes: list[str] = []
    if kind == "noun":
        if lemma in _PLURAL_ONLY:
            return Word(
                kind, (lemma, lemma), ("people",) if lemma in {"people", "police"} else ("many",), weight
            )
        if (lemma.endswith("s") and lemma[:-1] in known) or lemma.endswith("men"):
            return None  # a plural
        file = usual.most_common(1)[0][0]
        if (
            lemma in _MASS
            or file in _MASS_FILES
            or lemma.endswith(("ness", "ism", "ics"))
            or (file == _ACTS and lemma.endswith("ing"))
        ):
            classes = ["mass"]
        else:
            classes = ["person" if file == _PERSON else "place" if file in _PLACES else "thing"]
        forms = (lemma, plural(lemma, exceptions))
        if file == _PERSON and forms[1] != _ruled_plural(lemma):
            classes.append("people")  # men, women, children
    elif kind == "verb":
        total = usual["all"] * _OFTEN_ENOUGH
        for name, frames in (("something", _SOMETHING), ("somebody", _SOMEBODY), ("alone", _ALONE)):
            if sum(usual[frame] for frame in frames) >= total:
                classes.append(name)
        if lemma in required and not classes:
            classes = ["pattern"]
        forms = (lemma, third_person(lemma), *past_forms(lemma, exceptions), ing_form(lemma, exceptions))
    elif kind == "adj":
        classes = [name for name in ("attribute", "predicate") if usual[name]]
        forms = (lemma, comparative(lemma, exceptions))
    elif lemma.endswith("ly") and lemma not in _NO_MANNER:
        classes = ["manner"]
    return Word(kind, forms, tuple(classes), weight) if classes else None


def _tags(wordnet: Path) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str, str, int]]]:
    """Tag counts of lemmas and of senses. Source: cntlist(5), senseidx(5)."""
    file = wordnet / "cntlist.rev"
    if not file.exists():
        raise FileNotFoundError(f"no {file}: install Debian's wordnet-base")
    kinds = {number: kind for kind, numbers in _FILES.items() for number in numbers}
    lemmas: Counter[tuple[str, str]] = Counter()
    senses: Counter[tuple[str, str, str, int]] = Counter()
    for row in file.read_text(encoding="utf-8").splitlines():
        key, _, count = row.split()
        lemma, _, rest = key.partition("%")
        number, lexicographer, identity = rest.split(":")[:3]
        lemmas[kinds[number], lemma] += int(count)
        senses[kinds[number], lemma, lexicographer, int(identity)] += int(count)
    return lemmas, senses


def _senses(
    wordnet: Path, kind: str, tags: Mapping[tuple[str, str, str, int], int]
) -> Mapping[str, Counter[str]]:
    """What each lemma is used as, weighted by tags: files of a noun, frames of a verb, places of an adjective."""
    known: dict[str, Counter[str]] = defaultdict(Counter)
    for lexicographer, words, frames in _synsets(wordnet / f"data.{kind}"):
        for i, (written, identity) in enumerate(words):
            lemma, _, marker = written.partition("(")
            if not re.fullmatch(r"[a-z]{2,}", lemma) or lemma in _GRAMMAR or lemma in _UNSPOKEN:
                continue
            weight = tags.get((kind, lemma, lexicographer, identity), 0) + 0.01
            uses: list[str] = [lexicographer]
            if kind == "verb":
                uses = ["all", *{frame for frame, number in frames if number in {0, i + 1}}]
            elif kind == "adj":
                uses = {"p)": ["predicate"], "a)": ["attribute"], "ip)": ["all"]}.get(
                    marker, ["attribute", "predicate"]
                )
            for use in uses:
                known[lemma][use] += weight  # type: ignore[assignment]
    return known


def _synsets(file: Path) -> Iterator[tuple[str, list[tuple[str, int]], list[tuple[str, int]]]]:
    """Lexicographer file, (word, id in it), (frame, number of the word or 0). Source: wndb(5). Slurs are left out."""
    if not file.exists():
        return
    for row in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if row.startswith("  "):
            continue
        data, _, gloss = row.partition("|")
        if gloss.startswith(" (ethnic slur)"):
            continue
        fields = data.split()
        count = int(fields[3], 16)
        words = [(fields[4 + 2 * i], int(fields[5 + 2 * i], 16)) for i in range(count)]
        rest = fields[5 + 2 * count + 4 * int(fields[4 + 2 * count]) :]
        frames = [(str(int(rest[i + 1])), int(rest[i + 2], 16)) for i in range(1, len(rest) - 2, 3)]
        yield fields[1], words, frames


def _exceptions(wordnet: Path, kind: str) -> Exceptions:
    """The irregular forms of each lemma. Source: morphy(7)."""
    file, found = wordnet / f"{kind}.exc", defaultdict(list)
    for row in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        form, *lemmas = row.split()
        for lemma in lemmas:
            found[lemma].append(form)
    return found
