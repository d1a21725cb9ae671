"""What a client has to read, bounded in time, and the close of a connection with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from holdfast.listener.connection_table import LEAST_RATE_BYTES, Book, Seat


class BoundedTransport:
    """A transport that waits for its client no longer than `--send-timeout`, or while it reads.

    `close()` of an event loop waits until all that was written has been read, and with TLS until
    the client has said goodbye, for ever if need be. Here it is bounded whatever asks for it, and
    the seat is offered to others meanwhile.
    """

    __slots__ = (
        "_book",
        "_is_closed",
        "_seat",
        "_transport",
        "_unsent_bytes",
        "asks_for_more",
        "is_closing",
        "write",
    )

    def __init__(self, transport: Any, book: Book, seat: Seat) -> None:
        self._transport = transport
        self.write: Callable[[bytes], None] = transport.write
        self.is_closing: Callable[[], bool] = transport.is_closing
        self.asks_for_more = False
        """Whether the client has sent a request since it had to read."""
        self._book = book
        self._seat = seat
        self._is_closed = False
        self._unsent_bytes = 0
        """When the time began; 0 where all of it is to be read in one time."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def expect_reading(self) -> None:
        """From now on the client has to read what is ready."""
        self._book.readers.start(self.reader_is_late)
        self._unsent_bytes = 0
        self.asks_for_more = False
        if self._transport.get_write_buffer_size() > self._least_bytes:
            # The event loop hands the kernel what that takes at the end of this turn.
            asyncio.get_running_loop().call_soon(self._measure)

    def expect_rest(self) -> None:
        """As `expect_reading`, unless the client has to read already, or there is nothing."""
        has_to_read = self.reader_is_late in self._book.readers
        if not has_to_read and self._transport.get_write_buffer_size():
            self.expect_reading()

    def expect_nothing(self) -> None:
        """The client has read most of it."""
        if not self._is_closed:
            self._book.readers.stop(self.reader_is_late)

    def close(self) -> None:
        """Close once what was written has been read, or when that takes too long."""
        if self._is_closed:
            return
        self._is_closed = True
        self._transport.close()
        self._seat.offer(self.make_room)
        self.expect_reading()

    def lost(self) -> None:
        """The connection is gone."""
        self._is_closed = True
        self._book.readers.stop(self.reader_is_late)
        self._seat.release()

    def reader_is_late(self) -> None:
        """Cut it off, unless the client reads."""
        unsent_bytes = self._transport.get_write_buffer_size()
        if not unsent_bytes and not self._is_closed:
            return
        if self.asks_for_more and not self._is_closed:
            # It may be of an answer that goes on; what is much of one has a time of its own.
            self.expect_reading()
            return
        if self._unsent_bytes - unsent_bytes >= self._least_bytes:
            self._unsent_bytes = unsent_bytes
            self._book.readers.start(self.reader_is_late)
            return
        if unsent_bytes:
            self._book.refusals.count("slow_reader")
        self._transport.abort()

    def make_room(self) -> None:
        """Cut it off."""
        self._transport.abort()

    @property
    def _least_bytes(self) -> float:
        return self._book.limits.send_timeout_seconds * LEAST_RATE_BYTES

    def _measure(self) -> None:
        self._unsent_bytes = self._transport.get_write_buffer_size()
