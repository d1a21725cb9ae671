"""Draws attacks at random, several at a time, until standard input ends; a line for each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from holdfast.listener.connection_table import connection_limit
from hostile import bodies, connections, crashes, doors, grammars
from hostile.target import Outcomes, Target

ATTACKS = {**connections.ATTACKS, **bodies.ATTACKS, **grammars.ATTACKS, **doors.ATTACKS}
NICENESS = 10
PAUSE_SECONDS = 0.5
"""The pause between two attacks of a lane, so that the test is not about bandwidth."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an adversary is to do."""

    port: int
    key: str
    model: str
    seed: int
    lanes: int
    """Attacks at a time, beside those that crash."""
    attack_seconds: float
    calm_seconds: float
    """Before the first crash: after three of them the key is refused, and much else with it."""
    crash_pause_seconds: float
    names: Sequence[str] = ()
    """The attacks that are drawn; all where none is named."""


def drawn(seed: int, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Attacks, each with a seed of its own; the same ones in the same order for the same seed.

    Each comes once before any comes twice.
    """
    chosen = Random(seed)
    while names:
        for name in chosen.sample(names, k=len(names)):
            yield name, chosen.getrandbits(64)


async def attack(plan: Plan, name: str, seed: int) -> None:
    """One attack, and the line about it."""
    started = time.monotonic()
    target = Target(plan.port, plan.key, plan.model, Random(seed), plan.attack_seconds)
    try:
        async with asyncio.timeout(2 * plan.attack_seconds):
            outcomes: Mapping[str, int] = await {**ATTACKS, **crashes.ATTACKS}[name](target)
    except TimeoutError:
        outcomes = Outcomes(["bounded"])
    except OSError:
        outcomes = Outcomes(["reset"])
    seconds = time.monotonic() - started
    said = {"name": name, "seed": seed, "started": started, "seconds": seconds}
    print(json.dumps(said | {"outcomes": outcomes}), flush=True)  # noqa: T201 - to the parent process


async def lane(
    plan: Plan, names: Iterator[tuple[str, int]], pause_seconds: float, is_enough: asyncio.Event
) -> None:
    """One attack after the other."""
    for name, seed in names:
        if is_enough.is_set():
            return
        await attack(plan, name, seed)
        await _waited(is_enough, pause_seconds)


async def main() -> None:
    """Attack until standard input ends."""
    plan = Plan(**json.loads(sys.stdin.readline()))
    connection_limit(None)
    os.nice(NICENESS)
    is_enough = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), is_enough.set)
    attacks, killers = (
        drawn(plan.seed, [name for name in known if name in (plan.names or known)])
        for known in (ATTACKS, crashes.ATTACKS)
    )
    lanes = [
        asyncio.create_task(lane(plan, attacks, PAUSE_SECONDS, is_enough))
        for _ in range(plan.lanes)
    ]
    await _waited(is_enough, plan.calm_seconds)
    await lane(plan, killers, plan.crash_pause_seconds, is_enough)
    await is_enough.wait()
    loop.remove_reader(sys.stdin.fileno())
    await asyncio.gather(*lanes)


async def _waited(is_enough: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(is_enough.wait(), seconds)


if __name__ == "__main__":
    asyncio.run(main())
