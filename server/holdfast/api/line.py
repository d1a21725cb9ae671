"""Who is next? Requests that wait for a place in the engine, each key in its turn.

A place is what a request holds while the engine works for it. There are so many that the engine is
never without work and its own queue stays short; whoever comes beyond them waits here, where the
order is ours. Plain data, for one event loop: nothing here waits.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from holdfast.api.service_rate import ServiceRate
from holdfast.records import EngineFacts, RefusalReason

SPARE_SHARE = 8
"""One place in so many is beyond what the engine runs at once: when a request ends, the next is
there already, and no step goes by with a gap."""
LEAST_SPARE = 2

Standing = Literal["waiting", "called", "refused", "gone"]
Queue = OrderedDict["Ticket", None]


def places(facts: EngineFacts | None) -> float:
    """How many requests an engine may have at once; without limit while none is known.

    vLLM's own bound (`--max-num-queued-reqs`, then 503) is never met before ours.
    """
    if facts is None:
        return math.inf
    running = facts.max_num_seqs * facts.data_parallel_size
    wanted = running + max(LEAST_SPARE, running // SPARE_SHARE)
    bound = facts.max_queued_requests
    return wanted if bound is None else max(1, min(wanted, bound))


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, from when it joins the line until it has left what it was called to."""

    key: str
    needs_place: bool = True
    standing: Standing = "waiting"
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

    `places` is asked each time: 0 while nobody may be called. A full line is shared: a key with
    fewer waiting takes the last place of the key that has the most.
    """

    def __init__(
        self, places: Callable[[], float], *, most_waiting: int, rate: ServiceRate | None = None
    ) -> None:
        self._places = places
        self._most_waiting = most_waiting
        self._queues: OrderedDict[str, Queue] = OrderedDict()
        """By key, in the order of their turns; none is empty."""
        self._passers: Queue = OrderedDict()
        """Those that need no place, and wait only while nobody is called."""
        self._count: Counter[str] = Counter()
        self._placed = 0
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
        places = self._places()
        may_go_on = not self.waiting and self._placed < places if needs_place else places > 0
        if may_go_on:
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
        if ticket.standing == "waiting":
            self._remove(ticket)
            _refuse(ticket, reason)

    def leave(self, ticket: Ticket) -> None:
        """Take a ticket out, wherever it stands; its place goes to the next. Once is enough."""
        if ticket.standing == "waiting":
            self._remove(ticket)
        elif ticket.standing == "called":
            self.inside -= 1
            self._forget(ticket.key)
            if ticket.needs_place:
                self._placed -= 1
                self.rate.done()
        ticket.standing = "gone"
        self.advance()

    def advance(self) -> None:
        """Call whoever may go on now."""
        while self._passers and self._places() > 0:
            self.waiting -= 1
            self._call(self._passers.popitem(last=False)[0])
        while self._queues and self._placed < self._places():
            self.waiting -= 1
            self._call(self._next())
        self._note_saturation()

    def stir(self) -> None:
        """Have all who wait look again."""
        for queue in (self._passers, *self._queues.values()):
            for ticket in queue:
                ticket.stir()

    def _next(self) -> Ticket:
        key, queue = next(iter(self._queues.items()))
        ticket, _ = queue.popitem(last=False)
        if queue:
            self._queues.move_to_end(key)
        else:
            del self._queues[key]
        return ticket

    def _call(self, ticket: Ticket) -> None:
        self.inside += 1
        self._placed += ticket.needs_place
        ticket.standing = "called"
        ticket.stir()

    def _append(self, ticket: Ticket) -> None:
        self.waiting += 1
        if ticket.needs_place:
            self._queues.setdefault(ticket.key, OrderedDict())[ticket] = None
        else:
            self._passers[ticket] = None

    def _remove(self, ticket: Ticket) -> None:
        self.waiting -= 1
        self._forget(ticket.key)
        if not ticket.needs_place:
            del self._passers[ticket]
            return
        queue = self._queues[ticket.key]
        del queue[ticket]
        if not queue:
            del self._queues[ticket.key]

    def _forget(self, key: str) -> None:
        self._count[key] -= 1
        if not self._count[key]:
            del self._count[key]

    def _make_room_for(self, key: str) -> bool:
        """Refuse the newest of the longest queue, if it stays no shorter than that of `key`."""
        longest = max(self._queues.values(), key=len, default=OrderedDict())
        if len(longest) <= len(self._queues.get(key, ())) + 1:
            return False
        self.refuse(next(reversed(longest)), "overloaded")
        return True

    def _note_saturation(self) -> None:
        self.rate.saturated(is_saturated=0 < self._places() <= self._placed)


def _refuse(ticket: Ticket, reason: RefusalReason) -> None:
    ticket.standing, ticket.refusal = "refused", reason
    ticket.stir()
