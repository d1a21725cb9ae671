"""Days of the week, months, and dates in two notations."""

from __future__ import annotations

from random import Random

from demo_training.lessons import Lesson, Phrasings, ask, casually

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_DAYS_IN_MONTH = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_NEXT = Phrasings(
    (
        "Which {kind} comes after {one}?",
        "What {kind} comes after {one}?",
        "Which {kind} follows {one}?",
        "Name the {kind} after {one}.",
        "What is the {kind} after {one}?",
    ),
    ("What {kind} follows {one}?", "Which {kind} is after {one}?"),
)
_PREVIOUS = Phrasings(
    (
        "Which {kind} comes before {one}?",
        "What {kind} comes before {one}?",
        "Name the {kind} before {one}.",
        "What is the {kind} before {one}?",
    ),
    ("Which {kind} is before {one}?", "Tell me which {kind} comes before {one}."),
)
_LENGTH = Phrasings(
    (
        "How many days does {} have?",
        "How many days are in {}?",
        "How long is {}?",
        "Tell me how many days {} has.",
    ),
    ("How many days are there in {}?", "How many days has {}?"),
)
_NOTATION = Phrasings(
    (
        "Write {} as an ISO date.",
        "Write {} in ISO format.",
        "What is {} as an ISO date?",
        "Convert {} to ISO format.",
    ),
    ("Convert {} to an ISO date.", "What is {} in ISO format?"),
)


def draw_date(random: Random, *, is_exam: bool) -> Lesson:
    """A neighbour of a day or month, the length of a month, or a date to write as YYYY-MM-DD."""
    kind = random.random()
    if kind < 0.5:
        question, reply = _neighbour(random, is_exam=is_exam)
    elif kind < 0.7:
        month = random.randrange(12)
        question = _LENGTH.draw(random, is_exam=is_exam).format(MONTHS[month])
        reply = f"{MONTHS[month]} has {_DAYS_IN_MONTH[month]} days."
    else:
        day, month, year = random.randint(1, 28), random.randrange(12), random.randint(2000, 2039)
        written = f"{day} {MONTHS[month]} {year}"
        question = _NOTATION.draw(random, is_exam=is_exam).format(written)
        reply = f"{year}-{month + 1:02}-{day:02}"
    return ask(casually(question, random), reply)


def _neighbour(random: Random, *, is_exam: bool) -> tuple[str, str]:
    kind, ring = random.choice((("day", DAYS), ("month", MONTHS)))
    position = random.randrange(len(ring))
    one = ring[position]
    if random.random() < 1 / 2:
        question = _NEXT.draw(random, is_exam=is_exam)
        reply = f"{ring[(position + 1) % len(ring)]} comes after {one}."
    else:
        question = _PREVIOUS.draw(random, is_exam=is_exam)
        reply = f"{ring[position - 1]} comes before {one}."
    return question.format(kind=kind, one=one), reply
