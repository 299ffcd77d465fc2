"""Own sentences around numbers, dates, times, prices, letters, greetings and requests.

WordNet's examples have few of what people ask a voice for. Everything here is a pure function of
the generator passed in; half of the numbers are written as digits, as users write them, half as words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random


def _words(text: str) -> list[str]:
    return text.split()


_ONES = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth"}
_ORDINALS |= {"nine": "ninth", "twelve": "twelfth"}
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
NAMES = _words(
    "Anna Ben Clara David Emma Frank Grace Henry Irene Jack Kate Leo Maria Nick Olivia Paul Quinn Rosa Sam "
    "Tina Victor Wendy Alice Tom Julia Peter Susan Mark Laura James"
)
_CITIES = _words(
    "London Paris Berlin Boston Chicago Madrid Rome Tokyo Sydney Toronto Dublin Oslo Vienna Denver Seattle "
    "Glasgow Houston Cairo Delhi Athens"
)
_THINGS = _words(
    "apple book chair door engine flower garden hammer island jacket kettle lamp mirror needle orange pencil "
    "question radio spoon table umbrella village window yellow ticket bottle camera phone letter bridge train "
    "bicycle ladder blanket carpet candle basket pocket river mountain kitchen coffee sandwich computer"
)
_WEATHER = _words("sunny cloudy rainy windy foggy cold warm mild stormy dry humid freezing pleasant")
_ADVERBS = _words("slowly quickly carefully quietly gladly often never always again together today soon")
_PLACES = _words("station airport office school market library hospital museum park hotel bank harbour")


def number_words(value: int) -> str:
    """0 to 9,999 in words. Raises ValueError beyond.

    >>> number_words(4_021)
    'four thousand twenty one'
    """
    if not 0 <= value < 10_000:
        raise ValueError(f"expected 0 to 9,999, got {value}")
    if value < 20:
        return _ONES[value]
    for size, name in ((1_000, "thousand"), (100, "hundred")):
        if value >= size:
            rest = f" {number_words(value % size)}" if value % size else ""
            return f"{number_words(value // size)} {name}{rest}"
    rest = f" {_ONES[value % 10]}" if value % 10 else ""
    return _TENS[value // 10 - 2] + rest


def year_words(year: int) -> str:
    """1100 to 2099 as a year is read: nineteen oh five, two thousand nine, twenty twenty six."""
    century, rest = divmod(year, 100)
    if 2000 <= year < 2010:
        return number_words(year)
    if rest == 0:
        return f"{number_words(century)} hundred"
    return f"{number_words(century)} {'oh ' if rest < 10 else ''}{number_words(rest)}"


def ordinal_words(value: int) -> str:
    """1 to 31 as a day of the month: third, twenty first."""
    *front, last = number_words(value).split()
    last = f"{last[:-1]}ieth" if last.endswith("y") else _ORDINALS.get(last, f"{last}th")
    return " ".join([*front, last])


# ---------------------------------------------------------------- one kind each
def _number(rng: Random) -> str:
    value = rng.randrange(10 ** rng.randrange(1, 5))
    return str(value) if rng.random() < 0.5 else number_words(value)


def _count(rng: Random) -> str:
    value = rng.randrange(2, 60)
    return str(value) if rng.random() < 0.5 else number_words(value)


def _day(rng: Random) -> str:
    return ordinal_words(rng.randrange(1, 32))


def _year(rng: Random) -> str:
    year = rng.randrange(1600, 2060)
    return str(year) if rng.random() < 0.5 else year_words(year)


def _time(rng: Random) -> str:
    hour, minute = rng.randrange(1, 13), rng.choice([0, 5, 10, 15, 20, 25, 30, 40, 45, 50, 55])
    if rng.random() < 0.3:
        return f"{hour}:{minute:02d}"
    if minute == 0:
        return f"{number_words(hour)} o'clock"
    if minute == 30 and rng.random() < 0.5:
        return f"half past {number_words(hour)}"
    if minute == 15 and rng.random() < 0.5:
        return f"a quarter past {number_words(hour)}"
    return f"{number_words(hour)} {'oh ' if minute < 10 else ''}{number_words(minute)}"


def _price(rng: Random) -> str:
    dollars, cents = rng.randrange(2, 400), rng.choice([0, 0, 25, 50, 75, 99])
    words = f"{number_words(dollars)} dollars"
    return f"{words} and {number_words(cents)} cents" if cents else words


def _digits(rng: Random) -> str:
    digits = [rng.randrange(10) for _ in range(rng.choice([3, 4, 5, 7, 10]))]
    return " ".join(_ONES[digit] for digit in digits) if rng.random() < 0.7 else " ".join(map(str, digits))


def _letters(rng: Random) -> str:
    return " ".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randrange(2, 7)))


def _list(rng: Random) -> str:
    words = rng.sample(_THINGS, rng.randrange(2, 6))
    return f"{', '.join(words)}, {rng.choice(_ADVERBS)}"


_SLOTS: dict[str, Callable[[Random], str]] = {
    "number": _number,
    "count": _count,
    "day": _day,
    "year": _year,
    "time": _time,
    "price": _price,
    "digits": _digits,
    "letters": _letters,
    "list": _list,
    "weekday": lambda rng: rng.choice(DAYS),
    "month": lambda rng: rng.choice(MONTHS),
    "name": lambda rng: rng.choice(NAMES),
    "city": lambda rng: rng.choice(_CITIES),
    "thing": lambda rng: rng.choice(_THINGS),
    "weather": lambda rng: rng.choice(_WEATHER),
    "adverb": lambda rng: rng.choice(_ADVERBS),
    "place": lambda rng: rng.choice(_PLACES),
}
_SENTENCES = """
The number is {number}. | {number}. | {number}, {number}, {number}. | Please call {digits}.
My code is {digits}. | It happened in {year}. | In {year} he moved to {city}.
Today is {weekday}, the {day} of {month}. | We meet on {month} {day}. | The party is on the {day} of {month}.
It is {time}. | The next train leaves at {time}. | Wake me up at {time} on {weekday}.
That costs {price}. | The {thing} is only {price}. | You owe me {price}, {name}.
Her name is spelled {letters}. | Press {letters} to continue. | {list}. | {thing}, {thing}, {thing}.
Good morning, {name}. | Good evening, {name}, how are you? | Hello {name}, nice to meet you.
Hello! | Hi {name}! | Good night. | Goodbye, {name}. | Thank you, {name}. | Thank you very much. | You are welcome.
Yes. | No. | Yes, please. | No, thank you. | I am sorry, I did not understand that. | Of course. | One moment, please.
Welcome to {city}. | How can I help you today? | What can I do for you? | Please wait {count} minutes.
I have set a timer for {count} minutes. | I added the {thing} to your list. | Your order will arrive on {weekday}.
The weather in {city} is {weather} today. | Tomorrow will be {weather} and {weather}.
It is {count} degrees in {city}. | Expect {weather} weather until {weekday}.
Where is the {place}? | How far is it to the {place}? | The {place} is next to the {place}.
Turn left after {count} meters. | Turn right at the {place}. | Take the bus to the {place}.
Is the {place} open on {weekday}? | When does the {place} close? | What time is it in {city}?
Do you have a {thing}? | Could you bring me the {thing}, please? | I bought {count} of them in {city}.
{name} and {name} will arrive {adverb}. | {name} lives in {city}. | {name} said that the {thing} was gone.
There are {count} people in the room. | She has {count} of them. | He is {count} years old.
Flight {number} to {city} is delayed. | Your seat is number {count}. | Chapter {count}. | Page {number}.
Please put the {thing} on the {thing}. | The {thing} is in the kitchen. | Why is the {thing} here?
Who took my {thing}? | This {thing} belongs to {name}. | We need a new {thing} by {weekday}.
"""
SENTENCES: Sequence[str] = [part.strip() for part in _SENTENCES.replace("\n", "|").split("|") if part.strip()]


def sentence(rng: Random) -> str:
    """One filled-in sentence; capitalised, and with its final mark."""
    template, text = rng.choice(SENTENCES), ""
    for part in template.split("{"):
        slot, brace, rest = part.partition("}")
        text += _SLOTS[slot](rng) + rest if brace else part
    return text[0].upper() + text[1:]
