"""Many deadlines of the same duration, and one timer for all of them."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable

OnLate = Callable[[], None]
"""A bound method of the waiting object: it identifies the entry, and is called when it is late."""

LATE_AT_ONCE = 32
"""Thousands that start together are late together, and other work must not wait for all of them."""


class DeadlineQueue:
    """Calls each `late` whose time has run out; a time of 0 means never.

    All entries have the same duration, so their order is that of their deadlines: each costs a
    dictionary entry and no timer. It belongs to one event loop.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds or math.inf
        self._due: OrderedDict[OnLate, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, late: OnLate) -> bool:
        return late in self._due

    def start(self, late: OnLate) -> None:
        """Start, or restart, the full time of an entry."""
        self._due[late] = asyncio.get_running_loop().time() + self._seconds
        self._due.move_to_end(late)
        self._arm()

    def stop(self, late: OnLate) -> None:
        """Remove an entry: what it waited for has happened, or the connection is gone."""
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
        """Set the timer for the oldest entry. A timer that is set already fires no later."""
        due = next(iter(self._due.values()), math.inf)
        if self._timer is None and due < math.inf:
            self._timer = asyncio.get_running_loop().call_at(due, self._expire)
