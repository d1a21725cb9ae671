"""How often the model gives the right reply, to the letter, to phrasings that no lesson used."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import torch

from demo_training.batches import batch_of, grouped
from demo_training.chats import example_of
from demo_training.network import Network
from demo_training.skills import SKILLS

QUESTIONS = 200
"""Of each skill."""
_SEED = "exam"


def scores(network: Network, questions: int = QUESTIONS) -> dict[str, float]:
    """For each skill, the share of greedy replies that are right and end where they should."""
    return {name: _score(network, name, questions) for name in SKILLS}


def described(found: dict[str, float]) -> str:
    """The scores in one line."""
    return ", ".join(f"{name} {score:.1%}" for name, score in found.items())


def passed(network: Network, name: str, questions: int) -> Iterator[bool]:
    """For each question of a skill, in the order of their lengths, whether the reply is right.

    A greedy reply equals the expected one if, after each of its tokens, the likeliest token is the
    next one; so one pass over question and reply decides.
    """
    random = Random(f"{_SEED} {name}")
    examples = [example_of(SKILLS[name](random, is_exam=True)) for _ in range(questions)]
    for group in grouped(examples):
        batch = batch_of(group)
        with torch.no_grad():
            likeliest = network(batch.tokens, batch.positions).argmax(-1)
        is_right = (likeliest == batch.labels) | (batch.labels < 0)
        yield from is_right.all(-1).tolist()


def _score(network: Network, name: str, questions: int) -> float:
    return sum(passed(network, name, questions)) / questions
