"""Does it say the same again, where it is asked to?"""

from __future__ import annotations

from typing import Any

from holdfast.verify.check import Check
from holdfast.verify.checks.sampling import refused_seeds
from holdfast.verify.target import Answer
from holdfast.verify.trial import CHAT, SkippedError, Trial

_QUESTION = "Tell me a short story about a lighthouse."
_TOKENS = 32
_FINGERPRINT = "system_fingerprint"
"""The field by which OpenAI's API shows that a seed may have lost its meaning."""


async def greedy(trial: Trial) -> None:
    """A greedy answer, three times, with nothing beside it."""
    said = {_said(await _ask(trial, temperature=0)) for _ in range(3)}
    trial.measure("different answers", len(said))
    if len(said) > 1:
        trial.warn("the greedy answer to a question is not always the same")


async def seeds(trial: Trial) -> None:
    """A sampled answer, twice with one seed; then with others."""
    if refusal := (await trial.once(refused_seeds)).get(CHAT):
        raise SkippedError(f"the server refuses `seed`: {refusal}")
    first = await _ask(trial, temperature=1.0, seed=7)
    second = await _ask(trial, temperature=1.0, seed=7)
    if _said(first) != _said(second):
        await _note_difference(trial, first, second)
    others = {_said(await _ask(trial, temperature=1.0, seed=seed)) for seed in range(8, 12)}
    trial.measure("different answers under other seeds", len(others))
    if others == {_said(first)}:
        trial.warn("every seed gives the same answer, at temperature 1")


async def _note_difference(trial: Trial, first: Answer, second: Answer) -> None:
    """Blame vLLM, which promises the same answer; OpenAI's API has a seed as best effort."""
    said = "two answers under one seed differ"
    if not trial.server.is_vllm:
        prints = [one.document.get(_FINGERPRINT) for one in (first, second)]
        changed = f", and `{_FINGERPRINT}` changed" if prints[0] != prints[1] else ""
        trial.warn(f"{said}: this server does not promise that they are equal{changed}")
        return
    steady = {_said(await _ask(trial, temperature=0)) for _ in range(3)}
    if len(steady) > 1:
        trial.warn(f"{said}, as greedy answers do")
    else:
        trial.blame(said)


async def _ask(trial: Trial, **options: Any) -> Answer:
    return await trial.chat(_QUESTION, max_tokens=_TOKENS, **options)


def _said(answer: Answer) -> str:
    return f"{answer.reasoning()}\n{answer.content()}"


CHECKS = (
    Check(
        "greedy",
        "chat",
        greedy,
        "A greedy answer repeats while nothing else runs; otherwise the check warns.",
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
