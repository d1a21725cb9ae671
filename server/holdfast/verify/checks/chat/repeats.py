"""Does it say the same again, where it is asked to?"""

from __future__ import annotations

from typing import Any

from holdfast.verify.check import Check
from holdfast.verify.trial import Trial

_QUESTION = "Tell me a short story about a lighthouse."
_TOKENS = 32


async def greedy(trial: Trial) -> None:
    """A greedy answer, three times, with nothing beside it."""
    said = {await _content(trial, temperature=0) for _ in range(3)}
    trial.measure("different answers", len(said))
    if len(said) > 1:
        trial.warn("the greedy answer to a question is not always the same")


async def seeds(trial: Trial) -> None:
    """A warm answer, twice with one seed; then with others."""
    first = await _content(trial, temperature=1.0, seed=7)
    second = await _content(trial, temperature=1.0, seed=7)
    if first != second:
        steady = {await _content(trial, temperature=0) for _ in range(3)}
        said = "two answers under one seed differ"
        if len(steady) > 1:
            trial.warn(f"{said}, as greedy answers do")
        else:
            trial.blame(said)
    others = {await _content(trial, temperature=1.0, seed=seed) for seed in range(8, 12)}
    trial.measure("different answers under other seeds", len(others))
    if others == {first}:
        trial.warn("every seed gives the same answer, at temperature 1")


async def _content(trial: Trial, **options: Any) -> str:
    answer = await trial.chat(_QUESTION, max_tokens=_TOKENS, **options)
    return f"{answer.reasoning()}\n{answer.content()}"


CHECKS = (
    Check(
        "greedy",
        "chat",
        greedy,
        "A greedy answer is the same each time, with no other request beside it.",
        needs=("chat",),
    ),
    Check(
        "seeds",
        "chat",
        seeds,
        "The same seed gives the same answer each time, and another seed a different one.",
        needs=("chat",),
    ),
)
