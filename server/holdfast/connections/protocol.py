"""A connection of a client: uvicorn's, with bounds on what it takes in."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.utils import get_client_addr

from holdfast.connections import answers
from holdfast.connections.book import Book, Standing
from holdfast.errors import RefusedError

LEAST_BODY_RATE_BYTES = 1024
"""A second; a body that comes more slowly holds a connection for nothing."""
MOST_LINGER_SECONDS = 10.0
"""After a last answer, for a client that goes on sending."""
DISCARD_INTERVAL_SECONDS = 0.01
"""Between two reads of what is thrown away, so that a flood of it takes nobody's turn."""
_HEADER_FRAME_BYTES = 4
"""Colon, space and the line's end."""
_CHUNK_FRAME_FACTOR = 9
"""A chunk of one byte takes six on the wire, with a leading zero or two some more."""


class HttpConnection(HttpToolsProtocol):
    """Answers what is over a limit itself, and closes: what follows could be read as a request."""

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
        "_is_receiving",
        "_is_spare",
        "_linger_until_seconds",
        "_requests",
        "_running",
        "_wire_bytes",
    )

    def __init__(self, *arguments: Any, book: Book, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._book = book
        self._is_spare = False
        self._is_ending = False
        self._linger_until_seconds = 0.0
        self._running: RequestResponseCycle | None = None
        """The request that the application has; `cycle` is the one that was read last."""
        self._requests = 0
        self._is_receiving = False
        self._has_head = False
        self._is_asked = False
        """Whether the application gets, or got, the request that is being read."""
        self._wire_bytes = 0
        self._header_bytes = 0
        self._body_bytes = 0
        self._body_bytes_in_time = 0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Take it, close another for it, or refuse it."""
        super().connection_made(transport)
        standing = self._book.standing(len(self.connections))
        if standing is Standing.CLOSED:
            self._book.refusals.count("too_many_connections")
            transport.abort()
        elif standing is Standing.TOLD:
            self._end(answers.too_many_connections(self._book.limits.max_connections))
        else:
            self._is_spare = standing is Standing.SPARE
            self._book.heads.start(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes, for whatever reason."""
        self._book.leave(self)
        self._book.readers.stop(self)
        self._book.lingering.stop(self)
        if self._running is not None:
            # uvicorn tells it to the request that was read last.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse it, unless the last answer is given."""
        if self._is_ending:
            self._discard()
            return
        self._unset_keepalive_if_required()
        request = self._requests if self._is_receiving else None
        try:
            self.parser.feed_data(data)
            # What began within these bytes is not counted with them: they are at most one read.
            if request == self._requests and self._is_receiving:
                self._count_wire(len(data))
        except httptools.HttpParserUpgrade:
            self._upgrade()
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._end(cause if isinstance(cause, RefusedError) else answers.malformed())
        except RefusedError as error:
            self._end(error)

    def pause_writing(self) -> None:
        """More is ready of an answer than is kept; its place in the engine may be kept with it."""
        super().pause_writing()
        self._book.readers.start(self)

    def resume_writing(self) -> None:
        """The client has read most of it."""
        super().resume_writing()
        self._book.readers.stop(self)

    def reader_is_late(self) -> None:
        """The time is over in which the client had to read."""
        self._book.refusals.count("slow_reader")
        self.transport.abort()

    def make_room(self) -> None:
        """Close, for one that came later; no request is under way here."""
        if self._is_receiving:
            self._end(answers.too_many_connections(self._book.limits.max_connections))
        elif self in self._book.heads:
            self._book.refusals.count("idle_connection")
        self._close()

    def head_is_late(self) -> None:
        """The time for the first line and the headers is over."""
        if self._is_receiving:
            self._end(answers.slow_headers(self._book.limits.header_timeout_seconds))
        else:
            self._book.refusals.count("idle_connection")
            self._close()

    def body_is_late(self) -> None:
        """The time is over in which a part of the body had to come."""
        seconds = self._book.limits.body_timeout_seconds
        if self.flow.read_paused:
            # It is the application that does not read.
            self._book.bodies.start(self)
        elif self._body_bytes - self._body_bytes_in_time >= seconds * LEAST_BODY_RATE_BYTES:
            self._body_bytes_in_time = self._body_bytes
            self._book.bodies.start(self)
        else:
            self._end(answers.slow_body(seconds))

    # What the parser finds

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._requests += 1
        self._is_receiving = True
        self._has_head = self._is_asked = False
        self._wire_bytes = self._header_bytes = self._body_bytes = self._body_bytes_in_time = 0
        self._book.idle.pop(self, None)
        if not self._is_answering() and self not in self._book.heads:
            self._book.heads.start(self)

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        if len(self.url) + len(url) > self._book.limits.max_url_bytes:
            raise answers.url_too_long(self._book.limits.max_url_bytes)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header, or a trailer."""
        limits = self._book.limits
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > limits.max_header_bytes:
            raise answers.headers_too_large(limits.max_header_bytes)
        # A trailer is no header: whoever looks at headers has looked already.
        if not self._has_head:
            if len(self.headers) >= limits.max_headers:
                raise answers.too_many_headers(limits.max_headers)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request to start, unless what it announces is over a limit."""
        limits = self._book.limits
        self._has_head = True
        self._book.heads.stop(self)
        for name, value in self.headers:
            if name == b"content-length" and int(value) > limits.max_body_bytes:
                raise answers.body_too_large(limits.max_body_bytes)
        is_socket = bool(self.parser.should_upgrade() and self._should_upgrade())
        if self._is_spare and (is_socket or not self._asks_after_health()):
            raise answers.too_many_connections(limits.max_connections)
        super().on_headers_complete()
        if not is_socket:
            self._is_asked = True
            self._book.bodies.start(self)
            if self._is_spare or self.expect_100_continue:
                # Who waits for leave to send a body that nobody wants may never send it.
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body_bytes += len(body)
        if self._body_bytes > self._book.limits.max_body_bytes:
            raise answers.body_too_large(self._book.limits.max_body_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        self._is_receiving = False
        self._book.bodies.stop(self)
        super().on_message_complete()

    # The requests

    def on_response_complete(self) -> None:
        """A whole answer; from now on the connection is idle, unless a request waits."""
        super().on_response_complete()
        if self._is_receiving and not self._has_head:
            self._book.heads.start(self)
        elif self.timeout_keep_alive_task is not None:
            self._book.idle[self] = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _upgrade(self) -> None:
        if self._should_upgrade():
            self.handle_websocket_upgrade()
        else:
            self._unsupported_upgrade_warning()

    def _asks_after_health(self) -> bool:
        path = self.url.partition(b"?")[0].rstrip(b"/")
        return path.rpartition(b"/")[2] in self._book.always_answered

    def _count_wire(self, size_bytes: int) -> None:
        """Bound what the parser keeps without a word: half a header, trailers, chunk extensions."""
        limits = self._book.limits
        self._wire_bytes += size_bytes
        around_bytes = limits.max_url_bytes + limits.max_header_bytes
        around_bytes += limits.max_headers * _HEADER_FRAME_BYTES
        if self._wire_bytes > around_bytes + _CHUNK_FRAME_FACTOR * self._body_bytes:
            raise answers.headers_too_large(limits.max_header_bytes)

    # The end

    def _end(self, error: RefusedError) -> None:
        """Refuse what is being read, and close."""
        self._book.refusals.count(error.reason)
        self._is_ending = True
        self._book.leave(self)
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
        self._book.lingering.start(self)
        self.flow.resume_reading()

    def _discard(self) -> None:
        if self.loop.time() < self._linger_until_seconds:
            self._book.lingering.start(self)
        self.flow.pause_reading()
        self.loop.call_later(DISCARD_INTERVAL_SECONDS, self._discard_more)

    def _discard_more(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def _answer(self, error: RefusedError) -> None:
        method = self.parser.get_method().decode()
        headers = self.server_state.default_headers
        self.transport.write(answers.encoded(error, headers, has_body=method != "HEAD"))
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
        self._book.leave(self)
        self.connections.discard(self)
        self.transport.close()
