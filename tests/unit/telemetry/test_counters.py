"""Counters that never decrease, over all generations of the engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from holdfast.records import RankStats
from holdfast.telemetry.counters import Refusals, Totals
from sample_status import a_rank


def counted(totals: Totals, name: str) -> dict[tuple[int, int], float]:
    """A counter without further labels, by engine and rank."""
    return {key: counts[name][()] for key, counts in totals.ranks().items()}


def steps_of(totals: Totals) -> dict[tuple[int, int], float]:
    return counted(totals, "engine_steps_total")


def _rank_of(generation: int, steps: int) -> RankStats:
    return a_rank(generation=generation, steps=steps, scheduled_tokens=2 * steps)


@given(lives=st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=5), max_size=5))
def test_the_total_is_the_sum_of_what_each_generation_reached(lives: list[list[int]]) -> None:
    """However often a generation was seen, it counts once, with its largest value."""
    totals = Totals()
    for generation, seen in enumerate(lives, start=1):
        for steps in seen:
            totals.absorb([_rank_of(generation, steps)])
            totals.absorb([_rank_of(generation, steps)])
    expected = sum(max(seen) for seen in lives)
    assert steps_of(totals) == ({(0, 0): expected} if lives else {})
    tokens = counted(totals, "engine_scheduled_tokens_total")
    assert tokens == ({(0, 0): 2 * expected} if lives else {})


@given(seen=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 100)), max_size=20))
def test_totals_never_fall(seen: Sequence[tuple[int, int]]) -> None:
    """Not even when an old record comes after a new one."""
    totals, before = Totals(), 0.0
    for generation, steps in seen:
        totals.absorb([_rank_of(generation, steps)])
        after = steps_of(totals)[(0, 0)]
        assert after >= before
        before = after


def test_a_late_record_of_an_earlier_generation_adds_nothing() -> None:
    """A slow scrape that still holds the dead generation does not count anything twice."""
    totals = Totals()
    for generation, steps in ((1, 10), (2, 5), (1, 9), (2, 6)):
        totals.absorb([_rank_of(generation, steps)])
    assert steps_of(totals) == {(0, 0): 16}


def test_ranks_are_counted_apart() -> None:
    """Ranks of one engine, and engines, do not mix."""
    totals = Totals()
    totals.absorb([a_rank(engine=e, rank=r, steps=10 * e + r) for e in (0, 1) for r in (0, 1)])
    assert steps_of(totals) == {(0, 0): 0, (0, 1): 1, (1, 0): 10, (1, 1): 11}


def test_scrapes_and_the_supervisor_may_meet() -> None:
    """Concurrent absorption of the same generation counts it once."""
    totals = Totals()
    ranks = [a_rank(rank=rank, steps=steps) for rank in range(4) for steps in range(200)]
    threads = [threading.Thread(target=totals.absorb, args=(ranks,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert list(steps_of(totals).values()) == [199] * 4


def test_only_what_was_counted_is_told() -> None:
    """By its label."""
    refusals = Refusals()
    assert refusals.counts() == {}
    refusals.count("overloaded")
    refusals.count("overloaded")
    assert refusals.counts() == {"overloaded": 2}
