"""What a soak has seen so far. One check fills it, and the checks after it judge it.

It is there from the beginning, so that a soak which is cut short is judged as far as it came.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.verify.agreement import DifferenceLimits, Scores
from holdfast.verify.records import HoldfastFacts
from holdfast.verify.soak_plan import SoakPlan
from holdfast.verify.trial import InconclusiveError, SkippedError, Trial


@dataclass(frozen=True, slots=True)
class SoakSample:
    """What the server said of itself at one moment."""

    at_seconds: float
    """Seconds since the soak began."""
    memory_bytes: float | None
    """None if the server does not report it."""
    facts: HoldfastFacts | None
    """What Holdfast said of itself, also in `/metrics`."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the server answered to the requests that are the same each time, with no load."""

    at_seconds: float
    text: str
    """A greedy answer."""
    prefill: Scores = field(default_factory=dict)
    """The log-probs of one prompt; empty if the server does not report them."""
    decode: Scores = field(default_factory=dict)
    """The log-probs of the answer behind it, token by token."""
    again: Scores = field(default_factory=dict)
    """The log-probs of prompt and answer as one prompt."""
    cached: Scores = field(default_factory=dict)
    """The log-probs of an answer behind a prefix from the cache; empty if the server has none."""
    cold: Scores = field(default_factory=dict)
    """The log-probs of the same tokens from prefills without the cache."""
    broken: str = ""
    """What is wrong with a log-prob; empty if nothing is."""


@dataclass(slots=True)
class SoakHistory:
    """A soak so far."""

    lasted_seconds: float = 0.0
    asked: Counter[str] = field(default_factory=Counter)
    """How many requests there were, by kind."""
    errors: int = 0
    """The errors that were not provoked on purpose."""
    answered_at_seconds: array[float] = field(default_factory=lambda: array("d"))
    """When each whole answer had come, since the soak began."""
    answer_seconds: array[float] = field(default_factory=lambda: array("d"))
    """How long each took."""
    samples: list[SoakSample] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    limits: DifferenceLimits | None = None
    """How far log-probs may differ; None if they cannot be compared."""
    cached_limits: DifferenceLimits | None = None
    """The same behind a prefix from the cache, which may be long; None if no look has one."""
    obstacle: SkippedError | InconclusiveError | None = None
    """Why they cannot."""

    @property
    def memory(self) -> list[tuple[float, float, int]]:
        """Time, bytes and the generation of the engine, of each sample that has them."""
        return [
            (one.at_seconds, one.memory_bytes, one.facts.generation if one.facts else 0)
            for one in self.samples
            if one.memory_bytes is not None
        ]

    @property
    def told(self) -> list[tuple[float, HoldfastFacts]]:
        """What Holdfast said, and when."""
        return [(one.at_seconds, one.facts) for one in self.samples if one.facts is not None]

    def by_third(self) -> Mapping[int, list[float]]:
        """How long the answers of the first, second and last third took."""
        thirds: dict[int, list[float]] = {0: [], 1: [], 2: []}
        for at_seconds, seconds in zip(self.answered_at_seconds, self.answer_seconds, strict=True):
            thirds[min(int(3 * at_seconds / self.lasted_seconds), 2)].append(seconds)
        return thirds


async def begun(_trial: Trial) -> SoakHistory:
    """A history in which nothing has happened; `Trial.once` keeps it."""
    return SoakHistory()


async def history_of(trial: Trial) -> SoakHistory:
    """The history of the soak of this run.

    Raises:
        SkippedError: there was none.
    """
    found = await trial.once(begun)
    if not found.samples:
        raise SkippedError("there was no soak to judge; see soak.load")
    return found


def plan(trial: Trial) -> SoakPlan:
    """How the soak is to be."""
    return trial.options.soak or SoakPlan()
