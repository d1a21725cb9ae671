"""Writes monotonic times as times of day, each always as the same, until the clock is set."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.telemetry.logs import iso_time

TOLERANCE_SECONDS = 1.0
"""Less is a step of the clock's own correction: times that move with it would be changes."""


class WallClock:
    """How far the wall clock is ahead of the monotonic one. Belongs to one event loop."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._ahead_seconds = self._measured()

    def was_set(self) -> bool:
        """Look at both clocks; whether one was set since the last look, as after a suspension."""
        ahead_seconds = self._measured()
        if abs(ahead_seconds - self._ahead_seconds) <= TOLERANCE_SECONDS:
            return False
        self._ahead_seconds = ahead_seconds
        return True

    def written(self, monotonic_seconds: float) -> str:
        """Return a monotonic time as `/statusz` writes times."""
        return iso_time(monotonic_seconds + self._ahead_seconds)

    def _measured(self) -> float:
        return self._wall() - self._monotonic()
