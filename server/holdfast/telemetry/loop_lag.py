"""How late the event loop is: every stream and every health check waits for what blocks it."""

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
"""A longer delay is worth a warning once the server is up."""
WARNING_INTERVAL_SECONDS = 60.0


class LargestOf:
    """The largest of the lags of the last `window_seconds`, in constant time for each."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        # Lags that fall with time: one that a later one reached can never be the largest again.
        self._lags: deque[tuple[float, float]] = deque()

    def add(self, lag_seconds: float, now_seconds: float) -> None:
        """Take in a lag."""
        while self._lags and self._lags[-1][1] <= lag_seconds:
            self._lags.pop()
        self._lags.append((now_seconds, lag_seconds))

    def seconds(self, now_seconds: float) -> float:
        """The largest; 0 without any."""
        while self._lags and self._lags[0][0] < now_seconds - self._window_seconds:
            self._lags.popleft()
        return self._lags[0][1] if self._lags else 0.0


class LoopLag:
    """How late the loop is that `measured` runs on. Read from any thread, also while it blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent = LargestOf(WINDOW_SECONDS)
        self._largest_seconds = 0.0
        self._marked_seconds: float | None = None
        self._due_seconds = math.inf
        self._quiet_until_seconds = 0.0

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """While entered, the running loop is measured."""
        task = asyncio.create_task(self._measure(), name="loop lag")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    def lag_seconds(self) -> float:
        """The largest delay of the last minute, one that goes on included."""
        with self._lock:
            now = time.monotonic()
            return max(self._recent.seconds(now), self._overdue_seconds(now))

    def mark(self) -> None:
        """Start-up is over: from here the largest delay is kept, and a long one is warned of."""
        with self._lock:
            self._marked_seconds = time.monotonic()
            self._largest_seconds = 0.0

    def largest_since_mark_seconds(self) -> float:
        """The largest delay since the last `mark`, as `lag_seconds`; 0 before the first mark."""
        with self._lock:
            now = time.monotonic()
            return max(self._largest_seconds, self._since_mark_seconds(now))

    async def _measure(self) -> None:
        """Sleep, and note how much longer it took, until cancelled."""
        try:
            while True:
                with self._lock:
                    self._due_seconds = time.monotonic() + INTERVAL_SECONDS
                await asyncio.sleep(INTERVAL_SECONDS)
                self._note()
        finally:
            self._note()
            with self._lock:
                self._due_seconds = math.inf

    def _note(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._recent.add(self._overdue_seconds(now), now)
            lag = self._since_mark_seconds(now)
            self._largest_seconds = max(self._largest_seconds, lag)
            is_told = lag > BLOCKED_SECONDS and now >= self._quiet_until_seconds
            if is_told:
                self._quiet_until_seconds = now + WARNING_INTERVAL_SECONDS
        if is_told:
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
