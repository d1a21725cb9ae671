"""How late the event loop is. Whatever blocks it delays every stream and every health check."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.2
WINDOW_SECONDS = 60.0
BLOCKED_SECONDS = 0.25
"""Once the server is up, a longer delay is logged as a warning."""
WARNING_INTERVAL_SECONDS = 60.0


class LargestOf:
    """Finds the largest lag of the last `window_seconds`, in constant time per lag."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        # The lags decrease from left to right: one that a later lag has reached can never be the
        # largest again.
        self._lags: deque[tuple[float, float]] = deque()

    def add(self, lag_seconds: float, now_seconds: float) -> None:
        """Record a lag."""
        while self._lags and self._lags[-1][1] <= lag_seconds:
            self._lags.pop()
        self._lags.append((now_seconds, lag_seconds))

    def seconds(self, now_seconds: float) -> float:
        """Return the largest lag, or 0 if there is none."""
        while self._lags and self._lags[0][0] < now_seconds - self._window_seconds:
            self._lags.popleft()
        return self._lags[0][1] if self._lags else 0.0


class LoopLag:
    """Measures how late the loop of `measured` is. Any thread may read it, even while it blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent = LargestOf(WINDOW_SECONDS)
        self._marked_seconds: float | None = None
        self._due_seconds = math.inf
        self._quiet_until_seconds = 0.0

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Measure the running loop while entered."""
        task = asyncio.create_task(self._measure(), name="loop lag")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    def lag_seconds(self) -> float:
        """Return the largest delay of the last minute, including one that has not ended yet."""
        with self._lock:
            now = time.monotonic()
            return max(self._recent.seconds(now), self._overdue_seconds(now))

    def mark(self) -> None:
        """End the start-up: from now on, warn of a long delay."""
        with self._lock:
            self._marked_seconds = time.monotonic()

    async def _measure(self) -> None:
        """Sleep, and record how much longer it took, until cancelled."""
        try:
            while True:
                with self._lock:
                    self._due_seconds = time.monotonic() + INTERVAL_SECONDS
                await asyncio.sleep(INTERVAL_SECONDS)
                self._record()
        finally:
            self._record()
            with self._lock:
                self._due_seconds = math.inf

    def _record(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._recent.add(self._overdue_seconds(now), now)
            lag = self._since_mark_seconds(now)
            is_warned = lag > BLOCKED_SECONDS and now >= self._quiet_until_seconds
            if is_warned:
                self._quiet_until_seconds = now + WARNING_INTERVAL_SECONDS
        if is_warned:
            logger.warning(
                "the event loop was blocked for %.2f s, which delayed every stream and health "
                "check",
                lag,
                extra={"fields": {"seconds": lag}},
            )

    def _overdue_seconds(self, now_seconds: float) -> float:
        return max(0.0, now_seconds - self._due_seconds)

    def _since_mark_seconds(self, now_seconds: float) -> float:
        if self._marked_seconds is None:
            return 0.0
        return min(self._overdue_seconds(now_seconds), now_seconds - self._marked_seconds)
