"""An HTTP connection: uvicorn's, with bounds on what it accepts.

A server may ignore the offer of another protocol (RFC 9110, 7.8) and continue in HTTP/1.1. The
parser does not: it takes what follows the headers for the other protocol. Java's HTTP client offers
h2c with the first request of a connection, whatever its method.
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

MAX_PIPELINED = 128
"""Requests on one connection that wait for the answer to an earlier one; each takes kilobytes."""

_PROBING_METHODS = frozenset({b"GET", b"HEAD"})
_UPGRADE_OPTIONS = frozenset({b"upgrade", b"http2-settings"})
_HEADER_FRAME_BYTES = 4
"""Colon, space and line break."""
_CHUNK_FRAME_FACTOR = 9
"""A chunk of one byte takes six on the wire, and a few more with leading zeros."""

Headers = Iterable[tuple[bytes, bytes]]


def announces_body(headers: Headers) -> bool:
    """Return whether the headers announce a body."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0 \t"))
        for name, value in headers
    )


def without_upgrade_offer(method: bytes, url: bytes, version: str, headers: Headers) -> bytes:
    """Return the head of a request without the upgrade offer; the body follows unchanged."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(o for o in options if o.lower() not in _UPGRADE_OPTIONS)  # noqa: PLW2901 - the header, cut
        if name not in _UPGRADE_OPTIONS and (value or name != b"connection"):
            lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])


class HttpConnection(BoundedConnection):
    """Refuses what exceeds a limit and closes, since the rest could be mistaken for a request."""

    def data_received(self, data: bytes) -> None:
        """Parse the data, unless the connection has given its last answer."""
        if self._is_ending:
            self._discard()
            return
        # A request that begins within these bytes does not count them: they are one read.
        self._received_bytes += len(data)
        try:
            while data:
                data = self._parse(data)
            if self._is_receiving:
                self._check_framing()
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._end(cause if isinstance(cause, RefusedError) else errors.malformed())
        except RefusedError as error:
            self._end(error)

    def _parse(self, data: bytes) -> bytes:
        """Parse the data, and return what must be parsed next."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            if not self._is_offering_upgrade:
                self._become_websocket(rest)
                return b""
            self._is_offering_upgrade = False
            method, version = self.parser.get_method(), self.parser.get_http_version()
            head = without_upgrade_offer(method, self.url, version, self.headers)
            self.parser = self._new_parser()
            return head + rest
        return b""

    def on_message_begin(self) -> None:
        """Begin a request at its first byte."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise errors.malformed()
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._is_receiving = True
        self._has_headers = self._is_dispatched = False
        self._received_bytes = self._header_bytes = self._body_bytes = self._body_bytes_in_time = 0
        if not self._is_answering() and self.on_header_timeout not in self._table.header_deadlines:
            self._table.header_deadlines.start(self.on_header_timeout)

    def on_url(self, url: bytes) -> None:
        """Add a part of the URL, unless it gets too long."""
        if len(self.url) + len(url) > self._table.limits.max_url_bytes:
            raise errors.url_too_long(self._table.limits.max_url_bytes)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a complete header, or check a trailer."""
        limits = self._table.limits
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > limits.max_header_bytes:
            raise errors.headers_too_large(limits.max_header_bytes)
        # A trailer is not a header: the code that reads headers has already done so.
        if not self._has_headers:
            if len(self.headers) >= limits.max_headers:
                raise errors.too_many_headers(limits.max_headers)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request to the application, unless what it announces exceeds a limit."""
        if self.parser.get_method() == b"CONNECT":
            raise errors.malformed()
        is_socket = False
        if self.parser.should_upgrade():
            is_socket = self._should_upgrade()
            self._is_offering_upgrade = not is_socket
            if self._is_offering_upgrade:
                return  # the head is parsed once more, without the offer
        limits = self._table.limits
        self._has_headers = True
        self._table.header_deadlines.stop(self.on_header_timeout)
        for name, value in self.headers:
            if name == b"content-length" and int(value) > limits.max_body_bytes:
                raise errors.body_too_large(limits.max_body_bytes)
        if self._slot.is_spare and (is_socket or not self._asks_for_health()):
            raise errors.too_many_connections(self._table.max_connections)
        super().on_headers_complete()
        if not is_socket:
            self._is_dispatched = True
            self._slot.forbid_eviction()
            self.transport.has_next_request = not self.flow.write_paused
            self._table.body_deadlines.start(self.on_body_timeout)
            if self._slot.is_spare:
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Add a part of the body, unless it gets too large."""
        self._body_bytes += len(body)
        if self._body_bytes > self._table.limits.max_body_bytes:
            raise errors.body_too_large(self._table.limits.max_body_bytes)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request at its last byte."""
        if self._is_offering_upgrade:
            return
        self._is_receiving = False
        self._table.body_deadlines.stop(self.on_body_timeout)
        super().on_message_complete()
        if self._is_dispatched and self.cycle.response_complete and not self.transport.is_closing():
            self._keep_alive()

    # The requests

    def on_response_complete(self) -> None:
        """End an answer; the connection is now idle, unless another request waits."""
        super().on_response_complete()
        if self.transport.is_closing() or self._is_answering():
            return
        self._slot.allow_eviction(self.evict)
        if self._is_receiving:
            # The deadlines of the request that is still arriving remain in force.
            self._unset_keepalive_if_required()
            if not self._has_headers:
                self._table.header_deadlines.start(self.on_header_timeout)
        self.transport.expect_remainder()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running_cycle = cycle
        super()._start_asgi_task(cycle, partial(_run, app, cycle))

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
        return parser

    def _become_websocket(self, rest: bytes) -> None:
        """Hand the connection over, unless it is busy or frames arrived too early."""
        if rest or self._is_answering() or announces_body(self.headers):
            raise errors.malformed()
        self._expect_nothing()
        self.ws_protocol_class = partial(WebSocketConnection, table=self._table, slot=self._slot)  # type: ignore[assignment]  # it is only called
        self.handle_websocket_upgrade()
        self.parser = None  # type: ignore[assignment]  # as uvicorn does it when a connection ends

    def _asks_for_health(self) -> bool:
        """Return whether the request is a health check or a scrape; a body could drip for hours."""
        if self.parser.get_method() not in _PROBING_METHODS or announces_body(self.headers):
            return False
        path = httptools.parse_url(self.url).path or b""
        return path.rstrip(b"/") in self._table.always_answered

    def _check_framing(self) -> None:
        """Bound what the parser keeps silently: half a header, trailers, chunk extensions."""
        limits = self._table.limits
        around_bytes = limits.max_url_bytes + limits.max_header_bytes
        around_bytes += limits.max_headers * _HEADER_FRAME_BYTES
        if self._received_bytes > around_bytes + _CHUNK_FRAME_FACTOR * self._body_bytes:
            raise errors.headers_too_large(limits.max_header_bytes)


async def _run(app: Any, cycle: RequestResponseCycle, scope: Any, receive: Any, send: Any) -> None:
    """Run the application, and only log what it raises after a complete answer.

    Starlette answers 500 and raises all the same, and uvicorn would close the connection then. The
    answer has not announced that, so the client's next request would be lost.
    """
    if cycle.waiting_for_100_continue:
        send = partial(_send_expected, cycle, send)
    try:
        await app(scope, receive, send)
    except Exception:
        if not cycle.response_complete:
            raise
        cycle.logger.exception("Exception in ASGI application")


async def _send_expected(cycle: RequestResponseCycle, send: Any, message: Any) -> None:
    """Send a message; an answer that begins before the body was read is the connection's last.

    A client that waits for `100 Continue` may never send a body that is not wanted.
    """
    if not cycle.response_started and cycle.more_body:
        cycle.keep_alive = False
    await send(message)
