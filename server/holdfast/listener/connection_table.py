"""Every open connection: its deadlines and slot, and which is evicted if there are too many."""

from __future__ import annotations

import asyncio
import math
import resource
from collections import OrderedDict
from collections.abc import Callable

from holdfast.errors import UsageError
from holdfast.settings import LimitSettings
from holdfast.telemetry.counters import Refusals

DEFAULT_MAX_CONNECTIONS = 16_384
RESERVED_FILES = 1024
"""Files reserved for everything except clients: libraries, models, sockets to the engine, pipes to
children, the probe's connections, and the spare ones for health checks."""
SPARE_CONNECTIONS = 64
"""Connections over the limit, for health checks only: an orchestrator that gets no answer would
restart the server just when it is busiest. Further connections are closed without an answer."""
LINGER_SECONDS = 1.0
"""The silence between the last answer and the close. A client that is still sending at the close
loses the answer, and most clients read it only after they have sent everything."""
SILENT_SECONDS = 10.0
"""A WebSocket that has been silent for this long may be evicted."""
MIN_BYTES_PER_SECOND = 1024
"""The minimum per second of an arriving body or a departing answer; a slower client would occupy
a connection for nothing."""
LATE_AT_ONCE = 32
"""Thousands that start together are late together, and other work must not wait for all of them."""

_ENOUGH_FILES = 65_536
"""vLLM raises the limit to this. Without a hard limit a higher one would slow down programs that
iterate over all possible descriptors."""

OnRefused = Callable[[str, bytes, int], None]
"""Receives the method, the URL and the status of a request that its connection refused."""
Evict = Callable[[], None]
"""Closes a connection in favour of another; at most its last answer may still be sent."""
OnLate = Callable[[], None]
"""A bound method of the waiting object: it identifies the entry, and is called when it is late."""


def connection_limit(asked: int | None) -> int:
    """Return how many connections may be open, and raise the limit of open files for them.

    Raises:
        UsageError: this process may not open that many files.
    """
    files = _raised_limit(max(_ENOUGH_FILES, (asked or 0) + RESERVED_FILES))
    available = files - min(RESERVED_FILES, files // 2)
    if asked is not None and asked > available:
        raise UsageError(
            f"--max-connections {asked}: this process may open only {files} files, enough for "
            f"{available} connections.",
            remedy="raise the hard limit (`ulimit -Hn`, `docker run --ulimit nofile=N`), or lower "
            "--max-connections.",
        )
    return min(DEFAULT_MAX_CONNECTIONS, available) if asked is None else asked


def spare_limit(asked: int) -> int:
    """Return how many of `asked` spare connections fit into the reserved files."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    reserved = (
        RESERVED_FILES if files == resource.RLIM_INFINITY else min(RESERVED_FILES, files // 2)
    )
    return min(asked, reserved // 4)


def _raised_limit(wanted: int) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if wanted <= soft:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


class ConnectionTable:
    """The limits, deadlines and slots of all connections of a listener, for one event loop."""

    def __init__(
        self,
        limits: LimitSettings,
        refusals: Refusals,
        always_answered: frozenset[str],
        *,
        on_refused: OnRefused = lambda _method, _url, _status: None,
    ) -> None:
        """Raise the limit of open files for the connections.

        Raises:
            UsageError: this process may not open that many files.
        """
        self.limits = limits
        self.refusals = refusals
        self.on_refused = on_refused
        self.always_answered = frozenset(path.encode() for path in always_answered)
        """The paths that anybody may request on a spare connection, without a final slash."""
        self.header_deadlines = DeadlineQueue(limits.header_timeout_seconds)
        """Deadlines for the headers of a request to be complete."""
        self.body_deadlines = DeadlineQueue(limits.body_timeout_seconds)
        """Deadlines for the next part of a request body."""
        self.send_deadlines = DeadlineQueue(limits.send_timeout_seconds)
        """Deadlines for a client to read the answer, and all of it before a close."""
        self.linger_deadlines = DeadlineQueue(LINGER_SECONDS)
        """Deadlines for a client to read its last answer."""
        self.quiet_deadlines = DeadlineQueue(SILENT_SECONDS)
        """Deadlines after which a silent WebSocket may be evicted."""
        self.idle_deadlines = DeadlineQueue(limits.websocket_idle_timeout_seconds)
        """Deadlines for either side of a WebSocket to send something."""
        self.max_connections = connection_limit(limits.max_connections)
        self._pools = (
            ConnectionSlots(self.max_connections),
            ConnectionSlots(spare_limit(SPARE_CONNECTIONS), are_spare=True),
        )
        self._own = ConnectionSlots(math.inf)

    def take_slot(self) -> ConnectionSlot | None:
        """Return a slot for a new connection, evicting another if needed; None if there is none."""
        return next((slot for pool in self._pools if (slot := pool.take_slot())), None)

    def take_own_slot(self) -> ConnectionSlot | None:
        """Return a slot for a connection of this process, which is never evicted.

        An engine that replaces another is proven while all clients wait.
        """
        return self._own.take_slot()

    def evict_up_to(self, count: int) -> int:
        """Evict up to `count` connections without a running request; return their number."""
        return sum(1 for _ in range(count) if any(pool.evict_first() for pool in self._pools))


class ConnectionSlot:
    """The slot of one connection, held from its accept until its socket is closed."""

    __slots__ = ("_owner", "is_spare")

    def __init__(self, slots: ConnectionSlots) -> None:
        self._owner: ConnectionSlots | None = slots
        self.is_spare = slots.are_spare
        """Whether the connection is over the limit: only some requests are answered on it."""

    def allow_eviction(self, evict: Evict) -> None:
        """Allow the eviction of the connection, after those that were allowed earlier."""
        if self._owner is not None:
            if self._owner.evictable_last:
                self._owner.evictable_last.pop(self, None)
            self._owner.evictable[self] = evict
            self._owner.evictable.move_to_end(self)

    def allow_eviction_last(self, evict: Evict) -> None:
        """Allow it only if no other can be evicted: what the client sent has not been read yet."""
        if self._owner is not None:
            self._owner.evictable.pop(self, None)
            self._owner.evictable_last[self] = evict

    def forbid_eviction(self) -> None:
        """Forbid the eviction of the connection: it has a running request."""
        if self._owner is not None:
            if self._owner.evictable_last:
                self._owner.evictable_last.pop(self, None)
            self._owner.evictable.pop(self, None)

    def release(self) -> None:
        """The connection is gone."""
        if self._owner is not None:
            self.forbid_eviction()
            self._owner.taken -= 1
            self._owner = None


class ConnectionSlots:
    """A number of slots: for connections up to the limit, for those over it, or for our own."""

    def __init__(self, slots: float, *, are_spare: bool = False) -> None:
        self._limit = slots
        self.are_spare = are_spare
        self.taken = 0
        self.evictable: OrderedDict[ConnectionSlot, Evict] = OrderedDict()
        """The slots that may be evicted, in the order in which that was allowed."""
        self.evictable_last: OrderedDict[ConnectionSlot, Evict] = OrderedDict()
        """The slots that may be evicted after all of those."""

    def take_slot(self) -> ConnectionSlot | None:
        """Return a slot, evicting a connection if needed; None if none may be evicted."""
        if self.taken >= self._limit and not self.evict_first():
            return None
        self.taken += 1
        return ConnectionSlot(self)

    def evict_first(self) -> bool:
        """Evict the connection for which that was allowed first; False if there is none."""
        found = next(iter((self.evictable or self.evictable_last).items()), None)
        if found is None:
            return False
        slot, evict = found
        slot.release()
        evict()
        return True


class DeadlineQueue:
    """Calls each `late` when its time has run out; a time of 0 means never.

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
