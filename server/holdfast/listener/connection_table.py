"""Every open connection: what each waits for, and which one goes when there are too many."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable

from holdfast.errors import UsageError
from holdfast.listener.deadline_queue import Deadlines
from holdfast.settings import LimitSettings
from holdfast.telemetry.counters import Refusals

MOST_CONNECTIONS = 16_384
"""Unless more are asked for."""
RESERVED_FILES = 1024
"""For everything that is no client: libraries, models, sockets to the engine, pipes to children,
and the connections over the limit that may still ask after the health."""
_ENOUGH_FILES = 65_536
"""What vLLM raises the limit to; where there is no hard limit at all, some programs walk it."""


def most_connections(asked: int | None) -> int:
    """How many connections may be open. The process's limit of open files is raised for them.

    Raises:
        UsageError: so many files cannot be open.
    """
    files = _raised_limit(max(_ENOUGH_FILES, (asked or 0) + RESERVED_FILES))
    room = files - min(RESERVED_FILES, files // 2)
    if asked is not None and asked > room:
        raise UsageError(
            f"--max-connections {asked}: this process may open only {files} files, enough for "
            f"{room} connections.",
            remedy="raise the hard limit (`ulimit -Hn`, `docker run --ulimit nofile=N`), or lower "
            "--max-connections.",
        )
    return min(MOST_CONNECTIONS, room) if asked is None else asked


def most_over(asked: int) -> int:
    """How many of `asked` connections over the limit fit into what is left for the rest."""
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


Counted = Callable[[str, bytes, int], None]
"""Told the method, the URL and the status of a request that a connection refused by itself."""

SPARE_CONNECTIONS = 64
"""Over the limit, for whoever asks after the health: an orchestrator that gets no answer restarts
the server just when it has the most to do. A further one is only closed."""
LINGER_SECONDS = 1.0
"""Without a byte, between a last answer and the close. A client that still sends when it is closed
loses the answer, and most look for it only when they have sent all."""
SILENT_SECONDS = 10.0
"""A WebSocket on which nothing was said for so long makes room for another connection."""
LEAST_RATE_BYTES = 1024
"""A second, of a body that comes or of an answer that goes; what is slower holds a connection for
nothing."""


class Book:
    """Shared by all connections of a listener. Belongs to one event loop."""

    def __init__(
        self,
        limits: LimitSettings,
        refusals: Refusals,
        always_answered: frozenset[str],
        *,
        counted: Counted = lambda _method, _url, _status: None,
    ) -> None:
        """Raise the limit of open files for so many connections.

        Raises:
            UsageError: so many files cannot be open.
        """
        self.limits = limits
        self.refusals = refusals
        self.counted = counted
        self.always_answered = frozenset(path.lstrip("/").encode() for path in always_answered)
        """The last parts of the paths that spare connections may ask for."""
        self.heads = Deadlines(limits.header_timeout_seconds)
        """For the headers of a request to be whole."""
        self.bodies = Deadlines(limits.body_timeout_seconds)
        """For a part of the body of a request to come."""
        self.readers = Deadlines(limits.send_timeout_seconds)
        """For a client to read of an answer what was sent, and all of it before a close."""
        self.lingering = Deadlines(LINGER_SECONDS)
        """For a client to read its last answer."""
        self.talking = Deadlines(SILENT_SECONDS)
        """For a WebSocket that may not be closed for another yet."""
        self.idle = Deadlines(limits.websocket_idle_timeout_seconds)
        """For either side of a WebSocket to say something."""
        self.max_connections = most_connections(limits.max_connections)
        self._pools = (
            Seats(self.max_connections),
            Seats(most_over(SPARE_CONNECTIONS), are_spare=True),
        )

    def seat(self) -> Seat | None:
        """A seat for a new connection, for which another may be closed; None if there is none."""
        return next((seat for pool in self._pools if (seat := pool.seat())), None)

    def shed(self, most: int) -> int:
        """Close up to `most` connections that are at no request; how many there were."""
        return sum(1 for _ in range(most) if any(pool.take_away() for pool in self._pools))


MakeRoom = Callable[[], None]
"""Closes a connection for another; nothing of it may outlast this by more than an answer."""


class Seat:
    """The right of one connection to be there, from its accept until its socket is closed."""

    __slots__ = ("_owner", "is_spare")

    def __init__(self, seats: Seats) -> None:
        self._owner: Seats | None = seats
        self.is_spare = seats.are_spare
        """Whether it is over the limit, where a connection may only ask after the health."""

    def offer(self, make_room: MakeRoom) -> None:
        """From now on, and after all that were offered before, it may be closed for another."""
        if self._owner is not None:
            if self._owner.fresh:
                self._owner.fresh.pop(self, None)
            self._owner.offered[self] = make_room
            self._owner.offered.move_to_end(self)

    def offer_last(self, make_room: MakeRoom) -> None:
        """It may be closed for another if nothing else may: what it sent was not read yet."""
        if self._owner is not None:
            self._owner.fresh[self] = make_room

    def keep(self) -> None:
        """It may not be closed for another: it is at a request."""
        if self._owner is not None:
            if self._owner.fresh:
                self._owner.fresh.pop(self, None)
            self._owner.offered.pop(self, None)

    def release(self) -> None:
        """The connection is gone."""
        if self._owner is not None:
            self.keep()
            self._owner.taken -= 1
            self._owner = None


class Seats:
    """As many seats as there may be connections up to the limit, or over it."""

    def __init__(self, seats: int, *, are_spare: bool = False) -> None:
        self._seats = seats
        self.are_spare = are_spare
        self.taken = 0
        self.offered: OrderedDict[Seat, MakeRoom] = OrderedDict()
        """The seats that may be taken away, the one that was offered first before all others."""
        self.fresh: OrderedDict[Seat, MakeRoom] = OrderedDict()
        """Those that may be taken away after all of them."""

    def seat(self) -> Seat | None:
        """A seat, for which another may be closed; None if each is needed where it is."""
        if self.taken >= self._seats and not self.take_away():
            return None
        self.taken += 1
        return Seat(self)

    def take_away(self) -> bool:
        """Close the connection that was offered first; False if none is."""
        found = next(iter((self.offered or self.fresh).items()), None)
        if found is None:
            return False
        seat, make_room = found
        seat.release()
        make_room()
        return True
