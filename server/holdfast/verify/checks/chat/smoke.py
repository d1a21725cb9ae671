"""Questions that every model of use answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from holdfast.verify.answers import excerpt, has_words
from holdfast.verify.check import Check
from holdfast.verify.trial import InconclusiveError, Trial

_ANSWER_TOKENS = 512
"""Room for a model that thinks first."""
_SHOWN_CHARACTERS = 80


def says(question: str, *words: str) -> Callable[[Trial], Awaitable[None]]:
    """A check that the answer to a question has one of some words, whole and in any case."""

    async def check(trial: Trial) -> None:
        answer = await trial.chat(question, max_tokens=_ANSWER_TOKENS)
        said = answer.content()
        is_right = any(has_words(said, word) for word in words)
        if not is_right and answer.is_cut_in_thought():
            raise InconclusiveError(f"it still thinks after {_ANSWER_TOKENS} tokens")
        found, wanted = excerpt(said, _SHOWN_CHARACTERS), " or ".join(words)
        trial.require(is_right, f"it says {found!r} and not {wanted}", answer)

    return check


CHECKS = (
    Check(
        "arithmetic",
        "chat",
        says("What is 17 + 25? Answer with the number only.", "42"),
        "The model adds two numbers.",
        needs=("chat",),
    ),
    Check(
        "capital",
        "chat",
        says("What is the capital of France?", "Paris"),
        "The model knows the capital of France.",
        needs=("chat",),
    ),
    Check(
        "greeting",
        "chat",
        says("Hello!", "hello", "hi", "hey", "welcome", "greetings"),
        "The model answers a greeting with one.",
        needs=("chat",),
    ),
)
