"""When was the page of metrics asked for, and will it be once more?"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

LONGEST_WAIT_SECONDS = 30.0
"""Prometheus scrapes every 15 s or 30 s; who scrapes less often is not waited for to the end."""
_REMEMBERED = 5
_LATE_SHARE = 1.2
_LATE_SECONDS = 1.0
"""How much later than the last ones a scrape may come and is expected all the same."""


class Scrapes:
    """Remembers the last few scrapes. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._came = asyncio.Event()

    def count(self) -> None:
        """One has been answered."""
        self._seconds.append(self._clock())
        self._came.set()

    async def until_next(self, *, unless: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Wait for a scrape that is due within half a minute; not where nobody scrapes.

        Anyone who reaches the page can have it seem due, so the wait is over when `unless` is.
        """
        self._came.clear()
        left_seconds = self._due_seconds() - self._clock()
        if left_seconds <= 0:
            return
        ends = {asyncio.create_task(unless()), asyncio.create_task(self._came.wait())}
        try:
            await asyncio.wait(
                ends,
                timeout=min(left_seconds, LONGEST_WAIT_SECONDS),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            for end in ends:
                end.cancel()
            await asyncio.wait(ends)

    def _due_seconds(self) -> float:
        """When one should have come; in the past if none did at all, or not twice."""
        longest = max((after - before for before, after in pairwise(self._seconds)), default=None)
        if longest is None:
            return 0.0
        return self._seconds[-1] + _LATE_SHARE * longest + _LATE_SECONDS
