"""All connections of one listener: who waits for what, and who goes when there are too many."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.connections.deadlines import Deadlines
from holdfast.connections.open_files import most_connections, most_over
from holdfast.connections.seats import Seat, Seats
from holdfast.settings import LimitSettings
from holdfast.telemetry.counters import Refusals

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
