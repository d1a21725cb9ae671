"""A WebSocket of a client: uvicorn's, with bounds on what it takes in and on what it waits for."""

from __future__ import annotations

from asyncio.transports import BaseTransport
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from holdfast.errors import RefusedError
from holdfast.listener import errors
from holdfast.listener.connection_table import Book, Seat

MOST_FRAGMENTS = 16_384
"""Of one message. An empty one costs the client six bytes, and no limit of bytes counts it."""


MOST_AT_ONCE = 8 * 1024
"""Bytes of frames taken in one turn: a read holds thousands of the smallest, which take long."""


_WORDS = frozenset({"websocket.accept", "websocket.send"})


class WebSocketConnection(WebSocketsSansIOProtocol):
    """It may be closed for another until the application accepts it, and when it is silent.

    A ping and its answer say nothing: clients of WebSockets answer them by themselves.
    """

    transport: Any
    """A `BoundedTransport`."""

    def __init__(self, *arguments: Any, book: Book, seat: Seat, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._book = book
        self._seat = seat
        self._waiting = bytearray()
        """What was read, and has to wait for its turn."""
        # At level debug `websockets` logs the request with its query, and all headers, keys too.
        self.conn.debug = False

    def connection_made(self, transport: BaseTransport) -> None:
        """Take over from HTTP."""
        super().connection_made(transport)
        self._seat.offer(self.make_room)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes, for whatever reason."""
        super().connection_lost(exc)
        self._book.talking.stop(self.silence_is_long)
        self._book.idle.stop(self.silence_is_over)
        self.transport.lost()

    def eof_received(self) -> None:
        """A client that sends no more has left."""
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Take in the handshake, or frames, in turns with other connections."""
        if self._waiting:
            self._waiting += data
            self.transport.pause_reading()
            return
        super().data_received(data[:MOST_AT_ONCE])
        if not self.handshake_initiated and not self.transport.is_closing():
            # `websockets` takes shorter headers than HTTP does here, and says nothing of it.
            self._refuse(errors.malformed())
        elif not self.transport.is_closing():
            self._wait(data[MOST_AT_ONCE:])

    def _wait(self, data: bytes) -> None:
        """Read no more before this has had its turn, nor while the client reads no pong."""
        self._waiting += data
        if self._waiting:
            self.loop.call_soon(self._go_on)
        if self._waiting or not self.writable.is_set():
            self.transport.pause_reading()
        elif not self.read_paused:
            self.transport.resume_reading()

    def _go_on(self) -> None:
        if not self.transport.is_closing():
            data = bytes(self._waiting)
            self._waiting.clear()
            self.data_received(data)

    def handle_text(self, event: Frame) -> None:
        """A message, or its first part."""
        self._talk()
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        """A message, or its first part."""
        self._talk()
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        """A further part of a message."""
        self._talk()
        if len(self.frames) >= MOST_FRAGMENTS:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, "too many fragments")
            self.handle_parser_exception()
            return
        super().handle_cont(event)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self.transport.expect_reading()

    def resume_writing(self) -> None:
        """It has read most of it."""
        super().resume_writing()
        self.transport.expect_nothing()
        if not (self.read_paused or self._waiting or self.transport.is_closing()):
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """What the client sent next."""
        message = await super().receive()
        if self._waiting and not self.transport.is_closing():
            self.transport.pause_reading()
        return message

    async def send(self, message: Any) -> None:
        """Pass on what the application sends; an accepted WebSocket keeps its seat."""
        await super().send(message)
        if message["type"] in _WORDS:
            self._talk()

    def _talk(self) -> None:
        if self.handshake_complete and not (self.close_sent or self.transport.is_closing()):
            self._seat.keep()
            self._book.talking.start(self.silence_is_long)
            self._book.idle.start(self.silence_is_over)

    def silence_is_long(self) -> None:
        """From now on it may be closed for another."""
        self._seat.offer(self.make_room)

    def silence_is_over(self) -> None:
        """Close it."""
        self._book.refusals.count("idle_connection")
        self._leave(CloseCode.GOING_AWAY, "idle for too long")

    def _leave(self, code: CloseCode, reason: str) -> None:
        if not (self.close_sent or self.transport.is_closing()):
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def make_room(self) -> None:
        """Close, for one that came later; nothing is said here, or it is not accepted yet."""
        is_closing = self.close_sent or self.transport.is_closing()
        if is_closing or self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self.handshake_complete:
            self._leave(CloseCode.TRY_AGAIN_LATER, "all connections are in use")
        else:
            self._refuse(errors.too_many_connections(self._book.max_connections))

    def _refuse(self, error: RefusedError) -> None:
        self._book.refusals.count(error.reason)
        self.handshake_complete = self.close_sent = self.disconnected = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.ABNORMAL_CLOSURE})
        self.transport.write(errors.encoded(error, self.default_headers, has_body=True))
        self.transport.close()
