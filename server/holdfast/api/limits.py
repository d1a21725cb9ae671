"""What may a request ask for? Limits on the depth and values of its JSON, its memory, and its time.

`holdfast.listener` refuses what can be refused before a request is complete.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.body_cost import (
    FREE_BYTES,
    LOOK_BYTES,
    PACE_BYTES,
    Buffer,
    Buffers,
    JsonShape,
    content_type,
    form_fault,
    json_fault,
)
from holdfast.api.errors import SHOULD_RETRY_HEADER, error_event, openai_error, send_nothing
from holdfast.api.message_limits import LimitedMessages
from holdfast.errors import RETRY_AFTER_SECONDS, OverloadedError, RefusedError
from holdfast.listener.websocket_connection import MEMORY_EXTENSION
from holdfast.request_context import REQUEST, current_request
from holdfast.settings import LimitSettings
from holdfast.telemetry.counters import Refusals

MAX_JSON_VALUES = 4 << 20
"""The limit per body, parsed in half a second: more than 2,048 inputs of 2,000 token ids each."""
BYTES_PER_JSON_VALUE = 8
"""A token id with its comma and a space; raises the limit where larger bodies are allowed."""

LEAVE_SECONDS = 1.0
"""The time for the application to end a request whose client has left, as it is told."""

_NETWORK_BYTES = 8
"""The network part of an IPv6 address: one client may use any address in its network."""
_GONE: Message = {"type": "http.disconnect"}


class Limits:
    """ASGI layer in front of the gate. Messages of a WebSocket have the limits of bodies."""

    def __init__(
        self,
        app: ASGIApp,
        settings: LimitSettings,
        refusals: Refusals,
        *,
        is_probe: Callable[[Scope], bool],
    ) -> None:
        self._app = app
        self._max_json_depth = settings.max_json_depth
        self._max_values = max(MAX_JSON_VALUES, settings.max_body_bytes // BYTES_PER_JSON_VALUE)
        self._timeout_seconds = settings.request_timeout_seconds
        self.buffers = Buffers(settings.max_buffered_bytes)
        """The memory of all request bodies."""
        self._refusals = refusals
        self._is_probe = is_probe

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass the request on to `app`, or refuse it."""
        if scope["type"] == "websocket":
            return self._run_websocket(scope, receive, send)
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        shape = JsonShape(self._max_json_depth, self._max_values) if _may_be_json(scope) else None
        exchange = _LimitedExchange(scope, receive, send, shape, self._refusals)
        if (error := form_fault(scope)) is not None:
            return exchange.refuse(error)
        is_large = _may_be_large(scope)
        # The probe has one deadline for everything, and no client waits for it.
        if (is_large or self._timeout_seconds) and not self._is_probe(scope):
            return self._run_buffered(exchange) if is_large else self._run_in_time(exchange)
        return self._app(scope, exchange.receive, exchange.send)

    async def _run_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        bind = scope.get("extensions", {}).get(MEMORY_EXTENSION, lambda _: None)
        with self.buffers.buffer_of(_owner(scope)) as buffer:
            messages = LimitedMessages(
                receive,
                send,
                lambda: JsonShape(self._max_json_depth, self._max_values),
                buffer.turn,
                self._refusals,
            )
            bind(buffer.try_resize)
            try:
                await self._app(scope, messages.receive, messages.send)
            finally:
                bind(None)

    async def _run_buffered(self, exchange: _LimitedExchange) -> None:
        with self.buffers.buffer_of(_owner(exchange.scope)) as exchange.buffer:
            if self._timeout_seconds:
                await self._run_in_time(exchange)
            else:
                await self._app(exchange.scope, exchange.receive, exchange.send)

    async def _run_in_time(self, exchange: _LimitedExchange) -> None:
        """Run the application until its time is over; then it hears that its client has left.

        A cancellation alone would end vLLM's route and not the work, which it has in a task of its
        own (`with_cancellation`, 0.32): the engine would go on for nobody.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds + LEAVE_SECONDS) as deadline:
                exchange.begin(self._timeout_seconds, deadline)
                await self._app(exchange.scope, exchange.receive, exchange.send)
        except TimeoutError:
            if not deadline.expired():
                raise
        # vLLM answers as if the client had left.
        if exchange.is_late:
            await exchange.time_out(self._timeout_seconds)


class _LimitedExchange:
    """One request and its response, which may end before the application is done with them."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        shape: JsonShape | None,
        refusals: Refusals,
    ) -> None:
        self.scope = scope
        self._late_at_seconds: float | None = None
        """When the client's time is over, by the loop's clock; None if it is not limited."""
        self._deadline: asyncio.Timeout | None = None
        self.buffer: Buffer | None = None
        """The memory of the body; None if the body is too small to be counted."""
        self._receive = receive
        self._send = send
        self._shape = shape
        self._refusals = refusals
        self._is_over = False
        self._has_started = False
        self._is_stream = False
        self._is_passed_on = False
        """Whether nothing can be cut off here any more."""
        self._unpaced_bytes = 0
        self._is_begun = False
        """Whether a part of the body has arrived."""

    def begin(self, seconds: float, deadline: asyncio.Timeout) -> None:
        """Limit the time from now on; `deadline` cancels an application that is still there."""
        self._late_at_seconds = asyncio.get_running_loop().time() + seconds
        self._deadline = deadline

    @property
    def is_late(self) -> bool:
        """Whether the time is over, and the response was not complete before."""
        late_at_seconds = self._late_at_seconds
        return late_at_seconds is not None and (
            asyncio.get_running_loop().time() >= late_at_seconds
        )

    async def receive(self) -> Message:
        """Return the next message; for a refused or late request, that its client has left."""
        if self._is_over:
            return _GONE
        try:
            async with asyncio.timeout_at(self._late_at_seconds) as late:
                await self._pace()
                message = await self._receive()
        except TimeoutError:
            if late.expired():
                return _GONE
            raise
        body = message.get("body", b"")
        self._unpaced_bytes += len(body)
        if body:
            is_whole = not (self._is_begun or message.get("more_body", False))
            self._is_begun = True
            if len(body) <= LOOK_BYTES:
                error = self._fault(body, len(body), is_whole=is_whole)
            else:
                error = self._fault(body[:LOOK_BYTES], len(body))
            for at in range(LOOK_BYTES, len(body), LOOK_BYTES):
                if error is None:
                    await asyncio.sleep(0)
                    error = self._fault(body[at : at + LOOK_BYTES])
            if error is not None:
                await self.refuse(error)
                return _GONE
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Pass a message on, unless the response is over."""
        if self._is_passed_on:
            return self._send(message)
        if self._is_over or self.is_late:
            return send_nothing()
        return self._pass(message)

    async def _pace(self) -> None:
        """Keep a fast body from delaying all other requests."""
        if self.buffer is not None and self._unpaced_bytes >= PACE_BYTES:
            self._unpaced_bytes = 0
            await self.buffer.turn()

    async def time_out(self, seconds: float) -> None:
        """Tell the client that its time is over, if that is still possible."""
        error = RefusedError(
            f"The request took longer than {seconds:g} s (--request-timeout).",
            reason="timed_out",
            http_status=504,
            openai_type="timeout_error",
        )
        if not self._has_started:
            await self.refuse(error)
            return
        self._refusals.count(error.reason)
        self._is_over = True
        if (context := REQUEST.get()) is not None:
            context.is_broken = True
        if self._is_stream:
            # Any other response ends without its last chunk, which tells the client the same.
            event = error_event(error)
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def refuse(self, error: RefusedError) -> None:
        """Answer with an error, unless the response has started, and drop what comes later."""
        self._refusals.count(error.reason)
        self._is_over, self._is_passed_on = True, False
        if not self._has_started:
            may_retry = error.reason == "buffers_full"
            headers = {SHOULD_RETRY_HEADER: "true" if may_retry else "false"}
            if may_retry:
                headers["retry-after"] = str(RETRY_AFTER_SECONDS)
            response = openai_error(
                error.cause, kind=error.openai_type, status=error.http_status, headers=headers
            )
            await response(self.scope, self._receive, self._send)

    def _pass(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self._has_started = True
            self._is_passed_on = self._deadline is None
            self._is_stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message.get("headers", ())
            )
        elif self._deadline is not None and not message.get("more_body", False):
            # Background work of the application is not part of the response.
            self._late_at_seconds = None
            self._deadline.reschedule(None)
        return self._send(message)

    def _fault(
        self, piece: bytes, part_bytes: int = 0, *, is_whole: bool = False
    ) -> RefusedError | None:
        """Return why the next piece of the body, or the part it begins, is refused; else None."""
        if self.buffer is not None and not self.buffer.try_reserve(part_bytes):
            return RefusedError(
                "All request bodies together have reached the limit (--max-buffered-size).",
                reason="buffers_full",
                http_status=OverloadedError.http_status,
                openai_type=OverloadedError.openai_type,
            )
        return None if self._shape is None else json_fault(self._shape, piece, is_whole=is_whole)


def _may_be_large(scope: Scope) -> bool:
    """Return whether the body is, or may become, large enough to be counted."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return not value.isdigit() or int(value) > FREE_BYTES
        if name == b"transfer-encoding":
            return True
    return False


def _owner(scope: Scope) -> str:
    """Return the key of a request; without keys the client's address, or its IPv6 network."""
    if key := current_request().key:
        return key
    host: str = (scope.get("client") or ("", 0))[0]
    with suppress(ValueError):  # a Unix socket has no address
        address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
            return address.packed[:_NETWORK_BYTES].hex()
    return host


def _may_be_json(scope: Scope) -> bool:
    """Return whether the body may be parsed as JSON: its type says so, or is missing."""
    given = content_type(scope)
    return given is None or b"json" in given
