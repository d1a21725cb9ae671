"""How often is a dead engine started again? A budget over a window of time, and the back-off."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

LONGEST_BACKOFF_SECONDS = 30.0


class RestartBudget:
    """At most `most` restarts in any `window_seconds`; the first at once, then 1, 2, 4 ... s."""

    def __init__(
        self,
        most: int,
        window_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._window_seconds = window_seconds
        self._clock = clock
        self._taken: deque[float] = deque()

    @property
    def left(self) -> int:
        """Restarts that are still allowed now."""
        self._forget()
        return self._most - len(self._taken)

    def take(self) -> float | None:
        """Spend one restart; the seconds to wait before it, or None if there is none left."""
        if not self.left:
            return None
        self._taken.append(self._clock())
        earlier = len(self._taken) - 1
        return min(LONGEST_BACKOFF_SECONDS, 2.0 ** (earlier - 1)) if earlier else 0.0

    def _forget(self) -> None:
        horizon = self._clock() - self._window_seconds
        while self._taken and self._taken[0] <= horizon:
            self._taken.popleft()
