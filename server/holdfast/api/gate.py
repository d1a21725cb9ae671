"""Passes a request on, holds it or refuses it, by the server's state, the queue and the key.

Other modules refuse requests for other reasons; `labels.RefusalReason` lists them all.

While a request waits, its client's messages are read ahead, so that a disconnect is noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.admission import (
    PROBE_HEADER_BYTES,
    Admission,
    retry_after_seconds,
)
from holdfast.api.body_cost import content_type
from holdfast.api.errors import (
    STATE_HEADER,
    EngineAnswer,
    refuse_for_now,
)
from holdfast.api.queue import Ticket
from holdfast.api.router import work_of
from holdfast.errors import (
    KeySuspendedError,
    NotReadyError,
    OverloadedError,
    suspended_error,
)
from holdfast.labels import RefusalReason
from holdfast.lifecycle.supervisor import Supervisor
from holdfast.races import race
from holdfast.request_context import RequestContext, current_request

PIECE_BYTES = 32 * 1024
"""The bytes of a body other than JSON that the application gets at once. Starlette's parsers of
forms go through some of them byte by byte, on the event loop: 10 ms for a piece at worst."""

_DISCONNECTS = frozenset({"http.disconnect", "websocket.disconnect"})
_OVERLOADS = MappingProxyType[RefusalReason, str](
    {
        "overloaded": "The server is at capacity. Try again later.",
        "key_concurrency": "This API key has reached its limit of concurrent requests.",
    }
)


class DisconnectWatcher:
    """An ASGI `receive` that reads ahead of the application to notice a disconnect."""

    def __init__(self, receive: Receive, *, is_json: bool = True) -> None:
        self._receive = receive
        self._is_json = is_json
        self._read: deque[Message] = deque()

    async def __call__(self) -> Message:
        """Return the next message, beginning with those that were read ahead."""
        if not self._is_json:
            await asyncio.sleep(0)
        return self._read.popleft() if self._read else await self._receive()

    async def has_whole_body(self) -> bool:
        """Wait for the last part of the body; False if the client leaves before that.

        The parts are joined into one, or into pieces of `PIECE_BYTES` if the body is not JSON: one
        that arrives byte by byte would otherwise take hundreds of times its size.
        """
        message = await self._receive()
        if message["type"] == "http.request" and message.get("more_body", False):
            message = await self._joined(message)
        is_whole = bool(message["type"] == "http.request")
        self._read.extend(_pieces(message) if is_whole and not self._is_json else [message])
        return is_whole

    async def _joined(self, message: Message) -> Message:
        body = bytearray(message.get("body", b""))
        while message["type"] == "http.request" and message.get("more_body", False):
            message = await self._receive()
            body += message.get("body", b"")
        return {**message, "body": bytes(body)} if message["type"] == "http.request" else message

    async def unless_disconnected(self, answer: Awaitable[bool]) -> bool | None:
        """Return the result of `answer`, or None if the client leaves before that."""
        async with race(answer, self._until_disconnected()) as (answering, _):
            return answering.result() if answering.done() else None

    async def _until_disconnected(self) -> None:
        message: Message = {"type": ""}
        while message["type"] not in _DISCONNECTS:
            message = await self._receive()
            self._read.append(message)


def _pieces(message: Message) -> Iterator[Message]:
    body = message.get("body", b"")
    for at in range(0, max(1, len(body)), PIECE_BYTES):
        end = at + PIECE_BYTES
        yield {**message, "body": body[at:end], "more_body": end < len(body)}


class Gate:
    """ASGI layer: an admitted request reaches `app` unchanged, except for the probe's header."""

    def __init__(
        self,
        app: ASGIApp,
        admission: Admission,
        *,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._admission = admission
        self._root_path = root_path

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Pass the request on, now or later, or answer 429 or 503 (close a WebSocket with 1013)."""
        if scope["type"] not in {"http", "websocket"}:
            return self._app(scope, receive, send)
        scope, is_probe = self._without_probe_header(scope)
        context = current_request()
        context.is_probe = is_probe
        if not is_probe:
            error = _early_refusal(self._admission, context.key)
            if error is not None:
                return self._answer_refusal(error, scope, receive, send)
            return self._share(scope, receive, send, context)
        if self._admission.is_open(is_probe=True):
            return self._run(scope, receive, send, context)
        return self._answer_refusal(_not_ready(self._admission.supervisor), scope, receive, send)

    def _run(
        self, scope: Scope, receive: Receive, send: Send, context: RequestContext
    ) -> Awaitable[None]:
        answer = EngineAnswer(send, context, self._admission.count_refusal)
        return self._app(scope, receive, answer.send)

    async def _share(
        self, scope: Scope, receive: Receive, send: Send, context: RequestContext
    ) -> None:
        with self._admission.shares.in_progress(context.key):
            await self._enqueue(scope, receive, send, context)

    async def _enqueue(
        self, scope: Scope, receive: Receive, send: Send, context: RequestContext
    ) -> None:
        work = work_of(scope, self._root_path)
        receive = watcher = DisconnectWatcher(receive, is_json=_is_json(scope))
        # Only a complete request gets capacity: a slow body may take hours to arrive. One that is
        # held would have each part of its body kept by itself.
        needs_body = work != "none" or not self._admission.is_open(is_probe=False)
        has_body = scope["type"] == "http" and needs_body and not self._admission.refuses_all()
        if has_body and not await watcher.has_whole_body():
            return
        context.received_seconds = time.monotonic()
        ticket = self._admission.join(context, work=work)
        waited_seconds = 0.0
        try:
            if ticket.status == "waiting":
                began_seconds = time.monotonic()
                if await watcher.unless_disconnected(self._admission.until_settled(ticket)) is None:
                    return
                waited_seconds = time.monotonic() - began_seconds
            error = _refusal(self._admission, ticket, context)
            if error is None:
                self._admission.begin(ticket)
                if work == "engine":
                    self._admission.waits.observe(waited_seconds)
                    context.engine_is_done = partial(self._admission.release, ticket)
                if work == "session":
                    context.session = _Session(self._admission, context)
                elif work != "none":
                    context.capacity = _HeldCapacity(self._admission, ticket)
                await self._run(scope, receive, send, context)
            else:
                await self._answer_refusal(error, scope, receive, send)
        finally:
            self._admission.leave(ticket)

    async def _answer_refusal(
        self, error: NotReadyError | OverloadedError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if scope["type"] == "http":
            current_request().error = error.openai_type
        headers = {STATE_HEADER: self._admission.supervisor.state}
        await refuse_for_now(error, scope, receive, send, headers=headers)

    def _without_probe_header(self, scope: Scope) -> tuple[Scope, bool]:
        """Return the scope without the probe's header, and whether the request is the probe's."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        kept = [(name, value) for name, value in headers if name != PROBE_HEADER_BYTES]
        if len(kept) == len(headers):
            return scope, False
        return {**scope, "headers": kept}, self._admission.is_probe(scope)


class _HeldCapacity:
    """The `HeldCapacity` of an admitted request."""

    def __init__(self, admission: Admission, ticket: Ticket) -> None:
        self._admission = admission
        self._ticket = ticket

    def release(self) -> None:
        self._admission.set_aside(self._ticket)

    async def acquire(self) -> None:
        await self._admission.come_back(self._ticket)
        if self._ticket.status == "refused":
            raise _refused(self._admission, self._ticket)
        if (error := _suspension(self._admission, self._ticket.key)) is not None:
            raise error


class _Session:
    """The `Session` of a WebSocket: its calls are queued one by one."""

    def __init__(self, admission: Admission, context: RequestContext) -> None:
        self._admission = admission
        self._context = context

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        admission, context = self._admission, self._context
        # The session is counted for its key already.
        ticket = admission.join(context, work="engine", is_limited=False)
        began_seconds = time.monotonic()
        try:
            with context.waiting():
                await admission.until_settled(ticket)
            if (error := _refusal(admission, ticket, context)) is not None:
                raise error
            admission.waits.observe(time.monotonic() - began_seconds)
            context.capacity = _HeldCapacity(admission, ticket)
            yield
        finally:
            context.capacity = None
            admission.leave(ticket)


def _is_json(scope: Scope) -> bool:
    """Return whether the body is JSON by its type, or has no type, so that it is not a form."""
    given = content_type(scope)
    return given is None or given.partition(b";")[0].strip() == b"application/json"


def _early_refusal(admission: Admission, key: str) -> NotReadyError | OverloadedError | None:
    """Return why a request is refused whatever its body is, and count it; None if it may go on."""
    error = _suspension(admission, key)
    if error is None and not admission.shares.has_room(key):
        return _refused(admission, Ticket(key, status="refused", refusal="key_concurrency"))
    return error


def _refusal(
    admission: Admission, ticket: Ticket, context: RequestContext
) -> NotReadyError | OverloadedError | None:
    """Return why a settled ticket does not run, and count it; None if it runs."""
    if ticket.status != "admitted":
        return _refused(admission, ticket)
    # While it waited, or was sent, others of its key may have ended engines, or used up the day.
    if (error := _suspension(admission, context.key)) is not None:
        return error
    return None if context.usage is None else context.usage.refusal()


def _refused(admission: Admission, ticket: Ticket) -> NotReadyError | OverloadedError:
    admission.count_refusal(ticket.refusal)
    if ticket.refusal in _OVERLOADS:
        return OverloadedError(
            _OVERLOADS[ticket.refusal],
            retry_after_seconds=admission.retry_after_seconds(ticket),
        )
    return _not_ready(admission.supervisor)


def _suspension(admission: Admission, key: str) -> KeySuspendedError | None:
    """Return and count the refusal of a key that is suspended; None if it is not."""
    seconds = admission.suspended_seconds(key)
    if not seconds:
        return None
    admission.count_refusal("key_suspended")
    return suspended_error(seconds)


def _not_ready(supervisor: Supervisor) -> NotReadyError:
    return NotReadyError(
        f"The server is {supervisor.state}{f': {supervisor.reason}' if supervisor.reason else '.'}",
        retry_after_seconds=retry_after_seconds(supervisor.eta_seconds),
    )
