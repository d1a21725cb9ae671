"""The responses of vLLM's application, in the form that our clients get."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import Message, Send

from holdfast.api.errors import SHOULD_RETRY_HEADER, in_openai_form, send_nothing
from holdfast.errors import RETRY_AFTER_SECONDS
from holdfast.records import RefusalReason
from holdfast.request_context import RequestContext

SHAPED_BYTES = 64 * 1024
"""An error with a larger body is passed on unchanged."""

_DONE = b"data: [DONE]\n\n"
_REWRITTEN = frozenset({b"content-length", b"content-type"})


class EngineAnswer:
    """One response: gives errors OpenAI's form, and tells the client what became of the request.

    It says whether the request may be retried, and does not end a broken stream as a complete one.
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
    if context.may_be_retried is None:
        return message
    advice = [(SHOULD_RETRY_HEADER.encode(), b"true" if context.may_be_retried else b"false")]
    if context.may_be_retried:
        advice.append((b"retry-after", str(RETRY_AFTER_SECONDS).encode()))
    return {**message, "headers": [*message.get("headers", ()), *advice]}
