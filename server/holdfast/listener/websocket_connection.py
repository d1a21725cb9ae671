"""A WebSocket of a client: uvicorn's, with bounds on what it accepts and how long it waits."""

from __future__ import annotations

from asyncio.transports import BaseTransport
from collections import deque
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from holdfast.errors import RefusedError
from holdfast.listener import errors
from holdfast.listener.connection_table import ConnectionSlot, ConnectionTable

MAX_FRAGMENTS = 16_384
"""The limit per message. An empty fragment costs the client six bytes and counts as 0 bytes."""
MAX_BYTES_AT_ONCE = 8 * 1024
"""Bytes of frames parsed in one turn: a read may contain thousands of tiny ones."""

Resize = Callable[[int], bool]
"""Changes how much memory is reserved for messages; False if there is too little."""

MEMORY_EXTENSION = "holdfast.message_memory"
"""The extension of a scope that takes a `Resize` from a layer that knows whose WebSocket it is, and
None at the end."""
_ACTIVITY = frozenset({"websocket.accept", "websocket.send"})


class WebSocketConnection(WebSocketsSansIOProtocol):
    """A WebSocket that may be evicted until the application accepts it, and when it is silent.

    A ping and a pong do not count as activity: WebSocket clients answer pings automatically.
    """

    transport: Any
    """A `BoundedTransport`."""

    def __init__(
        self, *arguments: Any, table: ConnectionTable, slot: ConnectionSlot, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._table = table
        self._slot = slot
        self._unparsed = bytearray()
        """Bytes that were read and wait for their turn."""
        self._fragment_bytes = 0
        """The bytes of a message that is not complete."""
        self._message_bytes = 0
        """The bytes of messages that the application has got, or will get, and is not done with."""
        self._waiting_bytes: deque[int] = deque()
        """The size of each message that the application will get."""
        self._present_bytes = 0
        """The size of the message that the application got last, until it asks for the next."""
        self._try_resize: Resize | None = None
        # At level debug `websockets` logs the request with its query, and all headers, keys too.
        self.conn.debug = False

    def connection_made(self, transport: BaseTransport) -> None:
        """Take over from HTTP."""
        super().connection_made(transport)
        self._slot.allow_eviction(self.evict)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything: the connection is gone, for whatever reason."""
        super().connection_lost(exc)
        self._table.quiet_deadlines.stop(self.on_quiet)
        self._table.idle_deadlines.stop(self.on_idle_timeout)
        self.transport.lost()

    def eof_received(self) -> None:
        """Close: a client that stops sending has left."""
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse the handshake, or frames, in turns with other connections."""
        if self.handshake_initiated and not self.handshake_complete:
            # While the handshake is held, the application would read no frame.
            if not self.transport.is_closing():
                self._refuse(errors.malformed())
            return
        if self._unparsed:
            self._unparsed += data
            self.transport.pause_reading()
            return
        super().data_received(data[:MAX_BYTES_AT_ONCE])
        if not self.handshake_initiated and not self.transport.is_closing():
            # `websockets` accepts shorter headers than HTTP does here, and fails silently.
            self._refuse(errors.malformed())
        elif not self.transport.is_closing():
            self._reserve()
            if not self.transport.is_closing():
                self._defer(data[MAX_BYTES_AT_ONCE:])

    def _defer(self, data: bytes) -> None:
        """Pause reading until these bytes have had their turn, and while pongs are not read."""
        self._unparsed += data
        if self._unparsed:
            self.loop.call_soon(self._resume)
        if self._unparsed or not self.writable.is_set():
            self.transport.pause_reading()
        elif not self.read_paused:
            self.transport.resume_reading()

    def _resume(self) -> None:
        if not self.transport.is_closing():
            data = bytes(self._unparsed)
            self._unparsed.clear()
            self.data_received(data)

    def handle_connect(self, event: Request) -> None:
        """Handle the handshake, and let the application reserve memory for messages."""
        super().handle_connect(event)
        if not self.close_sent:
            scope: Any = self.scope  # whose extensions are tables to uvicorn
            scope["extensions"][MEMORY_EXTENSION] = self._bind

    def _bind(self, try_resize: Resize | None) -> None:
        self._try_resize = try_resize

    def _reserve(self) -> None:
        """Close unless there is memory for everything that was read."""
        size_bytes = self._message_bytes + self._fragment_bytes + len(self.conn.reader.buffer)
        if self._try_resize is None or self._try_resize(size_bytes):
            return
        if not (self.close_sent or self.transport.is_closing()):
            self._table.refusals.count("buffers_full")
            self._fail(CloseCode.TRY_AGAIN_LATER, "no memory for messages (--max-buffered-size)")

    def handle_text(self, event: Frame) -> None:
        """Handle a text message, or its first fragment."""
        self._note_activity()
        self._fragment_bytes = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        """Handle a binary message, or its first fragment."""
        self._note_activity()
        self._fragment_bytes = len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        """Handle another fragment of a message."""
        self._note_activity()
        if len(self.frames) >= MAX_FRAGMENTS:
            self.conn.fail(CloseCode.MESSAGE_TOO_BIG, "too many fragments")
            self.handle_parser_exception()
            return
        self._fragment_bytes += len(event.data)
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """Hand a complete message over."""
        if not self.close_sent:  # uvicorn drops what comes after that
            self._message_bytes += self._fragment_bytes
            self._waiting_bytes.append(self._fragment_bytes)
        self._fragment_bytes = 0
        super().send_receive_event_to_app()

    def pause_writing(self) -> None:
        """Require the client to read: the buffer is full."""
        super().pause_writing()
        self.transport.expect_reading()

    def resume_writing(self) -> None:
        """Drop that requirement: the client has read most of the buffer."""
        super().resume_writing()
        self.transport.expect_nothing()
        if not (self.read_paused or self._unparsed or self.transport.is_closing()):
            self.transport.resume_reading()

    async def receive(self) -> Any:
        """Return the next event from the client: the application is done with the last one."""
        if self._present_bytes:
            self._message_bytes -= self._present_bytes
            self._present_bytes = 0
            self._reserve()
        message = await super().receive()
        if message["type"] == "websocket.receive":
            self._present_bytes = self._waiting_bytes.popleft()
        if self._unparsed and not self.transport.is_closing():
            self.transport.pause_reading()
        return message

    async def send(self, message: Any) -> None:
        """Send an event of the application; an accepted WebSocket is not evicted at once."""
        await super().send(message)
        if message["type"] in _ACTIVITY:
            self._note_activity()
        elif self.close_sent:
            # A client that does not confirm the close would occupy the connection meanwhile.
            self._slot.allow_eviction(self.evict)

    def _note_activity(self) -> None:
        if self.handshake_complete and not (self.close_sent or self.transport.is_closing()):
            self._slot.forbid_eviction()
            self._table.quiet_deadlines.start(self.on_quiet)
            self._table.idle_deadlines.start(self.on_idle_timeout)

    def on_quiet(self) -> None:
        """Allow the eviction of a silent WebSocket."""
        self._slot.allow_eviction(self.evict)

    def on_idle_timeout(self) -> None:
        """Close an idle WebSocket."""
        self._table.refusals.count("idle_connection")
        self._fail(CloseCode.GOING_AWAY, "idle for too long")

    def _fail(self, code: CloseCode, reason: str) -> None:
        if not (self.close_sent or self.transport.is_closing()):
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def evict(self) -> None:
        """Close in favour of a newer connection: it is silent, or not accepted yet."""
        is_closing = self.close_sent or self.transport.is_closing()
        if is_closing or self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self.handshake_complete:
            self._fail(CloseCode.TRY_AGAIN_LATER, "all connections are in use")
        else:
            self._refuse(errors.too_many_connections(self._table.max_connections))

    def _refuse(self, error: RefusedError) -> None:
        self._table.refusals.count(error.reason)
        self.handshake_complete = self.close_sent = self.disconnected = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": CloseCode.ABNORMAL_CLOSURE})
        # uvicorn sets the scope with the headers, which may not have come.
        received = getattr(self, "scope", {}).get("headers", ())
        defaults = self.default_headers
        self.transport.write(errors.encoded(error, defaults, received=received, has_body=True))
        self.transport.close()
