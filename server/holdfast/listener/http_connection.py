"""An HTTP connection: uvicorn's, with bounds on what it takes in.

A server may ignore an offer of another protocol (RFC 9110, 7.8) and go on in HTTP/1.1; the parser
does not, and takes what follows the headers for the other protocol. Java's HTTP client offers h2c
with the first request of a connection, whatever its method.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from holdfast.errors import RefusedError
from holdfast.listener import errors
from holdfast.listener.bounded_connection import BoundedConnection
from holdfast.listener.websocket_connection import WebSocketConnection

Headers = Iterable[tuple[bytes, bytes]]

_OF_AN_OFFER = frozenset({b"upgrade", b"http2-settings"})


def announces_body(headers: Headers) -> bool:
    """Whether a body is to follow the headers."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 \t"))
        for name, value in headers
    )


def without_offer(method: bytes, url: bytes, version: str, headers: Headers) -> bytes:
    """The head of a request as it would be without the offer; the body follows as it was sent."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(o for o in options if o.lower() not in _OF_AN_OFFER)  # noqa: PLW2901 - the header, cut
        if name not in _OF_AN_OFFER and (value or name != b"connection"):
            lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])


MOST_PIPELINED = 128
"""Requests that wait in one connection for the answer of an earlier; each takes kilobytes."""
_HEADER_FRAME_BYTES = 4
"""Colon, space and the line's end."""
_CHUNK_FRAME_FACTOR = 9
"""A chunk of one byte takes six on the wire, with a leading zero or two some more."""


class HttpConnection(BoundedConnection):
    """Answers what is over a limit itself, and closes: what follows could be read as a request."""

    def data_received(self, data: bytes) -> None:
        """Parse it, unless the last answer is given."""
        if self._is_ending:
            self._discard()
            return
        # A request that begins within these bytes is not counted with them: they are one read.
        self._wire_bytes += len(data)
        try:
            while data:
                data = self._parse(data)
            if self._is_receiving:
                self._check_wire()
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._end(cause if isinstance(cause, RefusedError) else errors.malformed())
        except RefusedError as error:
            self._end(error)

    def _parse(self, data: bytes) -> bytes:
        """Parse it; what is to be parsed then."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            if not self._is_offering:
                self._become_websocket(rest)
                return b""
            self._is_offering = False
            method, version = self.parser.get_method(), self.parser.get_http_version()
            head = without_offer(method, self.url, version, self.headers)
            self.parser = self._new_parser()
            return head + rest
        return b""

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if len(self.pipeline) >= MOST_PIPELINED:
            raise errors.malformed()
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._is_receiving = True
        self._has_head = self._is_asked = False
        self._wire_bytes = self._header_bytes = self._body_bytes = self._body_bytes_in_time = 0
        if not self._is_answering() and self.head_is_late not in self._book.heads:
            self._book.heads.start(self.head_is_late)

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        if len(self.url) + len(url) > self._book.limits.max_url_bytes:
            raise errors.url_too_long(self._book.limits.max_url_bytes)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header, or a trailer."""
        limits = self._book.limits
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > limits.max_header_bytes:
            raise errors.headers_too_large(limits.max_header_bytes)
        # A trailer is no header: whoever looks at headers has looked already.
        if not self._has_head:
            if len(self.headers) >= limits.max_headers:
                raise errors.too_many_headers(limits.max_headers)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request to start, unless what it announces is over a limit."""
        if self.parser.get_method() == b"CONNECT":
            raise errors.malformed()
        is_socket = False
        if self.parser.should_upgrade():
            is_socket = self._should_upgrade()
            self._is_offering = not is_socket
            if self._is_offering:
                return  # it comes again, without the offer
        limits = self._book.limits
        self._has_head = True
        self._book.heads.stop(self.head_is_late)
        for name, value in self.headers:
            if name == b"content-length" and int(value) > limits.max_body_bytes:
                raise errors.body_too_large(limits.max_body_bytes)
        if self._seat.is_spare and (is_socket or not self._asks_after_health()):
            raise errors.too_many_connections(self._book.max_connections)
        super().on_headers_complete()
        if not is_socket:
            self._is_asked = True
            self._seat.keep()
            self.transport.asks_for_more = not self.flow.write_paused
            self._book.bodies.start(self.body_is_late)
            if self._seat.is_spare or self.expect_100_continue:
                # Who waits for leave to send a body that nobody wants may never send it.
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body_bytes += len(body)
        if self._body_bytes > self._book.limits.max_body_bytes:
            raise errors.body_too_large(self._book.limits.max_body_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        if self._is_offering:
            return
        self._is_receiving = False
        self._book.bodies.stop(self.body_is_late)
        super().on_message_complete()
        if self._is_asked and self.cycle.response_complete and not self.transport.is_closing():
            self._keep_alive()

    # The requests

    def on_response_complete(self) -> None:
        """A whole answer; from now on the connection is idle, unless a request waits."""
        super().on_response_complete()
        if self.transport.is_closing() or self._is_answering():
            return
        self._seat.offer(self.make_room)
        if self._is_receiving:
            # The times of what still comes hold.
            self._unset_keepalive_if_required()
            if not self._has_head:
                self._book.heads.start(self.head_is_late)
        self.transport.expect_rest()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        return parser

    def _become_websocket(self, rest: bytes) -> None:
        """Hand the connection over, unless it is not free for that, or frames came too early."""
        if rest or self._is_answering() or announces_body(self.headers):
            raise errors.malformed()
        self._expect_nothing()
        self.ws_protocol_class = partial(WebSocketConnection, book=self._book, seat=self._seat)  # type: ignore[assignment]  # it is only called
        self.handle_websocket_upgrade()
        self.parser = None  # type: ignore[assignment]  # as uvicorn does it when a connection ends

    def _asks_after_health(self) -> bool:
        path = self.url.partition(b"?")[0].rstrip(b"/")
        return path.rpartition(b"/")[2] in self._book.always_answered

    def _check_wire(self) -> None:
        """Bound what the parser keeps without a word: half a header, trailers, chunk extensions."""
        limits = self._book.limits
        around_bytes = limits.max_url_bytes + limits.max_header_bytes
        around_bytes += limits.max_headers * _HEADER_FRAME_BYTES
        if self._wire_bytes > around_bytes + _CHUNK_FRAME_FACTOR * self._body_bytes:
            raise errors.headers_too_large(limits.max_header_bytes)
