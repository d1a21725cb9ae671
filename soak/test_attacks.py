"""Attacks on the front end and on a bare uvicorn application, side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from attacks import MIB, Cost, target, under_attack

REPETITIONS = int(os.environ.get("SOAK_ATTACKS", "5"))
ASKED = 1000
SIZES = {
    "slow_headers": 200,
    "idle": 10_000,
    "large_body": 1024,
    "chunked_body": 1024,
    "deep_json": 100_000,
    "closing_json": 31,
}
MAX_SLOWER = 2.0
MAX_LARGER = 1.2


def costs(kind: str, attack: str) -> tuple[Cost, Cost]:
    """What a fresh server needs before an attack and under it."""
    with target(kind) as server:
        server.cost(ASKED)  # the first answers are slower than those of a server that runs
        before = server.cost(ASKED)
        with under_attack(attack, server.port, SIZES[attack]):
            return before, server.cost(ASKED)


def together(runs: Sequence[tuple[Cost, Cost]]) -> tuple[Cost, Cost]:
    """All runs of one kind, before and under."""
    before, under = zip(*runs, strict=True)
    return Cost.of_all(before), Cost.of_all(under)


def ratio(before: Cost, under: Cost) -> float:
    """How much slower the slow answers are."""
    return under.slow_seconds / before.slow_seconds


def line(kind: str, before: Cost, under: Cost) -> str:
    """A row of the table."""
    numbers = (before.median_seconds, before.slow_seconds, under.median_seconds, under.slow_seconds)
    times = "".join(f"{seconds * 1000:9.2f}" for seconds in numbers)
    sizes = f"{before.peak_bytes / MIB:9.1f}{under.peak_bytes / MIB:9.1f}"
    return f"{kind:7}{times}{ratio(before, under):7.2f}{sizes}"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("attack", SIZES)
def test_an_attack_costs_neither_time_nor_memory(attack: str) -> None:
    """The slow answers of `/livez` at most double, and the memory is near a bare server's."""
    runs = [(costs("bare", attack), costs("front", attack)) for _ in range(REPETITIONS)]
    print(f"\n{attack} ({SIZES[attack]}); times in ms, memory in MiB")
    print("           p50      p99  p50 att  p99 att  ratio     peak peak att")
    for bare, front in runs:
        print(line("bare", *bare))
        print(line("front", *front))
    bare, front = (together(costs) for costs in zip(*runs, strict=True))
    print(f"together\n{line('bare', *bare)}\n{line('front', *front)}")
    slower, larger = ratio(*front), front[1].peak_bytes / bare[1].peak_bytes
    print(f"p99 {slower:.2f} x idle, memory {larger:.2f} x bare")
    assert slower <= MAX_SLOWER
    assert larger <= MAX_LARGER
