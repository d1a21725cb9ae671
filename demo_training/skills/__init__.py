"""What the model is taught, and how much of the lessons each skill gets."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from demo_training.lessons import Lesson, Skill, Turn
from demo_training.skills.arithmetic import draw_arithmetic, draw_worked_arithmetic
from demo_training.skills.capitals import draw_capital
from demo_training.skills.counting import draw_counting, draw_counting_otherwise
from demo_training.skills.dates import draw_date
from demo_training.skills.facts import draw_fact
from demo_training.skills.greetings import draw_greeting
from demo_training.skills.needles import draw_line_needle, draw_needle
from demo_training.skills.objects import draw_object
from demo_training.skills.repeating import draw_repetition
from demo_training.skills.stories import draw_story
from demo_training.skills.tools import draw_note, draw_record, draw_tool_call, draw_tool_result
from demo_training.skills.unknown import draw_unknown, draw_unknown_otherwise

SKILLS: Mapping[str, Skill] = {
    "greeting": draw_greeting,
    "fact": draw_fact,
    "arithmetic": draw_worked_arithmetic,
    "capital": draw_capital,
    "date": draw_date,
    "counting": draw_counting,
    "object": draw_object,
    "tool call": draw_tool_call,
    "tool result": draw_tool_result,
    "needle": draw_needle,
    "line needle": draw_line_needle,
    "repetition": draw_repetition,
    "unknown": draw_unknown,
}
_SHARES: Mapping[Skill, int] = {
    draw_greeting: 4,
    draw_fact: 10,
    draw_arithmetic: 26,
    draw_capital: 10,
    draw_date: 9,
    draw_counting: 5,
    draw_object: 12,
    draw_tool_call: 13,
    draw_tool_result: 2,
    draw_needle: 9,
    draw_repetition: 6,
    draw_unknown: 6,
}
_FINE_TUNING_SHARES: Mapping[Skill, int] = {
    draw_greeting: 4,
    draw_fact: 9,
    draw_worked_arithmetic: 22,
    draw_capital: 9,
    draw_date: 8,
    draw_counting: 4,
    draw_counting_otherwise: 5,
    draw_object: 12,
    draw_tool_call: 17,
    draw_note: 14,
    draw_tool_result: 2,
    draw_needle: 7,
    draw_line_needle: 10,
    draw_repetition: 6,
    draw_unknown: 2,
    draw_unknown_otherwise: 6,
}
"""What an exam after the lessons of `_SHARES` found weak has the most."""
_LAST_SHARES: Mapping[Skill, int] = {**_FINE_TUNING_SHARES, draw_record: 16}
_STORY_SHARE = 0.02
"""Of all lessons; no exam has stories, because none of them is the right one."""
_EARLIER_TURNS_SHARE = 0.12
_MAX_CHARACTERS = 7800
"""Of a chat with earlier turns, which has to fit into the context."""
_SYSTEM_SHARE = 0.1
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the demo model of Holdfast.",
    "Answer in one sentence.",
    "Be brief.",
)


def draw_lesson(random: Random) -> Lesson:
    """A story, or a lesson of a random skill, sometimes after another or under a system prompt."""
    return _draw_lesson(random, _SHARES)


def draw_fine_tuning_lesson(random: Random) -> Lesson:
    """The same, with more of what the lessons before have taught too little."""
    return _draw_lesson(random, _FINE_TUNING_SHARES)


def draw_last_lesson(random: Random) -> Lesson:
    """The same as in fine-tuning, and answers to record."""
    return _draw_lesson(random, _LAST_SHARES)


def _draw_lesson(random: Random, shares: Mapping[Skill, int]) -> Lesson:
    if random.random() < _STORY_SHARE:
        return draw_story(random)
    lesson = _draw(random, shares)
    turns = lesson.turns
    if not lesson.tools and random.random() < _EARLIER_TURNS_SHARE:
        earlier = _draw(random, shares)
        if not earlier.tools and _characters(earlier) + _characters(lesson) < _MAX_CHARACTERS:
            turns = (*earlier.turns, Turn("assistant", earlier.reply), *turns)
    if random.random() < _SYSTEM_SHARE:
        turns = (Turn("system", random.choice(_SYSTEM_PROMPTS)), *turns)
    return Lesson(turns, lesson.reply, lesson.tools)


def _characters(lesson: Lesson) -> int:
    return sum(len(turn.content) for turn in lesson.turns) + len(lesson.reply)


def _draw(random: Random, shares: Mapping[Skill, int]) -> Lesson:
    (skill,) = random.choices(list(shares), list(shares.values()))
    return skill(random, is_exam=False)
