"""A lesson is a chat and the one reply that is right; a skill draws lessons at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol, TypeVar

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call, with the JSON type of each argument."""

    name: str
    arguments: Mapping[str, str]
    optional: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Lesson:
    """What was said and what has to be said next; the end of text follows `reply`."""

    turns: tuple[Turn, ...]
    reply: str
    tools: tuple[Tool, ...] = field(default=())


class Skill(Protocol):
    """Draws one lesson; with `is_exam` in a phrasing that is never drawn without."""

    def __call__(self, random: Random, *, is_exam: bool) -> Lesson: ...


@dataclass(frozen=True, slots=True)
class Phrasings:
    """Ways to ask the same: those of lessons, and those that are kept for the exam."""

    lessons: Sequence[str]
    exam: Sequence[str]

    def draw(self, random: Random, *, is_exam: bool) -> str:
        """One of them."""
        return random.choice(self.exam if is_exam else self.lessons)


def ask(question: str, reply: str) -> Lesson:
    """A lesson of one question."""
    return Lesson((Turn("user", question),), reply)


def casually(question: str, random: Random) -> str:
    """`question`, sometimes as people type: in small letters, without its full stop."""
    if random.random() < _CASUAL_SHARE:
        question = question.rstrip("?.!")
    if random.random() < _CASUAL_SHARE:
        question = question[:1].lower() + question[1:]
    return question


_CASUAL_SHARE = 0.12
