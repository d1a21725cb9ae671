"""The one place that lets a request through to the engine, holds it or turns it away."""

from __future__ import annotations

from collections.abc import Awaitable
from types import MappingProxyType

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.admission import (
    PROBE_HEADER_BYTES,
    RETRY_AFTER_UNKNOWN_SECONDS,
    Admission,
    GateView,
    retry_after_seconds,
)
from holdfast.api.line import Ticket
from holdfast.api.replies import (
    SHOULD_RETRY_HEADER,
    STATE_HEADER,
    close_websocket,
    openai_error,
)
from holdfast.api.waiting import PatientReceive
from holdfast.api.work import asks_for_work
from holdfast.engine.tracked import Tracked, tracked_request
from holdfast.errors import NotReadyError, OverloadedError
from holdfast.lifecycle.states import State
from holdfast.records import RefusalReason

WEBSOCKET_TRY_AGAIN_LATER = 1013

_DONE = b"data: [DONE]\n\n"
_OVERLOADS = MappingProxyType[RefusalReason, str](
    {
        "overloaded": "The server has as many requests as it may: try again later.",
        "key_concurrency": "This API key has as many requests at a time as it may.",
    }
)


class Gate:
    """Pure ASGI: what enters reaches `app` unchanged, but for the header of the probe."""

    def __init__(self, app: ASGIApp, admission: Admission, *, root_path: str = "") -> None:
        self._app = app
        self._admission = admission
        self._root_path = root_path.rstrip("/")

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Let in, hold until it may go on, or answer 429 or 503 (close a WebSocket with 1013).

        A plain function: each coroutine on the way is gone through anew for each chunk.
        """
        if scope["type"] not in {"http", "websocket"}:
            return self._app(scope, receive, send)
        scope, is_probe = self._without_probe_header(scope)
        tracked = tracked_request()
        tracked.is_probe = is_probe
        if not is_probe:
            return self._line_up(scope, receive, send, tracked)
        if self._admission.is_open(is_probe=True):
            return self._app(scope, receive, send)
        view = self._admission.view
        return _turn_away(_not_ready(view), view.state, scope, receive, send)

    async def _line_up(self, scope: Scope, receive: Receive, send: Send, tracked: Tracked) -> None:
        needs_place = asks_for_work(scope, self._root_path)
        ticket = self._admission.join(tracked.key, needs_place=needs_place)
        try:
            if ticket.standing == "waiting":
                receive = patient = PatientReceive(receive)
                if await patient.while_here(self._admission.until_settled(ticket)) is None:
                    return
            if ticket.standing == "called":
                await self._app(scope, receive, _telling(send, tracked))
            else:
                await self._refuse(ticket, scope, receive, send)
        finally:
            self._admission.leave(ticket)

    async def _refuse(self, ticket: Ticket, scope: Scope, receive: Receive, send: Send) -> None:
        self._admission.count_refusal(ticket.refusal)
        view = self._admission.view
        error: NotReadyError | OverloadedError
        if ticket.refusal in _OVERLOADS:
            error = OverloadedError(
                _OVERLOADS[ticket.refusal],
                retry_after_seconds=self._admission.retry_after_seconds(),
            )
        else:
            error = _not_ready(view)
        await _turn_away(error, view.state, scope, receive, send)

    def _without_probe_header(self, scope: Scope) -> tuple[Scope, bool]:
        """The scope as the inner app may see it, and whether the request is the probe's."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        kept = [(name, value) for name, value in headers if name != PROBE_HEADER_BYTES]
        if len(kept) == len(headers):
            return scope, False
        return {**scope, "headers": kept}, self._admission.is_probe(scope)


def _telling(send: Send, tracked: Tracked) -> Send:
    """Say what became of the request in ways that vLLM's layer does not."""

    def tell(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message = _with_advice(message, tracked)
        elif tracked.is_broken and message.get("body") == _DONE:
            # vLLM ends a stream so even after an error, which clients take for a whole answer.
            message = {**message, "body": b""}
        return send(message)

    return tell


def _with_advice(message: Message, tracked: Tracked) -> Message:
    if tracked.may_be_retried is None:
        return message
    advice = [(SHOULD_RETRY_HEADER.encode(), b"true" if tracked.may_be_retried else b"false")]
    if tracked.may_be_retried:
        advice.append((b"retry-after", str(RETRY_AFTER_UNKNOWN_SECONDS).encode()))
    return {**message, "headers": [*message.get("headers", ()), *advice]}


def _not_ready(view: GateView) -> NotReadyError:
    return NotReadyError(
        f"The server is {view.state}{f': {view.reason}' if view.reason else '.'}",
        retry_after_seconds=retry_after_seconds(view.eta_seconds),
    )


async def _turn_away(
    error: NotReadyError | OverloadedError, state: State, scope: Scope, receive: Receive, send: Send
) -> None:
    if scope["type"] == "websocket":
        reason = f"retry after {error.retry_after_seconds} s"
        await close_websocket(receive, send, code=WEBSOCKET_TRY_AGAIN_LATER, reason=reason)
        return
    response = openai_error(
        error.cause,
        kind=error.openai_type,
        status=error.http_status,
        headers={
            "retry-after": str(error.retry_after_seconds),
            SHOULD_RETRY_HEADER: "true",
            STATE_HEADER: state,
        },
    )
    await response(scope, receive, send)
