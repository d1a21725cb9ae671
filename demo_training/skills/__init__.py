"""What the model is taught, and how much of the lessons each skill gets."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from demo_training.lessons import Lesson, Skill, Turn
from demo_training.skills.arithmetic import draw_arithmetic
from demo_training.skills.capitals import draw_capital
from demo_training.skills.counting import draw_counting
from demo_training.skills.dates import draw_date
from demo_training.skills.facts import draw_fact
from demo_training.skills.greetings import draw_greeting
from demo_training.skills.needles import draw_needle
from demo_training.skills.objects import draw_object
from demo_training.skills.repeating import draw_repetition
from demo_training.skills.stories import draw_story
from demo_training.skills.tools import draw_tool_call, draw_tool_result
from demo_training.skills.unknown import draw_unknown

SKILLS: Mapping[str, Skill] = {
    "greeting": draw_greeting,
    "fact": draw_fact,
    "arithmetic": draw_arithmetic,
    "capital": draw_capital,
    "date": draw_date,
    "counting": draw_counting,
    "object": draw_object,
    "tool call": draw_tool_call,
    "tool result": draw_tool_result,
    "needle": draw_needle,
    "repetition": draw_repetition,
    "unknown": draw_unknown,
}
_SHARES: Mapping[str, int] = {
    "greeting": 4,
    "fact": 10,
    "arithmetic": 26,
    "capital": 10,
    "date": 9,
    "counting": 5,
    "object": 12,
    "tool call": 13,
    "tool result": 2,
    "needle": 9,
    "repetition": 6,
    "unknown": 6,
}
_STORY_SHARE = 0.02
"""Of all lessons; no exam has stories, because none of them is the right one."""
_EARLIER_TURNS_SHARE = 0.12
_SYSTEM_SHARE = 0.1
_SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are the demo model of Holdfast.",
    "Answer in one sentence.",
    "Be brief.",
)


def draw_lesson(random: Random) -> Lesson:
    """A story, or a lesson of a random skill, sometimes after another or under a system prompt."""
    if random.random() < _STORY_SHARE:
        return draw_story(random)
    lesson = _draw(random)
    turns = lesson.turns
    if not lesson.tools and random.random() < _EARLIER_TURNS_SHARE:
        earlier = _draw(random)
        if not earlier.tools:
            turns = (*earlier.turns, Turn("assistant", earlier.reply), *turns)
    if random.random() < _SYSTEM_SHARE:
        turns = (Turn("system", random.choice(_SYSTEM_PROMPTS)), *turns)
    return Lesson(turns, lesson.reply, lesson.tools)


def _draw(random: Random) -> Lesson:
    (name,) = random.choices(list(_SHARES), list(_SHARES.values()))
    return SKILLS[name](random, is_exam=False)
