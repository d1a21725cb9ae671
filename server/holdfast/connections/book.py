"""All connections of one listener: who waits for what, and who goes when there are too many."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from holdfast.connections.deadlines import Deadlines
from holdfast.connections.seats import Seat, SeatKind, Seats
from holdfast.telemetry.refusals import Refusals

Counted = Callable[[str, bytes, int], None]
"""Told the method, the URL and the status of a request that a connection refused by itself."""

SPARE_CONNECTIONS = 64
"""Over the limit, for whoever asks after the health: an orchestrator that gets no answer restarts
the server just when it has the most to do."""
TOLD_CONNECTIONS = 256
"""Over those, that are told why they are closed; further ones are only closed."""
LINGER_SECONDS = 1.0
"""Without a byte, between a last answer and the close. A client that still sends when it is closed
loses the answer, and most look for it only when they have sent all."""
SILENT_SECONDS = 10.0
"""A WebSocket on which nothing was said for so long makes room for another connection."""
LEAST_RATE_BYTES = 1024
"""A second, of a body that comes or of an answer that goes; what is slower holds a connection for
nothing."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What `holdfast.settings.LimitSettings` comes to on this machine."""

    max_connections: int
    spare_connections: int
    told_connections: int
    max_url_bytes: int
    max_headers: int
    max_header_bytes: int
    max_body_bytes: int
    header_timeout_seconds: float
    body_timeout_seconds: float
    send_timeout_seconds: float
    websocket_idle_timeout_seconds: float


class Sender(Hashable, Protocol):
    """What sends the headers and the body of a request."""

    def head_is_late(self) -> None:
        """The time for the first line and the headers is over."""

    def body_is_late(self) -> None:
        """The time is over in which a part of the body had to come."""


class Reader(Hashable, Protocol):
    """What has to be read by a client."""

    def reader_is_late(self) -> None:
        """The time is over in which the client had to read."""


class Lingering(Hashable, Protocol):
    """What stays a moment after its last answer."""

    def linger_is_over(self) -> None:
        """The client has had its time to read that."""


class Talker(Hashable, Protocol):
    """What stays open between two messages, of either side."""

    def silence_is_long(self) -> None:
        """Nothing has been said for `SILENT_SECONDS`."""

    def silence_is_over(self) -> None:
        """The time is over in which something had to be said."""


class Book:
    """Shared by all connections of a listener. Belongs to one event loop."""

    def __init__(
        self,
        limits: ConnectionLimits,
        refusals: Refusals,
        always_answered: frozenset[str],
        *,
        counted: Counted = lambda _method, _url, _status: None,
    ) -> None:
        self.limits = limits
        self.refusals = refusals
        self.counted = counted
        self.always_answered = frozenset(path.lstrip("/").encode() for path in always_answered)
        """The last parts of the paths that spare connections may ask for."""
        self.heads: Deadlines[Sender] = Deadlines(
            limits.header_timeout_seconds, lambda sender: sender.head_is_late()
        )
        """Who has to send the headers of a request."""
        self.bodies: Deadlines[Sender] = Deadlines(
            limits.body_timeout_seconds, lambda sender: sender.body_is_late()
        )
        """Who has to send the body of a request."""
        self.readers: Deadlines[Reader] = Deadlines(
            limits.send_timeout_seconds, lambda reader: reader.reader_is_late()
        )
        """Who has to read of an answer what was sent, and all of it before a close."""
        self.lingering: Deadlines[Lingering] = Deadlines(
            LINGER_SECONDS, lambda lingering: lingering.linger_is_over()
        )
        """Who has had its last answer."""
        self.talking: Deadlines[Talker] = Deadlines(
            SILENT_SECONDS, lambda talker: talker.silence_is_long()
        )
        """Who may not be closed for another yet."""
        self.idle: Deadlines[Talker] = Deadlines(
            limits.websocket_idle_timeout_seconds, lambda talker: talker.silence_is_over()
        )
        """Who is closed if neither side says anything."""
        self._pools = (
            Seats(SeatKind.WELCOME, limits.max_connections),
            Seats(SeatKind.SPARE, limits.spare_connections),
            Seats(SeatKind.TOLD, limits.told_connections, makes_room=False),
        )

    def seat(self) -> Seat | None:
        """A seat for a new connection, for which another may be closed; None if there is none."""
        return next((seat for pool in self._pools if (seat := pool.seat())), None)

    def shed(self, most: int) -> int:
        """Close up to `most` connections that are at no request; how many there were."""
        return sum(1 for _ in range(most) if any(pool.take_away() for pool in self._pools))

    def leave(self, sender: Sender) -> None:
        """Nothing more is expected of a connection."""
        self.heads.stop(sender)
        self.bodies.stop(sender)
