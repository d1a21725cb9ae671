"""Which requests are admitted, queued or refused? Decided by the state, the queue and the key."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from statistics import median
from types import MappingProxyType

from starlette.types import Scope

from holdfast.api.queue import FairQueue, Ticket
from holdfast.api.router import RENDERINGS, Work
from holdfast.api.shares import ConnectionShares
from holdfast.engine.requests.sequence_queue import Capacity
from holdfast.errors import RETRY_AFTER_SECONDS, within_retry_bounds
from holdfast.labels import RefusalReason
from holdfast.lifecycle.states import SERVING, State
from holdfast.lifecycle.supervisor import Supervisor
from holdfast.request_context import RequestContext
from holdfast.settings import OverloadSettings
from holdfast.telemetry.counters import Refusals, request_waits

PROBE_HEADER = "x-holdfast-probe"
PROBE_HEADER_BYTES = PROBE_HEADER.encode()

REMEMBERED = 15
"""The number of latest requests of a key that predict how long the next one takes."""
MIN_UNKNOWN_SECONDS = 5.0
"""The estimate while no request has finished yet."""

_RENDERING_CAPACITY = Capacity(RENDERINGS, RENDERINGS)
_NO_CAPACITY = Capacity(0, 0)
_NEEDS_CAPACITY = frozenset[Work]({"engine", "rendering"})
_REFUSAL_OF = MappingProxyType[State, RefusalReason](
    {State.DRAINING: "draining", State.STOPPED: "draining", State.FAILED: "failed"}
)


class Admission:
    """Decides by the state, the queue and the key, and counts. It belongs to one event loop."""

    def __init__(  # noqa: PLR0913 - the composition root names each collaborator
        self,
        supervisor: Supervisor,
        *,
        probe_token: str,
        refusals: Refusals,
        hold_timeout_seconds: float = 0.0,
        overload: OverloadSettings | None = None,
        capacity: Callable[[], Capacity] = Capacity,
        count_keys: Callable[[], int] = lambda: 0,
        suspended_seconds: Callable[[str], float] = lambda _: 0.0,
        max_connections: float = math.inf,
    ) -> None:
        """Take `suspended_seconds`, which returns how long a key has to wait, or 0."""
        self.supervisor = supervisor
        self._overload = overload or OverloadSettings()
        self._hold_timeout_seconds = hold_timeout_seconds
        self._capacity = capacity
        self.suspended_seconds = suspended_seconds
        max_waiting = self._overload.max_waiting
        self._queue = FairQueue(self._capacity_now, max_waiting=max_waiting, count_keys=count_keys)
        self._rendering_queue = FairQueue(
            lambda: _RENDERING_CAPACITY if self._is_moving else _NO_CAPACITY,
            max_waiting=max_waiting,
            count_keys=count_keys,
        )
        self._queues = (self._queue, self._rendering_queue)
        self.durations = Durations(time.monotonic)
        """How long the requests of each key take, if their number is limited."""
        self.shares = ConnectionShares(max_connections, count_keys)
        """Keeps one key from having a request in progress on every connection."""
        self._is_moving = False
        self._follower: asyncio.Task[None] | None = None
        self._probe_token = probe_token.encode()
        self._refusals = refusals
        self.waits = request_waits()
        """How long admitted requests had waited."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Requests admitted and not yet fully answered, without the probe's own."""
        return sum(queue.admitted for queue in self._queues)

    @property
    def held(self) -> int:
        """Requests that wait for capacity in the engine, or for its next generation."""
        return sum(queue.waiting for queue in self._queues)

    @property
    def is_busy(self) -> bool:
        """Whether any request waits or is in flight; a WebSocket is one only during its calls."""
        queue, rendering = self._queues
        return queue.is_busy or rendering.is_busy

    def is_open(self, *, is_probe: bool) -> bool:
        """Return whether a request that arrives now may enter."""
        state = self.supervisor.state
        # If an engine is lost while draining, the next one is proven for the requests still here.
        return state in SERVING or (is_probe and state in {State.PROBING, State.DRAINING})

    def is_probe(self, scope: Scope) -> bool:
        """Return whether the request carries the token of this start, which must not be empty."""
        token, headers = self._probe_token, scope["headers"]
        return bool(token) and any(
            name == PROBE_HEADER_BYTES and hmac.compare_digest(value, token)
            for name, value in headers
        )

    def refuses_all(self) -> bool:
        """Return whether every request that arrives now would be refused."""
        if self.is_open(is_probe=False):
            return False
        return not self._is_worth_waiting(self._hold_deadline())

    def waiting_contexts(self) -> Iterator[RequestContext]:
        """Return the requests that wait, in no order."""
        tickets = chain.from_iterable(queue.tickets() for queue in self._queues)
        return (ticket.context for ticket in tickets if ticket.context is not None)

    def join(self, context: RequestContext, *, work: Work, is_limited: bool = True) -> Ticket:
        """Return a ticket for a new request: admitted, waiting or refused. It must `leave`.

        `is_limited` says whether the limit per key applies. If the engine is lost, the request
        waits as long as the next generation is expected within the hold timeout.
        """
        key = context.key
        self._follow_state()
        key_limit = self._overload.max_requests_per_key
        if self.refuses_all():
            ticket = Ticket(key, work=work, status="refused", refusal=self._refusal_of_state())
        elif is_limited and key and key_limit and work != "none" and self._count(key) >= key_limit:
            ticket = Ticket(key, work=work, status="refused", refusal="key_concurrency")
        else:
            queue = self._rendering_queue if work == "rendering" else self._queue
            ticket = queue.join(key, needs_capacity=work in _NEEDS_CAPACITY, work=work)
            if self.is_busy:
                self._idle.clear()
        ticket.context = context
        self._follow_for(ticket)
        return ticket

    def begin(self, ticket: Ticket) -> None:
        """Start the clock of an admitted request; `leave` stops it."""
        if self._overload.max_requests_per_key and ticket.key and ticket.needs_capacity:
            self.durations.begin(ticket.key, ticket)

    def set_aside(self, ticket: Ticket) -> None:
        """Lend the capacity of a request to others while it waits for something else."""
        self._queue_of(ticket).set_aside(ticket)

    async def come_back(self, ticket: Ticket) -> None:
        """Return when a request that was set aside has capacity again, or is refused."""
        self._follow_state()
        self._queue_of(ticket).come_back(ticket)
        self._follow_for(ticket)
        await self.until_settled(ticket)

    def release(self, ticket: Ticket) -> None:
        """Free the capacity of a request when the engine is done, even if its client reads on."""
        self._queue_of(ticket).release(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Remove a request, whatever its status."""
        ticket.context = None  # which may hold the ticket in turn
        self.durations.end(ticket.key, ticket)
        self._queue_of(ticket).leave(ticket)
        if not self.is_busy:
            self._idle.set()

    def _queue_of(self, ticket: Ticket) -> FairQueue:
        return self._rendering_queue if ticket.work == "rendering" else self._queue

    def _count(self, key: str) -> int:
        return sum(queue.count(key) for queue in self._queues)

    def count_refusal(self, reason: RefusalReason) -> None:
        """Count a refused request."""
        self._refusals.count(reason)

    async def until_settled(self, ticket: Ticket) -> bool:
        """Return True when a ticket waits no longer.

        The wait for capacity has no limit; while the gate is closed, the limit is the hold
        timeout. A drain continues to admit the requests that were waiting for capacity. One that
        comes back waits for the next engine without a limit, unless a drain begins meanwhile.
        """
        hold_ends: float | None = None
        while ticket.status == "waiting":
            is_kept = ticket.has_come_back and self.supervisor.is_recovering
            is_open = self.supervisor.state in SERVING
            if is_open or is_kept or (self._is_moving and hold_ends is None):
                hold_ends = None
            else:
                hold_ends = hold_ends or self._hold_deadline()
            if hold_ends is not None and not self._is_worth_waiting(hold_ends):
                break
            try:
                async with asyncio.timeout_at(hold_ends):
                    await ticket.until_notified()
            except TimeoutError:
                break
        self._queue_of(ticket).refuse(ticket, self._refusal_of_state())  # if it still waits
        return True

    def retry_after_seconds(self, ticket: Ticket) -> int:
        """Return the seconds after which this request would not be refused, between 1 and 120.

        If its key has too many requests, that is when one of them is likely to end.
        """
        if ticket.refusal == "key_concurrency":
            left_seconds = self.durations.left_seconds(ticket.key)
            if left_seconds is not None:
                return retry_after_seconds(left_seconds)
        queue = self._queue_of(ticket)
        eta_seconds = None if self.supervisor.state in SERVING else self.supervisor.eta_seconds
        rate = queue.rate.per_second
        if not rate:
            return retry_after_seconds(eta_seconds)
        return retry_after_seconds((queue.waiting + 1) / rate + (eta_seconds or 0.0))

    async def until_idle(self, deadline_seconds: float) -> bool:
        """Wait until no request waits or is in flight; False if some are at the deadline."""
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _hold_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._hold_timeout_seconds

    def _is_worth_waiting(self, deadline: float) -> bool:
        left_seconds = deadline - asyncio.get_running_loop().time()
        may_wait = self.supervisor.is_recovering and self._overload.max_waiting > 0
        return may_wait and (self.supervisor.eta_seconds or 0.0) <= left_seconds

    def _refusal_of_state(self) -> RefusalReason:
        return _REFUSAL_OF.get(self.supervisor.state, "not_ready")

    def _capacity_now(self) -> Capacity:
        return self._capacity() if self._is_moving else _NO_CAPACITY

    def _follow_state(self) -> None:
        """Update whether the queue moves: in READY, and in a drain if it moved before."""
        state = self.supervisor.state
        self._is_moving = state in SERVING or (self._is_moving and state is State.DRAINING)

    def _follow_for(self, ticket: Ticket) -> None:
        if ticket.status == "waiting" and (self._follower is None or self._follower.done()):
            self._follower = asyncio.create_task(self._follow(), name="queue")

    async def _follow(self) -> None:
        """Keep the queues in step with the state while requests wait."""
        while self.held:
            self._follow_state()
            for queue in self._queues:
                queue.advance()
                queue.notify()
            await self.supervisor.until_moved()


def retry_after_seconds(eta_seconds: float | None) -> int:
    """Return the seconds after which a retry makes sense, between 1 and 120."""
    if eta_seconds is None:
        return RETRY_AFTER_SECONDS
    return within_retry_bounds(eta_seconds)


class Durations:
    """The running requests of each key, and how long the latest ones took."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: dict[str, dict[Hashable, float]] = {}
        self._took: dict[str, list[float]] = {}
        self._all_took: list[float] = []

    def begin(self, key: str, request: Hashable) -> None:
        """Start the clock of a request."""
        self._began.setdefault(key, {})[request] = self._clock()

    def end(self, key: str, request: Hashable) -> None:
        """Record the duration of a request; ignore one that was not begun."""
        at_work = self._began.get(key, {})
        began_seconds = at_work.pop(request, None)
        if began_seconds is None:
            return
        if not at_work:
            del self._began[key]
        for took in (self._took.setdefault(key, []), self._all_took):
            took.append(self._clock() - began_seconds)
            del took[:-REMEMBERED]

    def left_seconds(self, key: str) -> float | None:
        """Return the time until one of a key's requests is likely to end; None if none is running.

        A new key is assumed to be like the others, and a request that takes longer than usual is
        assumed to take as long again.
        """
        if key not in self._began:
            return None
        now = self._clock()
        ages = [now - began for began in self._began[key].values()]
        took = self._took.get(key) or self._all_took
        if not took:
            return max(MIN_UNKNOWN_SECONDS, min(ages))
        usual_seconds = median(took)
        return min(usual_seconds - age if age < usual_seconds else age for age in ages)
