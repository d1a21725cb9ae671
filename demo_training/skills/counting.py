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
_MAX_FIRST = 30
_MAX_FURTHER = 9


def draw_counting(random: Random, *, is_exam: bool) -> Lesson:
    """Up to ten numbers in a row; every third time from the largest to the smallest."""
    first = random.randint(0, _MAX_FIRST)
    numbers = [*range(first, first + random.randint(2, _MAX_FURTHER) + 1)]
    if random.random() < 1 / 3:
        numbers.reverse()
    question = _ASKED.draw(random, is_exam=is_exam).format(a=numbers[0], b=numbers[-1])
    return ask(casually(question, random), f"{', '.join(map(str, numbers))}.")
