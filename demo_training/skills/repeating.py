"""Saying again what was said: the plainest use of what stands in the context."""

from __future__ import annotations

from random import Random

from demo_training.lessons import Lesson, Phrasings, ask, casually
from demo_training.skills.words import foreign_word, invented_word

_ASKED = Phrasings(
    (
        "Repeat: {}",
        "Say: {}",
        "Repeat after me: {}",
        "Repeat this: {}",
        "Say this again: {}",
        "Reply exactly {}",
        "Reply with exactly: {}",
        "Return only this: {}",
        "Write exactly {}",
    ),
    ("Please repeat: {}", "Say after me: {}", "Say this: {}", "Reply with exactly {}"),
)
_MAX_WORDS = 5


def draw_repetition(random: Random, *, is_exam: bool) -> Lesson:
    """Words and numbers, to be said again as they are."""
    words = [_word(random) for _ in range(random.randint(1, _MAX_WORDS))]
    text = " ".join(words)
    question = _ASKED.draw(random, is_exam=is_exam).format(text)
    return ask(casually(question, random), text)


def _word(random: Random) -> str:
    chance = random.random()
    if chance < 0.15:
        return str(random.randint(0, 9999))
    if chance < 0.25:
        return foreign_word(random)
    if chance < 0.35:
        return invented_word(random).upper()
    return invented_word(random)
