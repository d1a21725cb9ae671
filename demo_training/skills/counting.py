"""Counting, up and down."""

from __future__ import annotations

from random import Random

from demo_training.lessons import Lesson, Phrasings, ask, casually

NUMBERS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve",
)  # fmt: skip
_ASKED = Phrasings(
    (
        "Count from {a} to {b}.",
        "Please count from {a} to {b}.",
        "Count: {a} to {b}",
        "Can you count from {a} to {b}?",
        "List the numbers from {a} to {b}.",
    ),
    ("List all numbers from {a} to {b}.", "Start at {a} and count to {b}."),
)
_ASKED_OTHERWISE = Phrasings(
    (
        "Begin at {a} and count to {b}.",
        "Start with {a} and count up or down to {b}.",
        "Start at {a}, stop at {b}.",
        "From {a}, count to {b}.",
        "Go from {a} to {b}.",
        "Name all numbers from {a} to {b}.",
        "List every number from {a} to {b}.",
        "Write the numbers from {a} to {b}.",
        "Which numbers come from {a} to {b}?",
        "All numbers from {a} to {b}, please.",
    ),
    ("Now count from {a} to {b}.", "Say the numbers from {a} to {b}."),
)
_MAX_FIRST = 30
_MAX_FURTHER = 9


def draw_counting(random: Random, *, is_exam: bool) -> Lesson:
    """Up to ten numbers in a row; every third time from the largest to the smallest."""
    return _draw_counting(random, _ASKED, is_exam=is_exam)


def draw_counting_otherwise(random: Random, *, is_exam: bool) -> Lesson:
    """The same, asked in other words."""
    return _draw_counting(random, _ASKED_OTHERWISE, is_exam=is_exam)


def _draw_counting(random: Random, asked: Phrasings, *, is_exam: bool) -> Lesson:
    first = random.randint(0, _MAX_FIRST)
    numbers = [*range(first, first + random.randint(2, _MAX_FURTHER) + 1)]
    if random.random() < 1 / 3:
        numbers.reverse()
    question = asked.draw(random, is_exam=is_exam).format(a=numbers[0], b=numbers[-1])
    return ask(casually(question, random), f"{', '.join(map(str, numbers))}.")
