"""How fast are requests done while there is always a next one?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

MEMORY_SECONDS = 30.0
"""What is older than this counts for little."""


class ServiceRate:
    """Requests done for each second in which the engine had as many as it may have.

    Only such seconds say what it can do: with places free, the rate is that of the clients.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_saturated = False
        self._last = clock()
        self._seconds = 0.0
        self._done = 0.0

    @property
    def per_second(self) -> float | None:
        """Requests done a second; None before one was done while the engine was full."""
        self._pass_time()
        return self._done / self._seconds if self._done and self._seconds else None

    def done(self) -> None:
        """A request was done."""
        self._pass_time()
        if self._is_saturated:
            self._done += 1.0

    def saturated(self, is_saturated: bool) -> None:
        """From now on the engine is as full as it may be, or is not."""
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
