"""Growth in a served engine: the tokens are those without it, and long prompts are answered."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gpu_check.engine.subjects import MAX_MODEL_LEN, Engine
from gpu_check.records import CheckFailedError, Measured

_SHORT_LENGTHS = (5, 31, 128, 300)
_SHORT_TOKENS, _LONG_TOKENS = 32, 16
LONG = 7000
"""Tokens of a prompt that needs more than is reserved."""
LONGEST = MAX_MODEL_LEN - 64


def prompt(length: int) -> list[int]:
    """Letters, another beginning for each length."""
    return [65 + (length + 7 * i + i // 26) % 26 for i in range(length)]


def short_answers(engine: Engine) -> list[list[int]]:
    """What the engine says to prompts that fit into what is reserved."""
    return [engine.server.tokens(prompt(length), _SHORT_TOKENS) for length in _SHORT_LENGTHS]


def answers(engine: Engine) -> list[list[int]]:
    """The same and, between two rounds of them, to a long one, twice."""
    before = short_answers(engine)
    first = engine.server.tokens(prompt(LONG), _LONG_TOKENS)
    after = short_answers(engine)
    return [*before, first, *after, engine.server.tokens(prompt(LONG), _LONG_TOKENS)]


def locked_growths(engine: Engine) -> list[int]:
    """Of each rank: how often a workspace grew after the lock."""
    return [int(rank["growths"]["locked"]) for rank in engine.server.status()["workspace"]]


def refused(engine: Engine) -> int:
    """How many requests for workspace were refused."""
    return sum(sum(rank["rejections"].values()) for rank in engine.server.status()["workspace"])


def same_tokens(engine: Engine) -> Sequence[Measured]:
    """Before, in and after the growth; all again for what needs no growth any more."""
    already = locked_growths(engine)
    said = answers(engine)
    grown = locked_growths(engine)
    if not all(now > then for now, then in zip(grown, already, strict=True)):
        raise CheckFailedError(f"growths of each rank: {already} before, {grown} after the prompt")
    demand_halves_alike(said)
    if not engine.tokens_path.exists():
        engine.tokens_path.write_text(json.dumps(said))
    return [
        Measured("answers that are the same before and after", len(said) // 2),
        Measured("tokens compared", sum(map(len, said)) // 2, "tokens"),
        Measured("growths after the lock", max(grown)),
    ]


def demand_halves_alike(said: Sequence[Sequence[int]]) -> None:
    """The first half was said before a growth and in it, the second half after it."""
    half = len(said) // 2
    for before, after in zip(said[:half], said[half:], strict=True):
        if before != after:
            raise CheckFailedError(f"{before} before or in the growth, {after} after it")


def long_prompt(engine: Engine) -> Sequence[Measured]:
    """A prompt longer than anything before: answered by the same engine, and nothing refused."""
    generation = engine.server.status()["engine"]["generation"]
    said = engine.server.tokens(prompt(LONGEST), _LONG_TOKENS)
    after, count = engine.server.status()["engine"]["generation"], refused(engine)
    if after != generation or count:
        raise CheckFailedError(f"generation {generation}, then {after}; {count} refusals")
    held = [
        sum(slot["size_bytes"] for slot in rank["slots"])
        for rank in engine.server.status()["workspace"]
    ]
    return [
        Measured("prompt", LONGEST, "tokens"),
        Measured("answer", len(said), "tokens"),
        Measured("workspace of a rank", max(held), "bytes"),
        Measured("growths after the lock", max(locked_growths(engine))),
    ]
