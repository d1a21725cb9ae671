"""Who may come in? The one place that lets a request through to the engine or turns it away."""

from __future__ import annotations

import asyncio
import hmac
import math
from types import MappingProxyType
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.replies import SHOULD_RETRY_HEADER, STATE_HEADER, openai_error
from holdfast.api.waiting import PatientReceive
from holdfast.engine.tracked import Tracked, tracked_request
from holdfast.errors import NotReadyError
from holdfast.lifecycle.states import SERVING, State
from holdfast.telemetry.refusals import RefusalReason, Refusals

PROBE_HEADER = "x-holdfast-probe"
RETRY_AFTER_UNKNOWN_SECONDS = 5
RETRY_AFTER_MOST_SECONDS = 120
WEBSOCKET_TRY_AGAIN_LATER = 1013

_DONE = b"data: [DONE]\n\n"
_PROBE_HEADER_BYTES = PROBE_HEADER.encode()
_REFUSAL_OF = MappingProxyType[State, RefusalReason](
    {State.DRAINING: "draining", State.STOPPED: "draining", State.FAILED: "failed"}
)


class GateView(Protocol):
    """What the gate reads at each request; plain attributes, since it is the hot path."""

    @property
    def state(self) -> State:
        """Where the server stands now."""

    @property
    def reason(self) -> str:
        """Why it stands there."""

    @property
    def eta_seconds(self) -> float | None:
        """Time until READY, if anything is known of it."""

    @property
    def is_recovering(self) -> bool:
        """Whether an engine that was lost is being replaced, so that it is worth to wait."""

    async def until_moved(self) -> None:
        """Return when the state has changed."""


class Admission:
    """Decides by the state, and counts. Belongs to one event loop."""

    def __init__(
        self,
        view: GateView,
        *,
        probe_token: str,
        refusals: Refusals,
        hold_timeout_seconds: float = 0.0,
    ) -> None:
        self.view = view
        self.held = 0
        """Requests that wait at the gate for the next generation of the engine."""
        self._hold_timeout_seconds = hold_timeout_seconds
        self.in_flight = 0
        """Requests let in and not yet answered whole, the probe's own left out."""
        self._probe_token = probe_token.encode()
        self._refusals = refusals
        self._idle = asyncio.Event()
        self._idle.set()

    def is_open(self, *, is_probe: bool) -> bool:
        """Whether a request that comes now may enter."""
        state = self.view.state
        # While draining an engine may be lost, and proven anew for those who are still in.
        return state in SERVING or (is_probe and state in {State.PROBING, State.DRAINING})

    async def is_opened_in_time(self) -> bool:
        """Whether the gate opens while a request waits; False at once where that is not promised.

        A lost engine is worth to wait for while its next generation is expected within the
        hold time-out.
        """
        deadline = asyncio.get_running_loop().time() + self._hold_timeout_seconds
        self.held += 1
        try:
            async with asyncio.timeout_at(deadline):
                while self._is_worth_to_wait(deadline):
                    await self.view.until_moved()
        except TimeoutError:
            pass
        finally:
            self.held -= 1
        return self.is_open(is_probe=False)

    def _is_worth_to_wait(self, deadline: float) -> bool:
        left_seconds = deadline - asyncio.get_running_loop().time()
        return self.view.is_recovering and (self.view.eta_seconds or 0.0) <= left_seconds

    def is_probe_token(self, given: bytes) -> bool:
        """Whether this is the token of this start; an empty token opens nothing."""
        return bool(self._probe_token) and hmac.compare_digest(given, self._probe_token)

    def enter(self) -> None:
        """Count a request in; it must `leave`."""
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count a request out."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    def refuse(self) -> None:
        """Count a request turned away in the present state, which is not the probe's own."""
        self._refusals.count(_REFUSAL_OF.get(self.view.state, "not_ready"))

    async def until_idle(self, deadline_seconds: float) -> bool:
        """Wait until nothing is in flight; False if that is not so after `deadline_seconds`."""
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class Gate:
    """Pure ASGI: what enters reaches `app` unchanged, but for the header of the probe."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let in, hold until the engine is back, or answer 503 (close a WebSocket with 1013)."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        scope, is_probe = self._without_probe_header(scope)
        if self._admission.is_open(is_probe=is_probe):
            await self._let_in(scope, receive, send, is_probe=is_probe)
        elif is_probe:
            await _turn_away(self._admission.view, scope, receive, send)
        else:
            await self._hold(scope, PatientReceive(receive), send)

    async def _hold(self, scope: Scope, receive: PatientReceive, send: Send) -> None:
        is_opened = await receive.while_here(self._admission.is_opened_in_time())
        if is_opened:
            await self._let_in(scope, receive, send, is_probe=False)
        elif is_opened is not None:
            self._admission.refuse()
            await _turn_away(self._admission.view, scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send, *, is_probe: bool) -> None:
        tracked = tracked_request()
        tracked.is_probe = is_probe
        if is_probe:
            await self._app(scope, receive, send)
            return
        self._admission.enter()
        try:
            await self._app(scope, receive, _telling(send, tracked))
        finally:
            self._admission.leave()

    def _without_probe_header(self, scope: Scope) -> tuple[Scope, bool]:
        """The scope as the inner app may see it, and whether the request is the probe's."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        tokens = [value for name, value in headers if name == _PROBE_HEADER_BYTES]
        if not tokens:
            return scope, False
        kept = [(name, value) for name, value in headers if name != _PROBE_HEADER_BYTES]
        is_probe = any(self._admission.is_probe_token(token) for token in tokens)
        return {**scope, "headers": kept}, is_probe


def _telling(send: Send, tracked: Tracked) -> Send:
    """Say what became of the request in ways that vLLM's layer does not."""

    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = _with_advice(message, tracked)
        elif tracked.is_broken and message.get("body") == _DONE:
            # vLLM ends a stream so even after an error, which clients take for a whole answer.
            message = {**message, "body": b""}
        await send(message)

    return tell


def _with_advice(message: Message, tracked: Tracked) -> Message:
    if tracked.may_be_retried is None:
        return message
    advice = [(SHOULD_RETRY_HEADER.encode(), b"true" if tracked.may_be_retried else b"false")]
    if tracked.may_be_retried:
        advice.append((b"retry-after", str(RETRY_AFTER_UNKNOWN_SECONDS).encode()))
    return {**message, "headers": [*message.get("headers", ()), *advice]}


def retry_after_seconds(eta_seconds: float | None) -> int:
    """Whole seconds until it is worth to ask again, between 1 and 120.

    OpenAI's clients do not retry at all when they are told to wait longer than that.
    """
    if eta_seconds is None:
        return RETRY_AFTER_UNKNOWN_SECONDS
    return math.ceil(min(RETRY_AFTER_MOST_SECONDS, max(1.0, eta_seconds)))


async def _turn_away(view: GateView, scope: Scope, receive: Receive, send: Send) -> None:
    error = NotReadyError(
        f"The server is {view.state}{f': {view.reason}' if view.reason else '.'}",
        retry_after_seconds=retry_after_seconds(view.eta_seconds),
    )
    if scope["type"] == "websocket":
        await _close(receive, send, error)
        return
    response = openai_error(
        error.cause,
        kind=error.openai_type,
        status=error.http_status,
        headers={
            "retry-after": str(error.retry_after_seconds),
            SHOULD_RETRY_HEADER: "true",
            STATE_HEADER: view.state,
        },
    )
    await response(scope, receive, send)


async def _close(receive: Receive, send: Send, error: NotReadyError) -> None:
    # Accepted first: a close before that reaches the client as a bare 403, without the code.
    await receive()
    await send({"type": "websocket.accept"})
    await send(
        {
            "type": "websocket.close",
            "code": WEBSOCKET_TRY_AGAIN_LATER,
            "reason": f"retry after {error.retry_after_seconds} s",
        }
    )
