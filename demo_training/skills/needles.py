"""One sentence to find in a long text."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from demo_training.lessons import Lesson, Phrasings, Turn, ask
from demo_training.skills.arithmetic import ONLY_NUMBER
from demo_training.skills.words import COLORS, THINGS, city, invented_word, person

_WHATS = ("secret code", "secret number", "magic number", "password", "room number", "key")
_OFFICES = (
    "the harbour master", "the baker", "the old captain", "the night guard", "the mayor",
    "the red team", "the station", "the north gate",
)  # fmt: skip
_OFFICE_SHARE = 0.2
_TOLD = "The {what} of {name} is {value}."
_ASKED = Phrasings(
    (
        "What is the {what} of {name}?",
        "Tell me the {what} of {name}.",
        "Which {what} does {name} have?",
        "Find the {what} of {name}.",
        "The text names the {what} of {name}. What is it?",
    ),
    (
        "Please tell me the {what} of {name}.",
        "Name the {what} of {name}.",
        "Do you know the {what} of {name}?",
    ),
)
_FILLERS = (
    "The grass is {color} in {city}.",
    "{name} has {number} {things}.",
    "The train to {city} leaves at {number}.",
    "It rained in {city} for {number} days.",
    "{name} likes {things} and {color} paint.",
    "The {things} are in the {color} box.",
    "Nobody knows where {name} went.",
)
_PLACES = (
    "bakery", "castle", "garden", "library", "market", "mill", "museum", "old farm", "school",
    "theatre", "town hall",
)  # fmt: skip
_NEAR_PLACES = (
    "baker's shop", "captain's boat", "harbour", "mayor's house", "night market", "north tower",
    "old harbour", "red barn", "station hall", "team hall",
)  # fmt: skip
"""Their words are those of the offices as well."""
_SEEN = ("sold", "counted", "found", "sent", "painted", "lost")
_LINES = Phrasings(
    (
        "Line {number}: the {place} {seen} {count} {things}.",
        "Line {number}: {name} {seen} {count} {things}.",
        "{number}. The {place} {seen} {count} {things}.",
        "Entry {number}: the {place} {seen} {count} {things}.",
        "The {place} {seen} {count} {things}.",
    ),
    ("Row {number}: the {place} {seen} {count} {things}.",),
)
_LENGTHS = ((80, 640), (640, 2600), (2600, 7700))
"""Characters of all lines: the longest fit into the context beside question and reply."""
_LENGTH_SHARES = (52, 42, 6)
"""A network that reads short texts alone loses its way in long ones, whatever their positions."""
MAX_CHARACTERS = 240
_MAX_LONG_CHARACTERS = 3000
_LONG_SHARE = 0.02
"""Such a text takes as long to learn from as ten others."""
_MAX_NEEDLES = 3
_QUESTION_FIRST_SHARE = 0.15
_ONLY_NUMBER_SHARE = 0.3
_LINES_ONLY_NUMBER_SHARE = 0.5
_QUESTIONS_ABOUT_LONG_TEXTS = (1, 4, 8, 8)
"""More than one, because a long text takes as long to read for one."""
_QUESTION_TOKENS = 130
"""At most, with its reply."""
_HARD_OFFICE_SHARE = 0.5
_EDGES = 0.5
"""Both parameters of a beta distribution: most depths are near the beginning or the end."""
_EARLY_SHARE = 0.5
"""So many sentences are early for sure, because what is far away is the hardest to find."""


def draw_needle(random: Random, *, is_exam: bool) -> Lesson:
    """Sentences with up to three values among them, one of which is asked for."""
    names = {_owner(random) for _ in range(random.randint(1, _MAX_NEEDLES))}
    needles = [
        {"what": random.choice(_WHATS), "name": name, "value": _value(random)}
        for name in sorted(names)
    ]
    sentences = [_TOLD.format(**needle) for needle in needles]
    wanted = random.choice(needles)
    length = _characters(random)
    while sum(map(len, sentences)) < length:
        sentences.append(filler(random))
    random.shuffle(sentences)
    between = random.choice((" ", " ", "\n"))
    text = between.join(sentences)
    question = _ASKED.draw(random, is_exam=is_exam).format(**wanted)
    reply = _TOLD.format(**wanted)
    if wanted["value"].isdigit() and random.random() < _ONLY_NUMBER_SHARE:
        question += ONLY_NUMBER.draw(random, is_exam=is_exam)
        reply = wanted["value"]
    if random.random() < _QUESTION_FIRST_SHARE:
        return ask(f"{question}{between}{text}", reply)
    return ask(f"{text}{between}{question}", reply)


def draw_line_needle(random: Random, *, is_exam: bool) -> Lesson:
    """One sentence with a value among lines about other numbers, which are alike and counted."""
    lengths = _LENGTHS[0] if is_exam else random.choices(_LENGTHS, _LENGTH_SHARES)[0]
    lines = _lines(random, random.randint(*lengths), is_exam=is_exam)
    value = _value(random)
    needle = {"what": random.choice(_WHATS), "name": _owner(random), "value": value}
    lines.insert(random.randint(0, len(lines)), _TOLD.format(**needle))
    question, reply = _asked_of_lines(random, needle, is_exam=is_exam)
    return ask("\n".join((*lines, question)), reply)


def draw_long_text(random: Random, tokens: int, early_part: float) -> Lesson:
    """Lines of about so many tokens with up to eight sentences, and a question about each.

    Most of the sentences are in the `early_part` of the lines.
    """
    needles = _needles(random, _OFFICE_SHARE)
    lines = _lines(random, tokens - len(needles) * _QUESTION_TOKENS, is_exam=False)
    for needle in needles:
        last = int(len(lines) * early_part) if random.random() < _EARLY_SHARE else len(lines)
        lines.insert(random.randint(0, last), _TOLD.format(**needle))
    return _dialogue(random, lines, needles)


def draw_hard_text(random: Random, tokens: int) -> Lesson:
    """A long text whose lines and sentences share words, most of the sentences near an end of it.

    What is farthest from the question is the hardest to find, and then what is next to it.
    """
    needles = _needles(random, _HARD_OFFICE_SHARE)
    length = tokens - len(needles) * _QUESTION_TOKENS
    lines = _lines(random, length, is_exam=False, places=_PLACES + _NEAR_PLACES)
    for needle in needles:
        depth = random.betavariate(_EDGES, _EDGES)
        lines.insert(round(depth * len(lines)), _TOLD.format(**needle))
    return _dialogue(random, lines, needles)


def _needles(random: Random, offices: float) -> list[Mapping[str, str]]:
    """Up to eight sentences of different owners."""
    names: dict[str, None] = {}
    count = random.choice(_QUESTIONS_ABOUT_LONG_TEXTS)
    while len(names) < count:
        names[_owner(random, offices)] = None
    return [
        {"what": random.choice(_WHATS), "name": name, "value": _value(random)} for name in names
    ]


def _dialogue(random: Random, lines: list[str], needles: list[Mapping[str, str]]) -> Lesson:
    """The lines and a question about each needle, one after the other."""
    (question, reply), *later = [
        _asked_of_lines(random, needle, is_exam=False) for needle in needles
    ]
    turns = [Turn("user", "\n".join((*lines, question)))]
    for next_question, next_reply in later:
        turns += [Turn("assistant", reply), Turn("user", next_question)]
        reply = next_reply
    return Lesson(tuple(turns), reply)


def _lines(
    random: Random, length: int, *, is_exam: bool, places: tuple[str, ...] = _PLACES
) -> list[str]:
    """Lines of at least so many characters, the ends of lines among them."""
    line = _LINES.draw(random, is_exam=is_exam)
    lines: list[str] = []
    while sum(map(len, lines)) + len(lines) < length:
        lines.append(
            line.format(
                number=len(lines),
                place=random.choice(places),
                name=person(random),
                seen=random.choice(_SEEN),
                count=random.randint(1, 999),
                things=random.choice(THINGS),
            )
        )
    return lines


def _asked_of_lines(random: Random, needle: Mapping[str, str], *, is_exam: bool) -> tuple[str, str]:
    """A question about a needle, and the reply."""
    question = _ASKED.draw(random, is_exam=is_exam).format(**needle)
    if needle["value"].isdigit() and random.random() < _LINES_ONLY_NUMBER_SHARE:
        return question + ONLY_NUMBER.draw(random, is_exam=is_exam), needle["value"]
    return question, _TOLD.format(**needle)


def filler(random: Random) -> str:
    """A sentence that says nothing of use."""
    return random.choice(_FILLERS).format(
        color=random.choice(COLORS),
        city=city(random),
        name=person(random),
        things=random.choice(THINGS),
        number=random.randint(2, 99),
    )


def _characters(random: Random) -> float:
    """How long the text has to be at least: short ones are the commonest, a few are long."""
    if random.random() < _LONG_SHARE:
        return random.uniform(MAX_CHARACTERS, _MAX_LONG_CHARACTERS)
    return MAX_CHARACTERS * random.random() ** 2


def _owner(random: Random, offices: float = _OFFICE_SHARE) -> str:
    return random.choice(_OFFICES) if random.random() < offices else person(random)


def _value(random: Random) -> str:
    if random.random() < 2 / 3:
        return str(random.randint(100, 99_999))
    return invented_word(random)
