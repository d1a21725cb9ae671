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
        self._taken: deque[float] = deque(maxlen=most or 1)

    @property
    def left(self) -> int:
        """Restarts that are still allowed now. Safe to ask for from any thread."""
        horizon = self._clock() - self._window_seconds
        return self._most - sum(taken > horizon for taken in tuple(self._taken))

    def take(self) -> float | None:
        """Spend one restart; the seconds to wait before it, or None if there is none left."""
        left = self.left
        if not left:
            return None
        self._taken.append(self._clock())
        earlier = self._most - left
        return min(LONGEST_BACKOFF_SECONDS, 2.0 ** (earlier - 1)) if earlier else 0.0
