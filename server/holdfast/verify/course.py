"""What became of Holdfast's engines in the course of a run, as checks saw it.

A check that ends an engine on purpose notes here what Holdfast said before, because the counters of
the next engine begin at 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from holdfast.verify.records import HoldfastFacts
from holdfast.verify.trial import Trial

Counted = Literal["growths", "rejections"]


@dataclass(slots=True)
class Course:
    """The run so far."""

    told: list[HoldfastFacts] = field(default_factory=list)
    """What Holdfast said each time before a check ended its engine."""
    killed: int = 0
    """Engines that checks have killed; a restart by an operator is not a death."""


async def course_of(trial: Trial) -> Course:
    """The course of this run."""
    return await trial.once(_begun)


def restarts_in(told: Sequence[HoldfastFacts]) -> int | None:
    """How often the server itself, and not only its engine, has started meanwhile; None if unknown.

    A moment at which it did not say when it had started shows nothing.
    """
    known = [one for one in told if one.started_at_seconds is not None]
    if len(known) < 2:
        return None
    return sum(_is_restarted(*pair) for pair in pairwise(known))


def deaths_in(told: Sequence[HoldfastFacts]) -> float:
    """How many engines have died meanwhile, as far as the server reports it."""
    died = 0.0
    for before, now in pairwise(one for one in told if one.deaths is not None):
        died += (now.deaths or 0) - (0 if _is_restarted(before, now) else before.deaths or 0)
    return died


def since_the_first(told: Sequence[HoldfastFacts], name: Counted) -> Iterator[int]:
    """A count at each moment; the counters of a new engine, or of a new server, begin at 0."""
    total = 0
    yield total
    for before, now in pairwise(told):
        is_same = now.generation == before.generation and not _is_restarted(before, now)
        total += max(getattr(now, name) - (getattr(before, name) if is_same else 0), 0)
        yield total


def _is_restarted(before: HoldfastFacts, now: HoldfastFacts) -> bool:
    """Whether the server is known to have started in between, at which it counts from 0."""
    return len({before.started_at_seconds, now.started_at_seconds} - {None}) > 1


async def _begun(_trial: Trial) -> Course:
    return Course()
