"""One sentence to find in a long text."""

from __future__ import annotations

from random import Random

from demo_training.lessons import Lesson, Phrasings, ask
from demo_training.skills.words import COLORS, THINGS, city, invented_word, person

_WHATS = ("secret code", "magic number", "password", "room number", "key")
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
MAX_CHARACTERS = 360
_MAX_NEEDLES = 3
_QUESTION_FIRST_SHARE = 0.15


def draw_needle(random: Random, *, is_exam: bool) -> Lesson:
    """Sentences with up to three values among them, one of which is asked for."""
    names = {person(random) for _ in range(random.randint(1, _MAX_NEEDLES))}
    needles = [
        {"what": random.choice(_WHATS), "name": name, "value": _value(random)}
        for name in sorted(names)
    ]
    sentences = [_TOLD.format(**needle) for needle in needles]
    wanted = random.choice(needles)
    length = MAX_CHARACTERS * random.random() ** 2
    while sum(map(len, sentences)) < length:
        sentences.append(filler(random))
    random.shuffle(sentences)
    text = " ".join(sentences)
    question = _ASKED.draw(random, is_exam=is_exam).format(**wanted)
    if random.random() < _QUESTION_FIRST_SHARE:
        return ask(f"{question} {text}", _TOLD.format(**wanted))
    return ask(f"{text} {question}", _TOLD.format(**wanted))


def filler(random: Random) -> str:
    """A sentence that says nothing of use."""
    return random.choice(_FILLERS).format(
        color=random.choice(COLORS),
        city=city(random),
        name=person(random),
        things=random.choice(THINGS),
        number=random.randint(2, 99),
    )


def _value(random: Random) -> str:
    if random.random() < 2 / 3:
        return str(random.randint(100, 99_999))
    return invented_word(random)
