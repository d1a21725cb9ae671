"""How often is a dead engine started again? A budget over a window of time, and the back-off."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from holdfast.errors import EngineLostError
from holdfast.records import Death

logger = logging.getLogger(__name__)

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

    async def back_off(self, death: Death, *, is_restartable: bool) -> None:
        """Wait before the next start; one that somebody asked for is free.

        Raises:
            EngineLostError: the budget is spent, or this engine cannot be started again.
        """
        if not is_restartable:
            raise EngineLostError(
                f"the engine died: {death}, and one on several nodes is not started again",
                remedy="start all nodes again.",
            )
        wait_seconds = 0.0 if death.cause == "requested" else self.take()
        if wait_seconds is None:
            raise EngineLostError(
                f"the engine died: {death}, after {self._most} restarts within "
                f"{self._window_seconds:.0f} s",
                remedy="see the engine's log above, and start again; --max-engine-restarts allows "
                "more.",
            )
        if wait_seconds:
            logger.info("waiting %.0f s before the next start", wait_seconds)
            await asyncio.sleep(wait_seconds)
