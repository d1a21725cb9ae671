"""How often is a dead engine started again, and after what wait?

The budget counts the unexplained deaths within a window. When it is spent, the server ends if
deaths that accuse no request would have spent it alone: the hardware, a start that fails, a signal
from outside. Otherwise requests end the engine, and a new process would meet the same ones: the
server browns out, which means that it waits for minutes before each further start.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.engine.blame import Verdict
from holdfast.errors import EngineLostError
from holdfast.records import Death

logger = logging.getLogger(__name__)

LONGEST_BACKOFF_SECONDS = 30.0
BROWNOUT_SECONDS = 60.0
LONGEST_BROWNOUT_SECONDS = 300.0
REMEMBERED_DEATHS = 1024


@dataclass(slots=True)
class _Counted:
    """A death that counts against the budget, unless a request explains it."""

    at_seconds: float
    is_accusing: bool
    is_explained: bool = False


class RestartBudget:
    """Allows `most` restarts in any `window_seconds`: the first at once, then after 1, 2, 4 s."""

    def __init__(
        self,
        most: int,
        window_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._window_seconds = window_seconds
        self._clock = clock
        self._deaths: deque[_Counted] = deque(maxlen=REMEMBERED_DEATHS)

    @property
    def left(self) -> int:
        """The restarts that are still allowed. Any thread may ask."""
        return max(0, self._most - sum(not death.is_explained for death in self._recent()))

    def died(self, death: Death, verdict: Verdict) -> None:
        """Count a death, and refund those that it explains; a requested one is free."""
        if death.cause == "requested":
            return
        self._deaths.append(_Counted(self._clock(), verdict.has_suspects))
        unexplained = [counted for counted in reversed(self._deaths) if not counted.is_explained]
        for counted in unexplained[: verdict.explained]:
            counted.is_explained = True
            if verdict.is_charged:  # the key waits for it, and no other key
                self._deaths.remove(counted)

    def wait_seconds(self, death: Death) -> float:
        """Return how long to wait before the next start.

        Raises:
            EngineLostError: the budget is spent.
        """
        if death.cause == "requested":
            return 0.0
        recent = self._recent()
        if not self._most or sum(not counted.is_accusing for counted in recent) > self._most:
            raise EngineLostError(
                f"the engine died: {death}, after {self._most} restarts within "
                f"{self._window_seconds:.0f} s.",
                remedy="see the engine's log above, and start the server again; "
                "--max-engine-restarts allows more.",
            )
        excess = len(recent) - self._most
        if excess > 0:
            return min(LONGEST_BROWNOUT_SECONDS, BROWNOUT_SECONDS * 2.0 ** (excess - 1))
        earlier = len(recent) - 1
        return min(LONGEST_BACKOFF_SECONDS, 2.0 ** (earlier - 1)) if earlier > 0 else 0.0

    def _recent(self) -> list[_Counted]:
        horizon = self._clock() - self._window_seconds
        return [death for death in tuple(self._deaths) if death.at_seconds > horizon]
