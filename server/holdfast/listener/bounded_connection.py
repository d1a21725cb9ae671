"""What surrounds the requests of a connection: its seat, its times, what is refused, its end."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_client_addr

from holdfast.errors import RefusedError
from holdfast.listener import errors
from holdfast.listener.closing import BoundedTransport
from holdfast.listener.connection_table import LEAST_RATE_BYTES, Book, Seat

MOST_LINGER_SECONDS = 10.0
"""After a last answer, for a client that goes on sending."""
DISCARD_INTERVAL_SECONDS = 0.01
"""Between two reads of what is thrown away, so that a flood of it takes nobody's turn."""


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's, which waits for its client no longer than it may, and ends with one answer."""

    # Together with uvicorn's attributes they are too many for dictionaries that share their keys,
    # and a connection would take a kilobyte more.
    __slots__ = (
        "_body_bytes",
        "_body_bytes_in_time",
        "_book",
        "_has_head",
        "_header_bytes",
        "_is_asked",
        "_is_ending",
        "_is_offering",
        "_is_receiving",
        "_linger_until_seconds",
        "_running",
        "_seat",
        "_wire_bytes",
    )
    transport: Any
    """A `BoundedTransport`."""

    def __init__(self, *arguments: Any, book: Book, seat: Seat, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._book = book
        self._seat = seat
        self._is_ending = False
        self._linger_until_seconds = 0.0
        self._running: RequestResponseCycle | None = None
        """The request that the application has; `cycle` is the one that was read last."""
        self._is_receiving = False
        self._has_head = False
        self._is_asked = False
        """Whether the application gets, or got, the request that is being read."""
        self._is_offering = False
        """Whether that request offers a protocol which nobody here takes up."""
        self._wire_bytes = 0
        self._header_bytes = 0
        self._body_bytes = 0
        self._body_bytes_in_time = 0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for the headers of its first request."""
        super().connection_made(BoundedTransport(transport, self._book, self._seat))  # type: ignore[arg-type]  # as one
        self._book.heads.start(self.head_is_late)
        self._seat.offer_last(self.make_room)
        # The event loop reads once between two turns; a request that was there is begun then.
        self.loop.call_soon(self.loop.call_soon, self._offer_silent)

    def _offer_silent(self) -> None:
        if self.head_is_late in self._book.heads:
            self._seat.offer(self.make_room)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes, for whatever reason."""
        self._expect_nothing()
        self._book.lingering.stop(self.linger_is_over)
        if self._running is not None:
            # uvicorn tells it to the request that was read last.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self.transport.lost()

    def eof_received(self) -> None:
        """A client that sends no more has left, as uvicorn and its event loops see it."""
        self.transport.close()

    def pause_writing(self) -> None:
        """More is ready of an answer than is kept; its place in the engine may be kept with it."""
        super().pause_writing()
        self.transport.expect_reading()

    def resume_writing(self) -> None:
        """The client has read most of it."""
        super().resume_writing()
        self.transport.expect_nothing()

    def make_room(self) -> None:
        """Close, for one that came later; no request is under way here."""
        is_waiting = self._is_receiving and not self._has_head
        if self._is_ending or self.scheme == "https" or self.transport.get_write_buffer_size():
            # A close would wait for the client.
            if self.head_is_late in self._book.heads:
                self._book.refusals.count("idle_connection")
            self._expect_nothing()
            self.transport.abort()
        elif is_waiting:
            self._end(errors.too_many_connections(self._book.max_connections))
            self._close()
        else:
            if self.head_is_late in self._book.heads:
                self._book.refusals.count("idle_connection")
            self._close()

    def head_is_late(self) -> None:
        """The time for the first line and the headers is over."""
        if self._is_receiving:
            self._end(errors.slow_headers(self._book.limits.header_timeout_seconds))
        else:
            self._book.refusals.count("idle_connection")
            self._close()

    def body_is_late(self) -> None:
        """The time is over in which a part of the body had to come."""
        seconds = self._book.limits.body_timeout_seconds
        if self.flow.read_paused:
            # It is the application that does not read.
            self._book.bodies.start(self.body_is_late)
        elif self._body_bytes - self._body_bytes_in_time >= seconds * LEAST_RATE_BYTES:
            self._body_bytes_in_time = self._body_bytes
            self._book.bodies.start(self.body_is_late)
        else:
            self._end(errors.slow_body(seconds))

    def _expect_nothing(self) -> None:
        self._book.heads.stop(self.head_is_late)
        self._book.bodies.stop(self.body_is_late)

    def _keep_alive(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    # The end

    def _end(self, error: RefusedError) -> None:
        """Refuse what is being read, and close."""
        self._book.refusals.count(error.reason)
        self._is_ending = True
        self._expect_nothing()
        running = self._running
        is_running = self._is_asked and running is self.cycle
        if running is not None and not running.response_complete and not is_running:
            # An earlier request of the connection has its answer first, and it is the last one.
            running.keep_alive = False
            self.pipeline.clear()
            return
        if running is None or not is_running or not running.response_started:
            self._answer(error)
        if running is not None:
            running.disconnected = True
            running.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger_until_seconds = self.loop.time() + MOST_LINGER_SECONDS
        self._book.lingering.start(self.linger_is_over)
        self._seat.offer(self.make_room)
        self.flow.resume_reading()

    def linger_is_over(self) -> None:
        """The client has had the time to read its last answer."""
        self.transport.abort()

    def _discard(self) -> None:
        if self.loop.time() < self._linger_until_seconds:
            self._book.lingering.start(self.linger_is_over)
        self.flow.pause_reading()
        self.loop.call_later(DISCARD_INTERVAL_SECONDS, self._discard_more)

    def _discard_more(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _answer(self, error: RefusedError) -> None:
        method = self.parser.get_method().decode()
        headers = self.server_state.default_headers
        self.transport.write(errors.encoded(error, headers, has_body=method != "HEAD"))
        if self._has_head and not self._is_asked:
            self._book.counted(method, self.url, error.http_status)
        if self.access_log and self._has_head:
            self.access_logger.info(
                '%s - "%s %s HTTP/%s" %d',
                get_client_addr(self.scope),
                method,
                self.url.decode("ascii", "backslashreplace"),
                self.parser.get_http_version(),
                error.http_status,
            )

    def _close(self) -> None:
        self._expect_nothing()
        self.connections.discard(self)
        self.transport.close()
