"""Every error in the form of OpenAI's API: our own, and those of vLLM's application."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from holdfast.errors import (
    RETRY_AFTER_SECONDS,
    HoldfastError,
    NotReadyError,
    OverloadedError,
    openai_error_body,
    openai_type_of,
    our_type_of,
)
from holdfast.labels import RefusalReason
from holdfast.request_context import RequestContext

STATE_HEADER = "x-holdfast-state"
SHOULD_RETRY_HEADER = "x-should-retry"
CACHED_BODIES = 64
"""The number of cached bodies: under load, many requests are refused with the same words."""
UNSUPPORTED_MEDIA_TYPE = (
    "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
)
"""vLLM's message, at status 400, if a body is not JSON. Others may quote it from a body."""
SHAPED_BYTES = 64 * 1024
"""An error with a larger body is passed on unchanged."""

_WEBSOCKET_TRY_AGAIN_LATER = 1013
_DONE = b"data: [DONE]\n\n"
_REWRITTEN = frozenset({b"content-length", b"content-type"})
_PASSING = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
_cached_body = lru_cache(CACHED_BODIES)(openai_error_body)


def openai_error(message: str, *, kind: str, status: int, headers: Mapping[str, str]) -> Response:
    """Return an error response in OpenAI's form."""
    body = _cached_body(message, kind=kind, status=status)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def error_event(error: HoldfastError) -> bytes:
    """Return the last event of a stream, as OpenAI's and Anthropic's clients raise it.

    Anthropic's skips an event without a name. An event of `/v1/responses` has its members at the
    top, see `patches.broken_responses`.
    """
    body = openai_error_body(error.cause, kind=error.openai_type, status=error.http_status)
    top = {"code": error.openai_type, "message": error.cause, "param": None}
    event = json.dumps({**json.loads(body), **top})
    return f"event: error\ndata: {event}\n\n".encode()


async def close_websocket(receive: Receive, send: Send, *, code: int, reason: str) -> None:
    """Refuse a WebSocket with a code that its client sees; `reason` has at most 123 bytes."""
    # It is accepted first: a close before that reaches the client as a bare 403, without the code.
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close", "code": code, "reason": reason})


async def refuse_for_now(
    error: NotReadyError | OverloadedError,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Send the error with `retry-after` and more headers; close a WebSocket with 1013 instead."""
    if scope["type"] == "websocket":
        reason = f"retry after {error.retry_after_seconds} s"
        await close_websocket(receive, send, code=_WEBSOCKET_TRY_AGAIN_LATER, reason=reason)
        return
    advice = {
        "retry-after": str(error.retry_after_seconds),
        SHOULD_RETRY_HEADER: str(error.may_be_retried).lower(),
    }
    response = openai_error(
        error.cause,
        kind=error.openai_type,
        status=error.http_status,
        headers={**advice, **headers},
    )
    await response(scope, receive, send)


async def send_nothing() -> None:
    """Send nothing, in place of a message that is dropped or held back."""


def in_openai_form(status: int, body: bytes) -> tuple[int, bytes]:
    """Return status and body of an error in OpenAI's form, unchanged if it has that form.

    Its type may be the phrase of the status, which becomes the type that we give such errors.
    """
    content = _parsed(body)
    error = content.get("error") if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(error, dict) or not isinstance(message, str):
        return status, _encoded(status, _message(status, content, body))
    if status == HTTPStatus.BAD_REQUEST and message == UNSUPPORTED_MEDIA_TYPE:
        status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        return int(status), _encoded(status, "The body must be JSON: send 'application/json'.")
    said = error["type"] if isinstance(error.get("type"), str) else ""
    if (kind := our_type_of(said, status)) != said:
        return status, openai_error_body(message, kind=kind, status=status)
    return status, body


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _message(status: int, content: Any, body: bytes) -> str:
    if isinstance(content, dict):
        said = content.get("detail") or content.get("message") or content.get("error")
        if said:
            return said if isinstance(said, str) else json.dumps(said)
    text = body.decode(errors="replace").strip()
    return text if text and content is None else _phrase(status)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _encoded(status: int, message: str) -> bytes:
    return openai_error_body(message, kind=openai_type_of(status), status=status)


class EngineAnswer:
    """One response: gives errors OpenAI's form, and tells the client what became of the request.

    It says whether the request may be retried, and when, and does not end a broken stream as a
    complete one.
    """

    __slots__ = ("_context", "_count_refusal", "_held", "_held_body", "_send")

    def __init__(
        self, send: Send, context: RequestContext, count_refusal: Callable[[RefusalReason], None]
    ) -> None:
        self._send = send
        self._context = context
        self._count_refusal = count_refusal
        self._held: Message | None = None
        self._held_body = b""

    def send(self, message: Message) -> Awaitable[None]:
        """Pass a message on; an error waits until its body is complete."""
        if self._held is not None:
            return self._hold(self._held, message)
        if message["type"] == "http.response.start":
            if message["status"] >= 400:
                self._held = message
                return send_nothing()
            message = _with_advice(message, self._context)
        elif self._context.is_broken and message.get("body") == _DONE:
            # vLLM ends a stream like this even after an error: clients would take it for complete.
            message = {**message, "body": b""}
        return self._send(message)

    async def _hold(self, start: Message, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        self._held_body += message.get("body", b"")
        has_more = message.get("more_body", False)
        if has_more and len(self._held_body) <= SHAPED_BYTES:
            return
        body = self._held_body
        self._held, self._held_body = None, b""
        if not has_more and len(body) <= SHAPED_BYTES:
            start, body = self._shape(start, body)
        await self._send(_with_advice(start, self._context))
        await self._send({"type": "http.response.body", "body": body, "more_body": has_more})

    def _shape(self, start: Message, body: bytes) -> tuple[Message, bytes]:
        status, content = in_openai_form(start["status"], body)
        if content is body:
            return start, body
        if status == 415:
            self._count_refusal("unsupported_media_type")
        headers = [pair for pair in start.get("headers", ()) if pair[0].lower() not in _REWRITTEN]
        headers.append((b"content-type", b"application/json"))
        headers.append((b"content-length", b"%d" % len(content)))
        return {**start, "status": status, "headers": headers}, content


def _with_advice(message: Message, context: RequestContext) -> Message:
    may_be_retried, seconds = context.may_be_retried, context.retry_after_seconds
    if may_be_retried is None and message["status"] in _PASSING:
        # vLLM's full queue, or too many large images at a time: nobody has advised anything.
        may_be_retried = True
    if may_be_retried is None:
        return message
    advice = [(SHOULD_RETRY_HEADER.encode(), b"true" if may_be_retried else b"false")]
    if may_be_retried and seconds is None:
        seconds = RETRY_AFTER_SECONDS
    if seconds is not None:
        advice.append((b"retry-after", str(seconds).encode()))
    return {**message, "headers": [*message.get("headers", ()), *advice]}
