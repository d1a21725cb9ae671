"""How fast are requests answered, and when is one of a key's requests likely to end?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from statistics import median

MEMORY_SECONDS = 30.0
"""Requests older than this count for little."""


class ServiceRate:
    """Requests done per second while the engine was at capacity.

    Only that time shows what the engine can do: below capacity the rate is that of the clients.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_saturated = False
        self._last = clock()
        self._seconds = 0.0
        self._done = 0.0

    @property
    def per_second(self) -> float | None:
        """Requests done per second; None until one was done at capacity."""
        self._pass_time()
        return self._done / self._seconds if self._done and self._seconds else None

    def done(self) -> None:
        """Count a request that is done."""
        self._pass_time()
        if self._is_saturated:
            self._done += 1.0

    def saturated(self, is_saturated: bool) -> None:
        """Set whether the engine is at capacity from now on."""
        if is_saturated is not self._is_saturated:
            self._pass_time()
            self._is_saturated = is_saturated

    def _pass_time(self) -> None:
        now = self._clock()
        passed, self._last = now - self._last, now
        if self._is_saturated:
            kept = math.exp(-passed / MEMORY_SECONDS)
            self._done *= kept
            self._seconds = self._seconds * kept + MEMORY_SECONDS * (1.0 - kept)


REMEMBERED = 15
"""The number of latest requests of a key that predict how long the next one takes."""
LEAST_UNKNOWN_SECONDS = 5.0
"""The estimate while no request has finished yet."""


class Durations:
    """The running requests of each key, and how long the latest ones took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: dict[str, dict[Hashable, float]] = {}
        self._took: dict[str, list[float]] = {}
        self._all_took: list[float] = []

    def begin(self, key: str, request: Hashable) -> None:
        """Start the clock of a request."""
        self._began.setdefault(key, {})[request] = self._clock()

    def end(self, key: str, request: Hashable, took_seconds: float | None = None) -> None:
        """Record the duration of a request, by the clock unless given; ignore one not begun."""
        at_work = self._began.get(key, {})
        began_seconds = at_work.pop(request, None)
        if began_seconds is None:
            return
        if not at_work:
            del self._began[key]
        for took in (self._took.setdefault(key, []), self._all_took):
            took.append(self._clock() - began_seconds if took_seconds is None else took_seconds)
            del took[:-REMEMBERED]

    def left_seconds(self, key: str) -> float | None:
        """Return the time until one of a key's requests is likely to end; None if none is running.

        A new key is assumed to be like the others, and a request that takes longer than usual is
        assumed to take as long again.
        """
        if key not in self._began:
            return None
        now = self._clock()
        ages = [now - began for began in self._began[key].values()]
        took = self._took.get(key) or self._all_took
        if not took:
            return max(LEAST_UNKNOWN_SECONDS, min(ages))
        usual_seconds = median(took)
        return min(usual_seconds - age if age < usual_seconds else age for age in ages)
