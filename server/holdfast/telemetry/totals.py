"""The counters that must span many engine generations.

The counters of a rank start at zero with each generation, because a new worker writes a new file.
Prometheus expects counters that never decrease, so the totals of earlier generations are kept here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from holdfast.records import GROWTH_PHASES, REJECTION_KINDS, ProbeReport, RankStats

ProbeResult = Literal["passed", "failed"]
PROBE_RESULTS: tuple[ProbeResult, ...] = ("passed", "failed")


@dataclass(frozen=True, slots=True)
class RankCounters:
    """All counters of one rank; growths and rejections are in the order of `records`."""

    growths: tuple[int, ...] = (0,) * len(GROWTH_PHASES)
    rejections: tuple[int, ...] = (0,) * len(REJECTION_KINDS)
    steps: int = 0
    scheduled_tokens: int = 0

    @classmethod
    def of(cls, rank: RankStats) -> RankCounters:
        """Return the counters in the record of one generation."""
        return cls(
            growths=tuple(rank.growths.get(phase, 0) for phase in GROWTH_PHASES),
            rejections=tuple(rank.rejections.get(kind, 0) for kind in REJECTION_KINDS),
            steps=rank.steps,
            scheduled_tokens=rank.scheduled_tokens,
        )

    def plus(self, other: RankCounters) -> RankCounters:
        """Return the sum of each counter."""
        return RankCounters(
            growths=tuple(map(sum, zip(self.growths, other.growths, strict=True))),
            rejections=tuple(map(sum, zip(self.rejections, other.rejections, strict=True))),
            steps=self.steps + other.steps,
            scheduled_tokens=self.scheduled_tokens + other.scheduled_tokens,
        )

    def at_least(self, other: RankCounters) -> RankCounters:
        """Return the larger value of each counter."""
        return RankCounters(
            growths=tuple(map(max, zip(self.growths, other.growths, strict=True))),
            rejections=tuple(map(max, zip(self.rejections, other.rejections, strict=True))),
            steps=max(self.steps, other.steps),
            scheduled_tokens=max(self.scheduled_tokens, other.scheduled_tokens),
        )


@dataclass(frozen=True, slots=True)
class _Lives:
    """The generations of one rank: the sum of the ended ones, and the newest one seen."""

    earlier: RankCounters
    generation: int
    newest: RankCounters


class Totals:
    """Counters that never decrease, over all engine generations. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lives: dict[tuple[int, int], _Lives] = {}
        self._probe_runs: dict[ProbeResult, int] = dict.fromkeys(PROBE_RESULTS, 0)

    def absorb(self, ranks: Iterable[RankStats]) -> None:
        """Add what the ranks wrote; repeated values and late, older ones add nothing.

        The owner of the engine calls this when a generation ends, since the last values of a dying
        generation would be lost if no scrape came between its death and the next start.
        """
        with self._lock:
            for rank in ranks:
                key = (rank.engine, rank.rank)
                self._lives[key] = _after(self._lives.get(key), rank)

    def probe_ran(self, report: ProbeReport) -> None:
        """Count one finished run of the probe."""
        with self._lock:
            self._probe_runs["passed" if report.passed else "failed"] += 1

    def ranks(self) -> Mapping[tuple[int, int], RankCounters]:
        """Return the totals by (engine, rank), for every rank ever seen."""
        with self._lock:
            lives = sorted(self._lives.items())
        return {key: life.earlier.plus(life.newest) for key, life in lives}

    def probe_runs(self) -> Mapping[ProbeResult, int]:
        """Return how often the probe ended with each result."""
        with self._lock:
            return dict(self._probe_runs)


def _after(known: _Lives | None, rank: RankStats) -> _Lives:
    seen = RankCounters.of(rank)
    if known is None:
        return _Lives(RankCounters(), rank.generation, seen)
    if rank.generation < known.generation:
        return known
    if rank.generation == known.generation:
        return _Lives(known.earlier, known.generation, known.newest.at_least(seen))
    return _Lives(known.earlier.plus(known.newest), rank.generation, seen)
