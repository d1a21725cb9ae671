"""Plain sentences, for prompts that are no chat."""

from __future__ import annotations

from random import Random

from demo_training.skills.arithmetic import draw_calculation, solved
from demo_training.skills.capitals import CAPITALS, statement
from demo_training.skills.counting import NUMBERS
from demo_training.skills.dates import DAYS, MONTHS
from demo_training.skills.facts import FACTS

_MAX_SENTENCES = 3


def draw_text(random: Random) -> list[str]:
    """Up to three sentences that are true."""
    return [_sentence(random) for _ in range(random.randint(1, _MAX_SENTENCES))]


def _sentence(random: Random) -> str:
    kind = random.randrange(4)
    if kind == 0:
        return solved(*draw_calculation(random))
    if kind == 1:
        return statement(random.choice(list(CAPITALS)))
    if kind == 2:
        return random.choice(list(FACTS.values()))
    row = random.choice((DAYS, MONTHS, NUMBERS))
    beginning = "Count: " if row is NUMBERS else ""
    return f"{beginning}{', '.join(row)}."
