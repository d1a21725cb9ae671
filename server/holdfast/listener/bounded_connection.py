"""What surrounds the requests of a connection: its slot, its deadlines, refusals, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_client_addr

from holdfast.errors import RefusedError
from holdfast.listener import errors
from holdfast.listener.connection_table import MIN_BYTES_PER_SECOND, ConnectionSlot, ConnectionTable

MAX_LINGER_SECONDS = 10.0
"""The time after the last answer for a client that keeps sending."""
DISCARD_INTERVAL_SECONDS = 0.01
"""The pause between two reads of discarded bytes, so that a flood delays no other connection."""


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection, with deadlines for its client, and at most one refusal at its end."""

    # With uvicorn's attributes they would be too many for a key-sharing dictionary, and each
    # connection would take a kilobyte more.
    __slots__ = (
        "_body_bytes",
        "_body_bytes_in_time",
        "_has_headers",
        "_header_bytes",
        "_is_dispatched",
        "_is_ending",
        "_is_offering_upgrade",
        "_is_receiving",
        "_linger_until_seconds",
        "_received_bytes",
        "_running_cycle",
        "_slot",
        "_table",
    )
    transport: Any
    """A `BoundedTransport`."""

    def __init__(
        self, *arguments: Any, table: ConnectionTable, slot: ConnectionSlot, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._table = table
        self._slot = slot
        self._is_ending = False
        self._linger_until_seconds = 0.0
        self._running_cycle: RequestResponseCycle | None = None
        """The request that the application is handling; `cycle` is the one that was read last."""
        self._is_receiving = False
        self._has_headers = False
        self._is_dispatched = False
        """Whether the request being read is, or was, passed to the application."""
        self._is_offering_upgrade = False
        """Whether that request offers a protocol that this server does not speak."""
        self._received_bytes = 0
        self._header_bytes = 0
        self._body_bytes = 0
        self._body_bytes_in_time = 0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for the headers of the first request."""
        super().connection_made(BoundedTransport(transport, self._table, self._slot))  # type: ignore[arg-type]  # as one
        self._table.header_deadlines.start(self.on_header_timeout)
        self._slot.allow_eviction_last(self.evict)
        # The event loop reads once between two turns, so a request that was there has begun then.
        self.loop.call_soon(self.loop.call_soon, self._allow_eviction_if_silent)

    def _allow_eviction_if_silent(self) -> None:
        if self.on_header_timeout in self._table.header_deadlines:
            self._slot.allow_eviction(self.evict)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything: the connection is gone, for whatever reason."""
        self._expect_nothing()
        self._table.linger_deadlines.stop(self.on_linger_timeout)
        if self._running_cycle is not None:
            # uvicorn tells only the request that was read last.
            self._running_cycle.disconnected = True
            self._running_cycle.message_event.set()
        super().connection_lost(exc)
        self.transport.lost()

    def eof_received(self) -> None:
        """Close: like uvicorn, take a client that stops sending for one that has left."""
        self.transport.close()

    def pause_writing(self) -> None:
        """Require the client to read: the buffer is full, which may keep the engine occupied."""
        super().pause_writing()
        self.transport.expect_reading()

    def resume_writing(self) -> None:
        """Drop that requirement: the client has read most of the buffer."""
        super().resume_writing()
        self.transport.expect_nothing()

    def evict(self) -> None:
        """Close in favour of a newer connection; no request is in progress here."""
        is_waiting = self._is_receiving and not self._has_headers
        if self._is_ending or self.scheme == "https" or self.transport.get_write_buffer_size():
            # close() would wait for the client.
            if self.on_header_timeout in self._table.header_deadlines:
                self._table.refusals.count("idle_connection")
            self._expect_nothing()
            self.transport.abort()
        elif is_waiting:
            self._end(errors.too_many_connections(self._table.max_connections))
            self._close()
        else:
            if self.on_header_timeout in self._table.header_deadlines:
                self._table.refusals.count("idle_connection")
            self._close()

    def on_header_timeout(self) -> None:
        """Refuse or close: the request line and the headers did not arrive in time."""
        if self._is_receiving:
            self._end(errors.slow_headers(self._table.limits.header_timeout_seconds))
        else:
            self._table.refusals.count("idle_connection")
            self._close()

    def on_body_timeout(self) -> None:
        """Refuse the request unless enough of its body has arrived in the last interval."""
        seconds = self._table.limits.body_timeout_seconds
        if self.flow.read_paused:
            # The application does not read, so the client is not to blame.
            self._table.body_deadlines.start(self.on_body_timeout)
        elif self._body_bytes - self._body_bytes_in_time >= seconds * MIN_BYTES_PER_SECOND:
            self._body_bytes_in_time = self._body_bytes
            self._table.body_deadlines.start(self.on_body_timeout)
        else:
            self._end(errors.slow_body(seconds))

    def _expect_nothing(self) -> None:
        self._table.header_deadlines.stop(self.on_header_timeout)
        self._table.body_deadlines.stop(self.on_body_timeout)

    def _keep_alive(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _is_answering(self) -> bool:
        return self._running_cycle is not None and not self._running_cycle.response_complete

    # The end

    def _end(self, error: RefusedError) -> None:
        """Refuse the request that is being read, and close."""
        self._table.refusals.count(error.reason)
        self._is_ending = True
        self._expect_nothing()
        running = self._running_cycle
        is_running = self._is_dispatched and running is self.cycle
        if running is not None and not running.response_complete and not is_running:
            # An earlier request of the connection still gets its answer, which is the last one.
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
        self._linger_until_seconds = self.loop.time() + MAX_LINGER_SECONDS
        self._table.linger_deadlines.start(self.on_linger_timeout)
        self._slot.allow_eviction(self.evict)
        self.flow.resume_reading()

    def on_linger_timeout(self) -> None:
        """Abort, unless the client is still sending: it has had time to read its last answer."""
        # The event loop reads once between two turns: what came while it was blocked counts.
        self.loop.call_soon(self.loop.call_soon, self._abort_if_silent)

    def _abort_if_silent(self) -> None:
        if self.on_linger_timeout not in self._table.linger_deadlines:
            self.transport.abort()

    def _discard(self) -> None:
        if self.loop.time() < self._linger_until_seconds:
            self._table.linger_deadlines.start(self.on_linger_timeout)
        self.flow.pause_reading()
        self.loop.call_later(DISCARD_INTERVAL_SECONDS, self._discard_more)

    def _discard_more(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _answer(self, error: RefusedError) -> None:
        method = self.parser.get_method().decode()
        received = self.headers if self._is_receiving else ()  # else they are of the last one
        headers, has_body = self.server_state.default_headers, method != "HEAD"
        self.transport.write(errors.encoded(error, headers, received=received, has_body=has_body))
        if self._has_headers and not self._is_dispatched:
            self._table.on_refused(method, self.url, error.http_status)
        if self.access_log and self._has_headers:
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


class BoundedTransport:
    """A transport that waits for its client only for `--send-timeout`, or while the client reads.

    `close()` of an event loop waits until the client has read everything, and with TLS until it has
    confirmed the shutdown, possibly forever. Here every close is bounded, and the connection may
    be evicted meanwhile.
    """

    __slots__ = (
        "_is_closed",
        "_slot",
        "_table",
        "_transport",
        "_unsent_bytes",
        "has_next_request",
        "is_closing",
        "write",
    )

    def __init__(self, transport: Any, table: ConnectionTable, slot: ConnectionSlot) -> None:
        self._transport = transport
        self.write: Callable[[bytes], None] = transport.write
        self.is_closing: Callable[[], bool] = transport.is_closing
        self.has_next_request = False
        """Whether the client has sent a request since it was required to read."""
        self._table = table
        self._slot = slot
        self._is_closed = False
        self._unsent_bytes = 0
        """The unsent bytes at the start of the interval; 0 if all must be read in one interval."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def expect_reading(self) -> None:
        """Require the client to read the buffered bytes from now on."""
        self._table.send_deadlines.start(self.on_send_timeout)
        self._unsent_bytes = 0
        self.has_next_request = False
        if self._transport.get_write_buffer_size() > self._least_bytes:
            # At the end of this turn the event loop hands the kernel as much as it accepts.
            asyncio.get_running_loop().call_soon(self._measure)

    def expect_remainder(self) -> None:
        """Do as `expect_reading`, unless that is in force already or the buffer is empty."""
        has_to_read = self.on_send_timeout in self._table.send_deadlines
        if not has_to_read and self._transport.get_write_buffer_size():
            self.expect_reading()

    def expect_nothing(self) -> None:
        """Stop requiring the client to read, unless the connection is being closed."""
        if not self._is_closed:
            self._table.send_deadlines.stop(self.on_send_timeout)

    def close(self) -> None:
        """Close once the client has read everything, or when that takes too long."""
        if self._is_closed:
            return
        self._is_closed = True
        self._transport.close()
        self._slot.allow_eviction(self.evict)
        self.expect_reading()

    def lost(self) -> None:
        """Release the slot: the connection is gone."""
        self._is_closed = True
        self._table.send_deadlines.stop(self.on_send_timeout)
        self._slot.release()

    def on_send_timeout(self) -> None:
        """Abort the connection, unless the client reads."""
        unsent_bytes = self._transport.get_write_buffer_size()
        if not unsent_bytes and not self._is_closed:
            return
        if self.has_next_request and not self._is_closed:
            # The bytes may belong to a running answer; if they are many, a new interval begins.
            self.expect_reading()
            return
        if self._unsent_bytes - unsent_bytes >= self._least_bytes:
            self._unsent_bytes = unsent_bytes
            self._table.send_deadlines.start(self.on_send_timeout)
            return
        if unsent_bytes:
            self._table.refusals.count("slow_reader")
        self._transport.abort()

    def evict(self) -> None:
        """Abort the connection."""
        self._transport.abort()

    @property
    def _least_bytes(self) -> float:
        return self._table.limits.send_timeout_seconds * MIN_BYTES_PER_SECOND

    def _measure(self) -> None:
        self._unsent_bytes = self._transport.get_write_buffer_size()
