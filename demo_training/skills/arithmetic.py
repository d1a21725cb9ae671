"""Sums, differences and products of small numbers, bare and as word problems."""

from __future__ import annotations

from random import Random

from demo_training.lessons import Lesson, Phrasings, ask, casually
from demo_training.skills.words import THINGS, person

_MAX_TERM = 20
_MAX_LARGE_TERM = 30
_LARGE_SHARE = 0.5
_MAX_FACTOR = 12
_BARE = Phrasings(
    (
        "What is {a} {sign} {b}?",
        "{a} {sign} {b}",
        "{a} {sign} {b} =",
        "{a}{sign}{b}=",
        "What is {a}{sign}{b}?",
        "What is {a} {word} {b}?",
        "Calculate {a} {sign} {b}.",
        "Calculate {a} {word} {b}.",
        "How much is {a} {word} {b}?",
        "Compute {a} {sign} {b}.",
        "Please tell me what {a} {word} {b} is.",
    ),
    (
        "How much is {a} {sign} {b}?",
        "Compute {a} {word} {b}.",
        "Please calculate {a} {sign} {b}.",
        "Tell me what {a} {word} {b} is.",
    ),
)
_WORDS = {"+": ("plus",), "-": ("minus",), "*": ("times", "multiplied by")}
_STORIES = {
    "+": Phrasings(
        (
            "{name} has {a} {things} and gets {b} more. How many {things} does {name} have?",
            "{name} has {a} {things} and buys {b} more. How many {things} are there?",
            "There are {a} {things} on the table and {b} in the box. How many {things} are there?",
            "{name} finds {a} {things}, then {b} more. How many is that?",
        ),
        (
            "{name} has {a} {things} and finds {b} more. How many {things} does {name} have?",
            "{name} buys {a} {things}, then {b} more. How many {things} are there?",
        ),
    ),
    "-": Phrasings(
        (
            "{name} has {a} {things} and loses {b}. How many {things} are left?",
            "{name} has {a} {things} and gives away {b}. How many {things} does {name} have?",
            "There are {a} {things} in the box. {name} takes {b}. How many {things} are left?",
        ),
        (
            "{name} has {a} {things} and gives away {b}. How many {things} are left?",
            "There are {a} {things} on the table. {name} takes {b}. How many {things} are left?",
        ),
    ),
    "*": Phrasings(
        (
            "There are {a} boxes with {b} {things} each. How many {things} are there?",
            "{name} has {a} boxes of {b} {things}. How many {things} does {name} have?",
        ),
        (
            "{name} has {a} boxes with {b} {things} each. How many {things} are there?",
            "There are {a} boxes of {b} {things}. How many {things} are there?",
        ),
    ),
}
_STORY_SHARE = 0.35
_SEVERAL = Phrasings(
    ("What is {}?", "Calculate {}.", "{}", "Compute {}.", "How much is {}?"),
    ("Please calculate {}.", "Tell me what {} is."),
)
_MAX_SEVERAL = 4
_SEVERAL_SHARE = 0.25
"""Of bare calculations: the cheapest way to show the model many."""
ONLY_NUMBER = Phrasings(
    (
        " Answer with the number only.",
        " Reply with only the number.",
        " Just the number.",
        " Reply with just the number and nothing else.",
    ),
    (" Reply with just the number.", " Answer with only the number."),
)
_ONLY_NUMBER_SHARE = 0.25


def draw_arithmetic(random: Random, *, is_exam: bool) -> Lesson:
    """A calculation or several; the reply repeats each, or is the number that was asked for."""
    return _draw_arithmetic(random, is_exam=is_exam, may_reply_with_number=True)


def draw_worked_arithmetic(random: Random, *, is_exam: bool) -> Lesson:
    """The same, but the reply always repeats the calculation.

    A network of this size finds the result beside the numbers, and guesses it without them.
    """
    return _draw_arithmetic(random, is_exam=is_exam, may_reply_with_number=False)


def _draw_arithmetic(random: Random, *, is_exam: bool, may_reply_with_number: bool) -> Lesson:
    is_story = random.random() < _STORY_SHARE
    if not is_story and random.random() < _SEVERAL_SHARE:
        return _draw_several(random, is_exam=is_exam)
    a, sign, b = draw_calculation(random)
    values = {"a": a, "b": b, "sign": sign, "word": random.choice(_WORDS[sign])}
    if is_story:
        story = _STORIES[sign].draw(random, is_exam=is_exam)
        question = story.format(**values, name=person(random), things=random.choice(THINGS))
    else:
        question = casually(_BARE.draw(random, is_exam=is_exam).format(**values), random)
    if random.random() < _ONLY_NUMBER_SHARE:
        question += ONLY_NUMBER.draw(random, is_exam=is_exam)
        if may_reply_with_number:
            return ask(question, str(_result(a, sign, b)))
    return ask(question, solved(a, sign, b))


def draw_calculation(random: Random) -> tuple[int, str, int]:
    """Two numbers and the sign between them; no result is below zero."""
    sign = random.choice("++--*")
    most = _MAX_TERM if random.random() > _LARGE_SHARE else _MAX_LARGE_TERM
    if sign == "*":
        most = _MAX_FACTOR
    a, b = random.randint(0, most), random.randint(0, most)
    return (max(a, b), sign, min(a, b)) if sign == "-" else (a, sign, b)


def solved(a: int, sign: str, b: int) -> str:
    """The calculation with its result, as a sentence."""
    return f"{a} {sign} {b} = {_result(a, sign, b)}."


def _draw_several(random: Random, *, is_exam: bool) -> Lesson:
    calculations = [draw_calculation(random) for _ in range(random.randint(2, _MAX_SEVERAL))]
    *others, last = (f"{a} {sign} {b}" for a, sign, b in calculations)
    question = _SEVERAL.draw(random, is_exam=is_exam).format(f"{', '.join(others)} and {last}")
    return ask(casually(question, random), " ".join(solved(*one) for one in calculations))


def _result(a: int, sign: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[sign]
