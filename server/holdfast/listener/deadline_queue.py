"""Many calls that are due at the end of the same time, and one timer for all of them."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable

Late = Callable[[], None]
"""A method of what is awaited: it names the one that is late, and is what happens then."""

LATE_AT_ONCE = 32
"""Thousands that came together are late together, and nobody else has to wait for them all."""


class Deadlines:
    """Calls each `late` whose time has run out; a time of 0 never does.

    All have the same time, so that their order is that of their deadlines: each costs an entry of a
    dictionary and no timer. Belongs to one event loop.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds or math.inf
        self._due: OrderedDict[Late, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, late: Late) -> bool:
        return late in self._due

    def start(self, late: Late) -> None:
        """Give it the whole time, from now."""
        self._due[late] = asyncio.get_running_loop().time() + self._seconds
        self._due.move_to_end(late)
        self._arm()

    def stop(self, late: Late) -> None:
        """What was awaited is done, or gone."""
        self._due.pop(late, None)

    def _expire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for _ in range(LATE_AT_ONCE):
            if not self._due or next(iter(self._due.values())) > now:
                break
            late, _ = self._due.popitem(last=False)
            late()
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the oldest. One that is set already is for an older, which was done."""
        due = next(iter(self._due.values()), math.inf)
        if self._timer is None and due < math.inf:
            self._timer = asyncio.get_running_loop().call_at(due, self._expire)
