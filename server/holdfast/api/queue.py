"""Which request is next? A fair queue of requests that wait for capacity in the engine.

A request holds capacity while the engine works for it. The capacity is just large enough that the
engine always has work and its own queue stays short; all other requests wait here, where we decide
the order. These are plain data structures for one event loop: nothing here waits.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from holdfast.api.router import Work
from holdfast.engine.requests.sequence_queue import Capacity
from holdfast.labels import RefusalReason
from holdfast.request_context import RequestContext

TicketStatus = Literal["waiting", "admitted", "refused", "gone"]
Queue = OrderedDict["Ticket", None]
QueuesByKey = OrderedDict[str, Queue]
"""By key; no queue in it is empty."""

RATE_MEMORY_SECONDS = 30.0
"""Requests older than this count for little."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, from when it joins the queue until it leaves."""

    key: str
    needs_capacity: bool = True
    work: Work = "engine"
    context: RequestContext | None = None
    """None if nobody is to see that it waits."""
    status: TicketStatus = "waiting"
    has_capacity: bool = False
    has_come_back: bool = False
    """Whether it waits again, after it was set aside."""
    is_done: bool = False
    """Whether it counts as done, though it may come back for more."""
    refusal: RefusalReason = "not_ready"
    """The reason if it is refused."""
    _notified: asyncio.Event = field(default_factory=asyncio.Event)

    async def until_notified(self) -> None:
        """Return when something has changed that may concern the ticket."""
        await self._notified.wait()
        self._notified.clear()

    def notify(self) -> None:
        """Wake the task that waits for the ticket."""
        self._notified.set()


class ServiceRate:
    """Requests done per second while the engine was at capacity.

    Only that time shows what the engine can do: below capacity the rate is that of the clients.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_saturated = False
        self._last = clock()
        self._seconds = 0.0
        self._done = 0.0

    @property
    def per_second(self) -> float | None:
        """Requests done per second; None until one was done at capacity."""
        self._pass_time()
        return self._done / self._seconds if self._done and self._seconds else None

    def done(self) -> None:
        """Count a request that is done."""
        self._pass_time()
        if self._is_saturated:
            self._done += 1.0

    def saturated(self, is_saturated: bool) -> None:
        """Set whether the engine is at capacity from now on."""
        if is_saturated is not self._is_saturated:
            self._pass_time()
            self._is_saturated = is_saturated

    def _pass_time(self) -> None:
        now = self._clock()
        passed, self._last = now - self._last, now
        if self._is_saturated:
            kept = math.exp(-passed / RATE_MEMORY_SECONDS)
            self._done *= kept
            self._seconds = self._seconds * kept + RATE_MEMORY_SECONDS * (1.0 - kept)


class FairQueue:
    """A bounded queue that admits the key with the fewest in the engine, in order within a key.

    `capacity` is read each time: it is 0 while no request may be admitted. A full queue is shared:
    a key with fewer waiting requests displaces the last one of the key that has the most. A key
    with few requests in the engine is left room by the others, see `Capacity.has_room`.
    """

    def __init__(
        self,
        capacity: Callable[[], Capacity],
        *,
        max_waiting: int,
        count_keys: Callable[[], int] = lambda: 0,
        rate: ServiceRate | None = None,
    ) -> None:
        self._capacity = capacity
        self._count_keys = count_keys
        self._max_waiting = max_waiting
        self._queues: QueuesByKey = OrderedDict()
        """The keys are in the order of their turns."""
        self._unqueued: QueuesByKey = OrderedDict()
        """Tickets that need no capacity, and wait only while no request is admitted."""
        self._count: Counter[str] = Counter()
        self._used = 0
        self._used_by_key: Counter[str] = Counter()
        """By key; no count is 0."""
        self.rate = rate or ServiceRate()
        self.waiting = 0
        """The number of tickets that wait."""
        self.admitted = 0
        """The number of tickets that were admitted and have not left, with capacity or without."""
        self._requests = 0

    @property
    def is_busy(self) -> bool:
        """Whether any request waits or was admitted; a session is idle between its calls."""
        return self._requests > 0

    def count(self, key: str) -> int:
        """Return the number of tickets of a key, waiting or admitted."""
        return self._count[key]

    def tickets(self) -> Iterator[Ticket]:
        """Return the tickets that wait, those of a key in their order."""
        for queues in (self._unqueued, self._queues):
            for queue in queues.values():
                yield from queue

    def join(self, key: str, *, needs_capacity: bool = True, work: Work = "engine") -> Ticket:
        """Return a ticket that is admitted, waits, or is `overloaded`; it must `leave`."""
        ticket = Ticket(key, needs_capacity, work)
        if self._queues:
            self.advance()  # there may be more capacity now, and none may overtake waiting tickets
        if self._is_next(ticket):
            self._remember(ticket)
            self._admit(ticket)
        elif self.waiting < self._max_waiting or self._make_room_for(key):
            self._remember(ticket)
            self._append(ticket)
        else:
            _refuse(ticket, "overloaded")
        self._note_saturation()
        return ticket

    def refuse(self, ticket: Ticket, reason: RefusalReason) -> None:
        """Refuse a ticket that waits."""
        if ticket.status == "waiting":
            self._remove(ticket)
            _refuse(ticket, reason)

    def leave(self, ticket: Ticket) -> None:
        """Remove a ticket, whatever its status; its capacity goes to the next. May be repeated.

        What still waits for it, as a background response whose client has left, waits no longer.
        """
        if ticket.status == "waiting":
            self._remove(ticket)
            ticket.notify()
        elif ticket.status == "admitted":
            self.admitted -= 1
            self._forget(ticket)
        ticket.status = "gone"
        if ticket.has_capacity:
            self._take_back(ticket)
            self._count_done(ticket)
        self.advance()

    def release(self, ticket: Ticket) -> None:
        """Give the capacity of a ticket to the next when its work is done, before it leaves."""
        if ticket.has_capacity:
            self._take_back(ticket)
            self._count_done(ticket)
            self.advance()

    def set_aside(self, ticket: Ticket) -> None:
        """Give the capacity of a ticket to the next, until the ticket comes back."""
        if ticket.has_capacity:
            self._take_back(ticket)
            self.advance()

    def come_back(self, ticket: Ticket) -> None:
        """Have a ticket without capacity wait for it again, before all others of its key."""
        if ticket.status != "admitted" or ticket.has_capacity:
            return
        if self._queues:
            self.advance()
        self.admitted -= 1
        if self._has_capacity_for(ticket.key):
            self._admit(ticket)
        else:
            ticket.status = "waiting"
            self._append(ticket)
            _bring_forward(ticket, self._queues[ticket.key])
        self._note_saturation()

    def advance(self) -> None:
        """Admit every ticket that may be admitted now."""
        while self._unqueued and self._capacity().count > 0:
            self.waiting -= 1
            self._admit(_pop_first(self._unqueued, next(iter(self._unqueued))))
        while self._queues and (key := self._next_key()) is not None:
            self.waiting -= 1
            self._admit(_pop_first(self._queues, key))
        self._note_saturation()

    def notify(self) -> None:
        """Wake the tasks of all waiting tickets."""
        for queue in (*self._unqueued.values(), *self._queues.values()):
            for ticket in queue:
                ticket.notify()

    def _is_next(self, ticket: Ticket) -> bool:
        if not ticket.needs_capacity:
            return self._capacity().count > 0
        return ticket.key not in self._queues and self._has_capacity_for(ticket.key)

    def _next_key(self) -> str | None:
        """Return the key with the fewest in the engine, if it has capacity.

        The first in turn of equal keys. Where that key has no capacity, none has, since a key with
        more in the engine never has more room, see `Capacity.has_room`.
        """
        key = min(self._queues, key=self._used_by_key.__getitem__)
        return key if self._has_capacity_for(key) else None

    def _has_capacity_for(self, key: str) -> bool:
        capacity, keys = self._capacity(), self._count_keys()
        if keys < 2:
            return self._used < capacity.count
        return capacity.has_room(key, self._used_by_key, taken=self._used, keys=keys)

    def _admit(self, ticket: Ticket) -> None:
        self.admitted += 1
        if ticket.needs_capacity:
            ticket.has_capacity = True
            self._used += 1
            self._used_by_key[ticket.key] += 1
        ticket.status = "admitted"
        ticket.has_come_back = False
        ticket.notify()

    def _take_back(self, ticket: Ticket) -> None:
        ticket.has_capacity = False
        self._used -= 1
        self._used_by_key[ticket.key] -= 1
        if not self._used_by_key[ticket.key]:
            del self._used_by_key[ticket.key]

    def _count_done(self, ticket: Ticket) -> None:
        if not ticket.is_done:
            ticket.is_done = True
            self.rate.done()

    def _append(self, ticket: Ticket) -> None:
        self.waiting += 1
        self._queues_of(ticket).setdefault(ticket.key, OrderedDict())[ticket] = None

    def _remove(self, ticket: Ticket) -> None:
        self.waiting -= 1
        self._forget(ticket)
        queues = self._queues_of(ticket)
        queue = queues[ticket.key]
        del queue[ticket]
        if not queue:
            del queues[ticket.key]

    def _queues_of(self, ticket: Ticket) -> QueuesByKey:
        return self._queues if ticket.needs_capacity else self._unqueued

    def _remember(self, ticket: Ticket) -> None:
        self._count[ticket.key] += 1
        self._requests += ticket.work != "session"

    def _forget(self, ticket: Ticket) -> None:
        self._count[ticket.key] -= 1
        if not self._count[ticket.key]:
            del self._count[ticket.key]
        self._requests -= ticket.work != "session"

    def _make_room_for(self, key: str) -> bool:
        """Refuse the newest ticket of the key with the most, if that leaves it as many as `key`."""
        keys = (*self._queues, *self._unqueued)
        busiest = max(keys, key=self._waiting_of, default=key)
        if self._waiting_of(busiest) <= self._waiting_of(key) + 1:
            return False
        queue = self._unqueued.get(busiest) or self._queues[busiest]
        self.refuse(next(reversed(queue)), "overloaded")
        return True

    def _waiting_of(self, key: str) -> int:
        return len(self._queues.get(key, ())) + len(self._unqueued.get(key, ()))

    def _note_saturation(self) -> None:
        count = self._capacity().count
        has_next = self._used >= count or bool(self._queues)
        self.rate.saturated(is_saturated=has_next and count > 0)


def _pop_first(queues: QueuesByKey, key: str) -> Ticket:
    """Remove and return the first ticket of a key, and move the key to the end of the turns."""
    queue = queues[key]
    ticket, _ = queue.popitem(last=False)
    if queue:
        queues.move_to_end(key)
    else:
        del queues[key]
    return ticket


def _bring_forward(ticket: Ticket, queue: Queue) -> None:
    """Move a ticket before those that wait for the first time, behind earlier returned ones."""
    earlier = list(takewhile(lambda one: one.has_come_back, queue))
    ticket.has_come_back = True
    for one in reversed((*earlier, ticket)):
        queue.move_to_end(one, last=False)


def _refuse(ticket: Ticket, reason: RefusalReason) -> None:
    ticket.status, ticket.refusal = "refused", reason
    ticket.notify()
