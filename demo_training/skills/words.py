"""Words that lessons are made of, among them names that nobody has read before."""

from __future__ import annotations

from random import Random

NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jonas", "Kim",
    "Laura", "Max", "Nina", "Oscar", "Paula", "Robin", "Sara", "Tom", "Zoe",
)  # fmt: skip
THINGS = (
    "apples", "books", "cards", "coins", "cups", "eggs", "keys", "lamps", "pens", "stones",
)  # fmt: skip
COLORS = ("red", "blue", "green", "black", "white", "yellow", "orange", "purple")
CITIES = (
    "Berlin", "Boston", "Cairo", "Delhi", "Dublin", "Geneva", "Lima", "London", "Madrid", "Milan",
    "Osaka", "Oslo", "Paris", "Prague", "Rome", "Seoul", "Tokyo", "Turin", "Vienna", "Zurich",
)  # fmt: skip
_FOREIGN_RANGES = (
    (0xC0, 0xFF),
    (0x391, 0x3A1),
    (0x410, 0x44F),
    (0x4E00, 0x9FFF),
    (0x1F600, 0x1F64F),
)
_SIGN_RANGES = (
    (0x2013, 0x2026),
    (0x2600, 0x26FF),
    (0x3041, 0x3096),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1F6FF),
)
_ACCENTED = "àáâäåæçèéêëìíîïñòóôöøùúûüß"
_ONSETS = (*"bdfghklmnprstvwz", "br", "dr", "gr", "kr", "pl", "st", "tr", "sh")
_VOWELS = (*"aeiou", "ai", "ee", "ou")
_ENDS = ("", "", "", "n", "r", "s", "l", "t", "nd", "x", "m")


def invented_word(random: Random) -> str:
    """A word that can be spoken but, as a rule, does not exist."""
    syllables = [
        random.choice(_ONSETS) + random.choice(_VOWELS) for _ in range(random.randint(1, 3))
    ]
    return "".join(syllables) + random.choice(_ENDS)


def invented_name(random: Random) -> str:
    """An invented word with a capital letter."""
    return invented_word(random).capitalize()


def foreign_word(random: Random) -> str:
    """Letters and signs beyond ASCII: what a byte tokenizer has to copy byte by byte."""
    first, last = random.choice(_FOREIGN_RANGES)
    return "".join(chr(random.randint(first, last)) for _ in range(random.randint(1, 4)))


def foreign_text(random: Random, max_words: int) -> str:
    """Up to so many words, most with a letter or sign beyond ASCII."""
    words = (_accented_word, _accented_word, invented_name, _sign, foreign_word)
    return " ".join(random.choice(words)(random) for _ in range(random.randint(1, max_words)))


def _accented_word(random: Random) -> str:
    word = invented_word(random)
    place = random.randrange(len(word))
    return word[:place] + random.choice(_ACCENTED) + word[place + 1 :]


def _sign(random: Random) -> str:
    first, last = random.choice(_SIGN_RANGES)
    return chr(random.randint(first, last))


def person(random: Random) -> str:
    """A name of a person, half of the time an invented one."""
    return random.choice(NAMES) if random.random() < 1 / 2 else invented_name(random)


def city(random: Random) -> str:
    """A name of a city, half of the time an invented one."""
    return random.choice(CITIES) if random.random() < 1 / 2 else invented_name(random)


def iso_date(random: Random) -> str:
    """A date of this century, as YYYY-MM-DD."""
    return f"20{random.randint(10, 39)}-{random.randint(1, 12):02}-{random.randint(1, 28):02}"
