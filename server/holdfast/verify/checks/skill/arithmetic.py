"""Does the model solve word problems? Their answers are computed, so no data set is needed."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.trial import Trial
from holdfast.verify.waiting import AT_ONCE, QUEUED_SECONDS, together

_STANDARD_PROBLEMS, _FULL_PROBLEMS = 100, 500
_ANSWER_TOKENS = 384
_NAMES = ("Ada", "Ben", "Chloe", "David", "Ella", "Farid", "Grace", "Hugo", "Ines", "Jonas")
_THINGS = ("apples", "books", "coins", "lamps", "pencils", "shells", "stamps", "tickets")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its answer."""

    question: str
    answer: int


def problems(count: int, seed: int = 0) -> tuple[Problem, ...]:
    """The same problems each time: with one step, two or three, in turn."""
    return tuple(_problem(number, seed) for number in range(count))


def is_solved(said: str, answer: int) -> bool:
    """Whether the last number of an answer is the right one."""
    numbers = _NUMBER.findall(said)
    return bool(numbers) and float(numbers[-1].replace(",", "")) == answer


async def arithmetic(trial: Trial) -> None:
    """The share of problems that the model solves."""
    known = problems(_FULL_PROBLEMS if trial.profile == "full" else _STANDARD_PROBLEMS)
    room = asyncio.Semaphore(AT_ONCE)

    async def solved(problem: Problem) -> bool:
        async with room:
            answer = await trial.chat(
                problem.question, max_tokens=_ANSWER_TOKENS, deadline_seconds=QUEUED_SECONDS
            )
        return is_solved(answer.content(), problem.answer)

    outcomes = await together(*map(solved, known))
    trial.score("word problems solved", sum(outcomes), len(outcomes))


def _problem(number: int, seed: int) -> Problem:
    rng = random.Random(f"{seed} {number}")  # noqa: S311 - the same problems each time
    question, answer = _STORIES[number % len(_STORIES)](rng)
    return Problem(f"{question} End with the number.", answer)


QuestionAndAnswer = tuple[str, int]


def _sum(rng: random.Random) -> QuestionAndAnswer:
    name, things, a, b = rng.choice(_NAMES), rng.choice(_THINGS), *rng.sample(range(2, 90), 2)
    said = f"{name} has {a} {things} and buys {b} more. How many {things} does {name} have?"
    return said, a + b


def _sum_and_loss(rng: random.Random) -> QuestionAndAnswer:
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    a, b = rng.sample(range(12, 60), 2)
    lost = rng.randint(2, a + b - 1)
    said = (
        f"{name} has {a} {things}, finds {b} more and then gives away {lost}. "
        f"How many {things} does {name} have left?"
    )
    return said, a + b - lost


def _boxes_and_rest(rng: random.Random) -> QuestionAndAnswer:
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    boxes, each, rest = rng.randint(3, 12), rng.randint(4, 15), rng.randint(2, 20)
    said = (
        f"{name} fills {boxes} boxes with {each} {things} each and keeps {rest} {things} beside "
        f"them. How many {things} does {name} have in all?"
    )
    return said, boxes * each + rest


def _difference(rng: random.Random) -> QuestionAndAnswer:
    things = rng.choice(_THINGS)
    a, taken = rng.randint(20, 99), rng.randint(2, 19)
    name = rng.choice(_NAMES)
    said = f"There are {a} {things} in a box. {name} takes {taken}. How many {things} are left?"
    return said, a - taken


def _shares(rng: random.Random) -> QuestionAndAnswer:
    things, people, each = rng.choice(_THINGS), rng.randint(3, 9), rng.randint(3, 14)
    name = rng.choice(_NAMES)
    kept = rng.randint(2, 15)
    said = (
        f"{name} has {people * each + kept} {things}, keeps {kept} and shares the others equally "
        f"among {people} friends. How many {things} does each friend get?"
    )
    return said, each


def _change(rng: random.Random) -> QuestionAndAnswer:
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    count, price = rng.randint(3, 9), rng.randint(2, 8)
    paid = rng.choice((100, 150, 200))
    other = rng.randint(3, 20)
    said = (
        f"{name} buys {count} {things} for {price} euros each and a bag for {other} euros, and "
        f"pays with {paid} euros. How many euros does {name} get back?"
    )
    return said, paid - count * price - other


def _product(rng: random.Random) -> QuestionAndAnswer:
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
    boxes, each = rng.randint(2, 12), rng.randint(2, 12)
    said = f"{name} has {boxes} boxes with {each} {things} each. How many {things} are there?"
    return said, boxes * each


def _weeks(rng: random.Random) -> QuestionAndAnswer:
    name, each, weeks = rng.choice(_NAMES), rng.randint(3, 12), rng.randint(2, 6)
    spent = rng.randint(2, 7 * each * weeks - 1)
    said = (
        f"{name} saves {each} euros a day for {weeks} weeks and then spends {spent} euros. "
        f"How many euros does {name} have left?"
    )
    return said, 7 * each * weeks - spent


def _twice(rng: random.Random) -> QuestionAndAnswer:
    one, other = rng.sample(_NAMES, 2)
    things, a, more = rng.choice(_THINGS), rng.randint(5, 40), rng.randint(3, 30)
    said = (
        f"{one} has {a} {things}. {other} has twice as many, and then gets {more} more. "
        f"How many {things} do {one} and {other} have together?"
    )
    return said, a + 2 * a + more


_STORIES: tuple[Callable[[random.Random], QuestionAndAnswer], ...] = (
    _sum,
    _sum_and_loss,
    _boxes_and_rest,
    _difference,
    _shares,
    _change,
    _product,
    _weeks,
    _twice,
)
"""One step, two, three, and again."""

CHECKS = (
    Check(
        "arithmetic",
        "skill",
        arithmetic,
        "The model solves word problems as often as it did when it was recorded.",
        profiles=FROM_STANDARD,
        needs=("chat",),
        deadline_seconds=7200.0,
    ),
)
