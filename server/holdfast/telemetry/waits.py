"""How long requests waited in the front end, as a histogram."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

BOUNDS_SECONDS = (0.01, 0.04, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
"""From what no user notices to what nearly no client waits for; each is one of vLLM's for the time
to the first token, so that both can be read beside each other."""


class Waits:
    """Counts waits by their length. One event loop counts, any thread may read."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self.sum_seconds = 0.0
        """All of them together."""

    def count(self, seconds: float) -> None:
        """Count one wait; 0 for a request that did not have to."""
        self._counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.sum_seconds += seconds

    @property
    def buckets(self) -> list[tuple[float, int]]:
        """For each bound, the last of which is infinity, how many waits were not longer."""
        return list(zip((*BOUNDS_SECONDS, math.inf), accumulate(self._counts), strict=True))
