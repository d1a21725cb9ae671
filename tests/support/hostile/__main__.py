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
from itertools import cycle
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
    """The key of all attacks except killers."""
    killer_keys: Sequence[str]
    """One for each killer in turn: a key is refused after three deaths."""
    model: str
    seed: int
    lanes: int
    """Attacks at a time, beside those that crash."""
    attack_seconds: float
    calm_seconds: float
    """Before the first crash."""
    crash_pause_seconds: float
    killers: Sequence[str]
    """The requests that end the engine, each sent once."""
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


async def attack(plan: Plan, name: str, seed: int, key: str) -> None:
    """One attack, and the line about it."""
    started = time.monotonic()
    target = Target(plan.port, key, plan.model, Random(seed), plan.attack_seconds)
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


async def lane(plan: Plan, names: Iterator[tuple[str, int]], is_enough: asyncio.Event) -> None:
    """One attack after the other."""
    for name, seed in names:
        if is_enough.is_set():
            return
        await attack(plan, name, seed, plan.key)
        await _waited(is_enough, PAUSE_SECONDS)


async def kill(plan: Plan, is_enough: asyncio.Event) -> None:
    """Each killer once, when there is an engine to kill."""
    chosen = Random(plan.seed)
    for name, key in zip(plan.killers, cycle(plan.killer_keys), strict=False):
        probing = Target(plan.port, key, plan.model, chosen, plan.attack_seconds)
        while not is_enough.is_set() and await probing.get("/readyz", has_key=False) != "200":
            await _waited(is_enough, PAUSE_SECONDS)
        if is_enough.is_set():
            return
        await attack(plan, name, chosen.getrandbits(64), key)
        await _waited(is_enough, plan.crash_pause_seconds)


async def main() -> None:
    """Attack until standard input ends."""
    plan = Plan(**json.loads(sys.stdin.readline()))
    connection_limit(None)
    os.nice(NICENESS)
    is_enough = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), is_enough.set)
    attacks = drawn(plan.seed, [name for name in ATTACKS if name in (plan.names or ATTACKS)])
    lanes = [asyncio.create_task(lane(plan, attacks, is_enough)) for _ in range(plan.lanes)]
    await _waited(is_enough, plan.calm_seconds)
    await kill(plan, is_enough)
    await is_enough.wait()
    loop.remove_reader(sys.stdin.fileno())
    await asyncio.gather(*lanes)


async def _waited(is_enough: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(is_enough.wait(), seconds)


if __name__ == "__main__":
    asyncio.run(main())
