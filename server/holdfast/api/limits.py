"""What may a whole request ask? Depth of its JSON and time.

What can be refused before a request is whole, `holdfast.connections` refuses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.json_depth import JsonDepth
from holdfast.api.replies import SHOULD_RETRY_HEADER, openai_error, unsent
from holdfast.engine.tracked import REQUEST
from holdfast.errors import RefusedError
from holdfast.settings import LimitSettings
from holdfast.telemetry.refusals import Refusals

PACE_BYTES = 256 * 1024
"""One read of a large body, after which others have their turn."""
PACE_SECONDS = 0.001
"""The pause between two such reads; what comes over a network is slower anyway."""

_GONE: Message = {"type": "http.disconnect"}


class Limits:
    """Pure ASGI, before the gate. A WebSocket passes as it is."""

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
        self._timeout_seconds = settings.request_timeout_seconds
        self._refusals = refusals
        self._is_probe = is_probe

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer as `app` does, or refuse.

        A plain function: each coroutine on the way is gone through anew for each chunk.
        """
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        depth = JsonDepth(self._max_json_depth) if _may_be_json(scope) else None
        exchange = _Exchange(scope, receive, send, depth, self._refusals)
        # The probe has one deadline over everything, and what it proves is no user's time.
        if self._timeout_seconds and not self._is_probe(scope):
            return self._run_in_time(exchange)
        return self._app(scope, exchange.receive, exchange.send)

    async def _run_in_time(self, exchange: _Exchange) -> None:
        try:
            async with asyncio.timeout(self._timeout_seconds) as deadline:
                exchange.deadline = deadline
                await self._app(exchange.scope, exchange.receive, exchange.send)
        except TimeoutError:
            if not deadline.expired():
                raise
        # vLLM answers a cancelled request, as if its client had left, instead of being cancelled.
        if deadline.expired():
            await exchange.time_out(self._timeout_seconds)


class _Exchange:
    """One request and its answer, which may end before the application is done with them."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        depth: JsonDepth | None,
        refusals: Refusals,
    ) -> None:
        self.scope = scope
        self.deadline: asyncio.Timeout | None = None
        self._receive = receive
        self._send = send
        self._depth = depth
        self._refusals = refusals
        self._is_over = False
        self._has_started = False
        self._is_stream = False
        self._is_passed_on = False
        """Whether nothing that is still to come can be cut off here."""
        self._unpaced_bytes = 0

    async def receive(self) -> Message:
        """The next message; of a refused request that its client is gone."""
        if self._is_over:
            return _GONE
        await self._pace()
        message = await self._receive()
        self._unpaced_bytes += len(message.get("body", b""))
        if self._depth is not None and (body := message.get("body")):
            error = self._fault(self._depth, body)
            if error is not None:
                await self._refuse(error)
                return _GONE
            if not message.get("more_body", False):
                self._depth = None  # which holds what it has not looked at closely
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Pass an answer on, until it is over. A plain function: it is called for each chunk."""
        if self._is_passed_on:
            return self._send(message)
        deadline = self.deadline
        if self._is_over or (deadline is not None and deadline.expired()):
            return unsent()
        return self._pass(message)

    async def _pace(self) -> None:
        """Keep a body that floods in from taking the time of all other requests."""
        if self._unpaced_bytes >= PACE_BYTES:
            self._unpaced_bytes = 0
            await asyncio.sleep(PACE_SECONDS)

    async def time_out(self, seconds: float) -> None:
        """Tell the client that its time is over, as far as it can still be told."""
        error = RefusedError(
            f"The request took longer than {seconds:g} s (--request-timeout).",
            reason="timed_out",
            http_status=504,
            openai_type="timeout_error",
        )
        if not self._has_started:
            await self._refuse(error)
            return
        self._refusals.count(error.reason)
        self._is_over = True
        if (tracked := REQUEST.get()) is not None:
            tracked.is_broken = True
        if self._is_stream:
            # What is no stream of events ends without its last chunk, which says the same.
            event = f"data: {json.dumps(_error_object(error))}\n\n".encode()
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    def _pass(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self._has_started = True
            self._is_passed_on = self.deadline is None
            self._is_stream = any(
                name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message.get("headers", ())
            )
        elif self.deadline is not None and not message.get("more_body", False):
            # What the application still does in the background is no part of the answer.
            self.deadline.reschedule(None)
        return self._send(message)

    def _fault(self, depth: JsonDepth, body: bytes) -> RefusedError | None:
        if depth.is_too_deep_with(body):
            return RefusedError(
                "The JSON of the body is nested too deeply (--max-json-depth).",
                reason="json_too_deep",
                http_status=400,
            )
        if not depth.is_utf8:
            return RefusedError(
                "The JSON of the body is not UTF-8.", reason="malformed", http_status=400
            )
        return None

    async def _refuse(self, error: RefusedError) -> None:
        self._refusals.count(error.reason)
        self._is_over, self._is_passed_on = True, False
        if not self._has_started:
            response = openai_error(
                error.cause,
                kind=error.openai_type,
                status=error.http_status,
                headers={SHOULD_RETRY_HEADER: "false"},
            )
            await response(self.scope, self._receive, self._send)


def _may_be_json(scope: Scope) -> bool:
    """Whether a parser may take the body for JSON: it says so, or says nothing."""
    for name, value in scope["headers"]:
        if name == b"content-type":
            return b"json" in value.lower()
    return True


def _error_object(error: RefusedError) -> dict[str, dict[str, str | int | None]]:
    content = {
        "message": error.cause,
        "type": error.openai_type,
        "param": None,
        "code": error.http_status,
    }
    return {"error": content}
