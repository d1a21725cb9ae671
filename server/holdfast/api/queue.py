"""Who is next? Requests that wait for a place in the engine, each key in its turn.

A place is what a request holds while the engine works for it. There are so many that the engine is
never without work and its own queue stays short; whoever comes beyond them waits here, where the
order is ours. Plain data, for one event loop: nothing here waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from holdfast.api.rates import ServiceRate
from holdfast.api.router import Work
from holdfast.engine.turns import Places
from holdfast.records import RefusalReason

TicketStatus = Literal["waiting", "called", "refused", "gone"]
Queue = OrderedDict["Ticket", None]
Queues = OrderedDict[str, Queue]
"""By key; none is empty."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, from when it joins the line until it has left what it was called to."""

    key: str
    needs_place: bool = True
    work: Work = "engine"
    status: TicketStatus = "waiting"
    has_place: bool = False
    has_come_back: bool = False
    """Whether it waits once more, after it was set aside."""
    refusal: RefusalReason = "not_ready"
    """Why it is refused, if it is."""
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)

    async def until_stirred(self) -> None:
        """Return when something has happened that may concern it."""
        await self._stirred.wait()
        self._stirred.clear()

    def stir(self) -> None:
        """Have who waits for it look again."""
        self._stirred.set()


class Line:
    """Waits are bounded, places are given round robin by key, and within a key in order.

    `places` is asked each time: there are 0 while nobody may be called. A full line is shared: a
    key with fewer waiting takes the last place of the key that has the most. While a key has no
    place, the others leave it one, see `Places.has_one`.
    """

    def __init__(
        self,
        places: Callable[[], Places],
        *,
        most_waiting: int,
        count_keys: Callable[[], int] = lambda: 0,
        rate: ServiceRate | None = None,
    ) -> None:
        self._places = places
        self._count_keys = count_keys
        self._most_waiting = most_waiting
        self._queues: Queues = OrderedDict()
        """In the order of their turns."""
        self._passers: Queues = OrderedDict()
        """Those that need no place, and wait only while nobody is called."""
        self._count: Counter[str] = Counter()
        self._placed = 0
        self._placed_of: Counter[str] = Counter()
        """By key; none is 0."""
        self.rate = rate or ServiceRate()
        self.waiting = 0
        """Tickets that wait."""
        self.inside = 0
        """Tickets that were called and have not left, with a place or without."""

    def count(self, key: str) -> int:
        """Tickets of a key, waiting and inside."""
        return self._count[key]

    def join(self, key: str, *, needs_place: bool = True) -> Ticket:
        """A ticket that is called, waits, or is refused as `overloaded`; it must `leave`."""
        ticket = Ticket(key, needs_place)
        if self._queues:
            self.advance()  # there may be more places now, and nobody overtakes those who wait
        if self._is_next(ticket):
            self._count[key] += 1
            self._call(ticket)
        elif self.waiting < self._most_waiting or self._make_room_for(key):
            self._count[key] += 1
            self._append(ticket)
        else:
            _refuse(ticket, "overloaded")
        self._note_saturation()
        return ticket

    def refuse(self, ticket: Ticket, reason: RefusalReason) -> None:
        """Give a ticket up that waits."""
        if ticket.status == "waiting":
            self._remove(ticket)
            _refuse(ticket, reason)

    def leave(self, ticket: Ticket) -> None:
        """Take a ticket out, wherever it stands; its place goes to the next. Once is enough."""
        if ticket.status == "waiting":
            self._remove(ticket)
        elif ticket.status == "called":
            self.inside -= 1
            self._forget(ticket.key)
        ticket.status = "gone"
        if ticket.has_place:
            self._take_back(ticket)
            self.rate.done()
        self.advance()

    def release(self, ticket: Ticket) -> None:
        """Give the place of a ticket, whose work is done, to the next, though it has not left."""
        if ticket.has_place:
            self._take_back(ticket)
            self.rate.done()
            self.advance()

    def set_aside(self, ticket: Ticket) -> None:
        """Give the place of a ticket to the next, until it comes back for one."""
        if ticket.has_place:
            self._take_back(ticket)
            self.advance()

    def come_back(self, ticket: Ticket) -> None:
        """Have a ticket that was set aside wait for a place, before all others of its key."""
        if ticket.status != "called" or ticket.has_place:
            return
        if self._queues:
            self.advance()
        self.inside -= 1
        if self._has_place_for(ticket.key):
            self._call(ticket)
        else:
            ticket.status = "waiting"
            self._append(ticket)
            _bring_forward(ticket, self._queues[ticket.key])
        self._note_saturation()

    def advance(self) -> None:
        """Call whoever may go on now."""
        while self._passers and self._places().count > 0:
            self.waiting -= 1
            self._call(_next(self._passers, next(iter(self._passers))))
        while self._queues and (key := self._next_key()) is not None:
            self.waiting -= 1
            self._call(_next(self._queues, key))
        self._note_saturation()

    def stir(self) -> None:
        """Have all who wait look again."""
        for queue in (*self._passers.values(), *self._queues.values()):
            for ticket in queue:
                ticket.stir()

    def _is_next(self, ticket: Ticket) -> bool:
        if not ticket.needs_place:
            return self._places().count > 0
        return ticket.key not in self._queues and self._has_place_for(ticket.key)

    def _next_key(self) -> str | None:
        """Of the keys that wait and may have a place, that whose turn it is."""
        answers: dict[bool, bool] = {}  # the same for all that have a place, or have none
        for key in self._queues:
            has_one = key in self._placed_of
            if has_one not in answers:
                answers[has_one] = self._has_place_for(key)
            if answers[has_one]:
                return key
        return None

    def _has_place_for(self, key: str) -> bool:
        places, keys = self._places(), self._count_keys()
        if keys < 2:
            return self._placed < places.count
        return places.has_one(
            taken=self._placed,
            by_key=self._placed_of.get(key, 0),
            keys_inside=len(self._placed_of),
            keys=keys,
        )

    def _call(self, ticket: Ticket) -> None:
        self.inside += 1
        if ticket.needs_place:
            ticket.has_place = True
            self._placed += 1
            self._placed_of[ticket.key] += 1
        ticket.status = "called"
        ticket.has_come_back = False
        ticket.stir()

    def _take_back(self, ticket: Ticket) -> None:
        ticket.has_place = False
        self._placed -= 1
        self._placed_of[ticket.key] -= 1
        if not self._placed_of[ticket.key]:
            del self._placed_of[ticket.key]

    def _append(self, ticket: Ticket) -> None:
        self.waiting += 1
        self._queues_of(ticket).setdefault(ticket.key, OrderedDict())[ticket] = None

    def _remove(self, ticket: Ticket) -> None:
        self.waiting -= 1
        self._forget(ticket.key)
        queues = self._queues_of(ticket)
        queue = queues[ticket.key]
        del queue[ticket]
        if not queue:
            del queues[ticket.key]

    def _queues_of(self, ticket: Ticket) -> Queues:
        return self._queues if ticket.needs_place else self._passers

    def _forget(self, key: str) -> None:
        self._count[key] -= 1
        if not self._count[key]:
            del self._count[key]

    def _make_room_for(self, key: str) -> bool:
        """Refuse the newest of the key that has the most, if it keeps no fewer than `key` has."""
        keys = (*self._queues, *self._passers)
        most = max(keys, key=self._waiting_of, default=key)
        if self._waiting_of(most) <= self._waiting_of(key) + 1:
            return False
        queue = self._passers.get(most) or self._queues[most]
        self.refuse(next(reversed(queue)), "overloaded")
        return True

    def _waiting_of(self, key: str) -> int:
        return len(self._queues.get(key, ())) + len(self._passers.get(key, ()))

    def _note_saturation(self) -> None:
        count = self._places().count
        has_next = self._placed >= count or bool(self._queues)
        self.rate.saturated(is_saturated=has_next and count > 0)


def _next(queues: Queues, key: str) -> Ticket:
    """The first of a key, whose turn comes after those of all others then."""
    queue = queues[key]
    ticket, _ = queue.popitem(last=False)
    if queue:
        queues.move_to_end(key)
    else:
        del queues[key]
    return ticket


def _bring_forward(ticket: Ticket, queue: Queue) -> None:
    """To before those who wait for the first time, and behind those who came back earlier."""
    earlier = list(takewhile(lambda one: one.has_come_back, queue))
    ticket.has_come_back = True
    for one in reversed((*earlier, ticket)):
        queue.move_to_end(one, last=False)


def _refuse(ticket: Ticket, reason: RefusalReason) -> None:
    ticket.status, ticket.refusal = "refused", reason
    ticket.stir()
