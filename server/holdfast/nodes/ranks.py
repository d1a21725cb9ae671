"""The statistics of ranks on another node, as they are sent and as the head reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.records import RankStats


def without_steps(ranks: Iterable[RankStats]) -> tuple[RankStats, ...]:
    """Return the statistics without the recent steps, which would be most of the bytes."""
    return tuple(replace(rank, recent_steps=()) for rank in ranks)


def on_clock(ranks: Iterable[RankStats], offset_seconds: float) -> tuple[RankStats, ...]:
    """Return the statistics with every time moved by the difference of two nodes' clocks."""
    return tuple(_on_clock(rank, offset_seconds) for rank in ranks)


def _on_clock(rank: RankStats, offset_seconds: float) -> RankStats:
    def moved(seconds: float | None) -> float | None:
        return None if seconds is None else seconds + offset_seconds

    return replace(
        rank,
        phases={phase: seconds + offset_seconds for phase, seconds in rank.phases.items()},
        running_step_started_seconds=moved(rank.running_step_started_seconds),
        last_step_ended_seconds=moved(rank.last_step_ended_seconds),
    )
