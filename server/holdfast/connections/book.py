"""All connections of one listener: who waits for what, and who goes when there are too many."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from holdfast.connections.deadlines import Deadlines
from holdfast.telemetry.refusals import Refusals

if TYPE_CHECKING:
    from holdfast.connections.protocol import HttpConnection

SPARE_CONNECTIONS = 64
"""Over the limit, for whoever asks after the health: an orchestrator that gets no answer restarts
the server just when it has the most to do."""
TOLD_CONNECTIONS = 256
"""Over those, that are told why they are closed; further ones are only closed."""
LINGER_SECONDS = 1.0
"""Without a byte, between a last answer and the close. A client that still sends when it is closed
loses the answer, and most look for it only when they have sent all."""


class Standing(Enum):
    """What a new connection may do."""

    WELCOME = auto()
    SPARE = auto()
    """Only ask after the health."""
    TOLD = auto()
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What `holdfast.settings.LimitSettings` comes to on this machine."""

    max_connections: int
    max_url_bytes: int
    max_headers: int
    max_header_bytes: int
    max_body_bytes: int
    header_timeout_seconds: float
    body_timeout_seconds: float
    send_timeout_seconds: float


class Book:
    """Shared by all connections of a listener. Belongs to one event loop."""

    def __init__(
        self, limits: ConnectionLimits, refusals: Refusals, always_answered: frozenset[str]
    ) -> None:
        self.limits = limits
        self.refusals = refusals
        self.always_answered = frozenset(path.lstrip("/").encode() for path in always_answered)
        """The last parts of the paths that spare connections may ask for."""
        self.heads: Deadlines[HttpConnection] = Deadlines(
            limits.header_timeout_seconds, lambda connection: connection.head_is_late()
        )
        """Who has to send the headers of a request."""
        self.bodies: Deadlines[HttpConnection] = Deadlines(
            limits.body_timeout_seconds, lambda connection: connection.body_is_late()
        )
        """Who has to send the body of a request."""
        self.readers: Deadlines[HttpConnection] = Deadlines(
            limits.send_timeout_seconds, lambda connection: connection.reader_is_late()
        )
        """Who has to read of an answer what was sent."""
        self.lingering: Deadlines[HttpConnection] = Deadlines(
            LINGER_SECONDS, lambda connection: connection.transport.abort()
        )
        """Who has had its last answer."""
        self.idle: OrderedDict[HttpConnection, None] = OrderedDict()
        """Who has had an answer and may send a further request, the longest idle first."""

    def standing(self, connections: int) -> Standing:
        """What the newest of so many connections may do. For it another may be closed."""
        over = connections - self.limits.max_connections
        if over <= 0 or self._has_made_room():
            return Standing.WELCOME
        if over <= SPARE_CONNECTIONS:
            return Standing.SPARE
        return Standing.TOLD if over <= SPARE_CONNECTIONS + TOLD_CONNECTIONS else Standing.CLOSED

    def leave(self, connection: HttpConnection) -> None:
        """Nothing more is expected of a connection."""
        self.heads.stop(connection)
        self.bodies.stop(connection)
        self.idle.pop(connection, None)

    def _has_made_room(self) -> bool:
        connection = next(iter(self.idle), None) or self.heads.oldest
        if connection is None:
            return False
        connection.make_room()
        return True
