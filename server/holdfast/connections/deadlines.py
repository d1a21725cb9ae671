"""Many who have to be done in time, and one timer for all of them."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


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
        loop = asyncio.get_running_loop()
        due = loop.time() + self._seconds
        self._due[member] = due
        self._due.move_to_end(member)
        if self._timer is None and due < math.inf:
            self._timer = loop.call_at(due, self._expire)

    def stop(self, member: Member) -> None:
        """`member` is done, or gone."""
        self._due.pop(member, None)

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        now = loop.time()
        while self._due:
            member, due = next(iter(self._due.items()))
            if due > now:
                self._timer = loop.call_at(due, self._expire)
                return
            del self._due[member]
            self._is_late(member)
