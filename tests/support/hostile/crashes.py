"""Requests that end the engine; `hostile.poison` is the bug that they meet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from random import Random
from types import MappingProxyType
from typing import Any

from hostile.target import Outcomes, Target, told

ENDINGS = ("SEGV", "ABRT", "BUS", "FPE", "ILL", "raise")
"""Ways to end that accuse a request."""
SILENT_ENDINGS = ("KILL", "exit")
"""Ways that do not: the kernel's, which is out of memory, and a process that just leaves."""
KINDS = (*ENDINGS, *SILENT_ENDINGS, "stall")
LEAVING_SECONDS = 0.4
QUEUED = 64
"""More than the engine takes at once."""
SHARES = 3
"""Over this many seeds in a row, each killer is sent."""


def poison(target: Target, ending: str) -> Mapping[str, Any]:
    """Options of a request that ends its worker so; what does not matter varies."""
    return {
        "vllm_xargs": {"end_by": ending},
        "cache_salt": f"{target.chosen.random()}",
        "seed": target.chosen.randrange(2**31),
        "max_tokens": target.chosen.randrange(4, 64),
    }


async def one(ending: str, target: Target) -> Outcomes:
    """One request, with a client that waits for the answer."""
    return await told(
        [target.complete(poison(target, ending), prompt=[30 + KINDS.index(ending)] * 9)]
    )


async def leaving(target: Target) -> Outcomes:
    """One request, sent several times by a client that leaves."""
    ending = target.chosen.choice(ENDINGS)
    outcomes = Outcomes()
    for _ in range(4):
        options = poison(target, ending)
        outcomes += await told([target.complete(options, LEAVING_SECONDS, prompt=[77] * 7)])
    return outcomes


async def several(target: Target) -> Outcomes:
    """Several at once, each with a prompt of its own."""
    return await told(
        target.complete(poison(target, target.chosen.choice(ENDINGS)), prompt=[90 + number] * 5)
        for number in range(4)
    )


async def queued(target: Target) -> Outcomes:
    """More at once than the engine takes, each with a prompt of its own."""
    return await told(
        target.complete(poison(target, target.chosen.choice(ENDINGS)), prompt=[100 + number] * 5)
        for number in range(QUEUED)
    )


def of_seed(seed: int) -> list[str]:
    """Return the names of the killers that a run sends, in its order."""
    names = list(ATTACKS)[seed % SHARES :: SHARES]
    return Random(seed).sample(names, k=len(names))


ATTACKS: Mapping[str, Callable[[Target], Awaitable[Outcomes]]] = MappingProxyType(
    {
        **{f"crash by {ending}": partial(one, ending) for ending in ENDINGS + SILENT_ENDINGS},
        "crash and leave": leaving,
        "crash several times": several,
        "crash by a stall": partial(one, "stall"),
        "crash from the queue": queued,
    }
)
