"""Bounds the time in which a client must read, and with it the close of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from holdfast.listener.connection_table import LEAST_RATE_BYTES, ConnectionSlot, ConnectionTable


class BoundedTransport:
    """A transport that waits for its client only for `--send-timeout`, or while the client reads.

    `close()` of an event loop waits until the client has read everything, and with TLS until it has
    confirmed the shutdown, possibly for ever. Here every close is bounded, and the connection may
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
        return self._table.limits.send_timeout_seconds * LEAST_RATE_BYTES

    def _measure(self) -> None:
        self._unsent_bytes = self._transport.get_write_buffer_size()
