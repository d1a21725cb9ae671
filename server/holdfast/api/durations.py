"""When is one of the requests of a key likely to end? By how long its requests take."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from statistics import median

REMEMBERED = 15
"""So many of its last requests say how long the next one takes."""
LEAST_UNKNOWN_SECONDS = 5.0
"""Before anything is known of how long requests take."""


class Durations:
    """The requests of each key that are at work, and how long the last ones took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: dict[str, dict[Hashable, float]] = {}
        self._took: dict[str, list[float]] = {}
        self._all_took: list[float] = []

    def begin(self, key: str, request: Hashable) -> None:
        """A request goes to work."""
        self._began.setdefault(key, {})[request] = self._clock()

    def end(self, key: str, request: Hashable, took_seconds: float | None = None) -> None:
        """A request is done, by the clock if not said otherwise; one that never began is not."""
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
        """Until one of a key's requests is likely to end; None if none is at work.

        A key that is new is taken for one like the others, and a request that takes longer than
        usual for one that takes as long again.
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
