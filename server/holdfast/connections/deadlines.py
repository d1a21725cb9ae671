"""Many who have to be done in time, and one timer for all of them."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)

LATE_AT_ONCE = 32
"""Thousands that came together are late together, and nobody else has to wait for them all."""


class Deadlines(Generic[Member]):
    """Calls `is_late` with each member whose time has run out; a time of 0 never does.

    All have the same time, so that their order is that of their deadlines: a member costs an entry
    of a dictionary and no timer. Belongs to one event loop.
    """

    def __init__(self, seconds: float, is_late: Callable[[Member], None]) -> None:
        self._seconds = seconds or math.inf
        self._is_late = is_late
        self._due: OrderedDict[Member, float] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None

    def __contains__(self, member: Member) -> bool:
        return member in self._due

    @property
    def oldest(self) -> Member | None:
        """Who has had to be done for the longest time; None if nobody has to."""
        return next(iter(self._due), None)

    def start(self, member: Member) -> None:
        """Give `member` the whole time, from now."""
        self._due[member] = asyncio.get_running_loop().time() + self._seconds
        self._due.move_to_end(member)
        self._arm()

    def stop(self, member: Member) -> None:
        """`member` is done, or gone."""
        self._due.pop(member, None)

    def _expire(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for _ in range(LATE_AT_ONCE):
            if not self._due or next(iter(self._due.values())) > now:
                break
            member, _ = self._due.popitem(last=False)
            self._is_late(member)
        self._arm()

    def _arm(self) -> None:
        """Set the timer for the oldest. One that is set already is for an older, which was done."""
        due = next(iter(self._due.values()), math.inf)
        if self._timer is None and due < math.inf:
            self._timer = asyncio.get_running_loop().call_at(due, self._expire)
