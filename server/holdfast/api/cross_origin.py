"""Which answers may web pages of other origins read? With `--allowed-origins`, also our own.

vLLM's application has the same rule, but the gate lets in only what the engine is to answer. A
preflight request is answered here in any case: it has no key, so it must neither wait at the gate
nor have its body kept.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.auth import needs_admin_key
from holdfast.api.router import route_path
from holdfast.settings import ListenSettings

READABLE_HEADERS = ("retry-after", "x-should-retry", "x-holdfast-state", "x-request-id")
"""What a page needs to know of a refusal; a browser shows it few other headers."""
_EXPOSED = b"access-control-expose-headers"


class ReadableByPages:
    """ASGI layer: answers preflight requests, and adds the headers of CORS to answers.

    It adds none if no origin is allowed. Routes for admins are left out: no page may use them.
    """

    def __init__(self, app: ASGIApp, listen: ListenSettings) -> None:
        self._app = app
        self._root_path = listen.root_path
        self._allows_pages = bool(listen.allowed_origins)
        self._policy = CORSMiddleware(
            app,
            allow_origins=listen.allowed_origins,
            allow_credentials=listen.allows_credentials,
            allow_methods=listen.allowed_methods,
            allow_headers=listen.allowed_headers,
            expose_headers=READABLE_HEADERS,
        )

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if not self._is_of_page(scope):
            return self._app(scope, receive, send)
        if _is_preflight(scope):
            return self._policy(scope, receive, send)
        if not self._allows_pages:
            return self._app(scope, receive, send)
        answer = _ReadableAnswer(self._policy, Headers(scope=scope), send)
        return self._app(scope, receive, answer.send)

    def _is_of_page(self, scope: Scope) -> bool:
        return (
            scope["type"] == "http"
            and any(name == b"origin" for name, _ in scope["headers"])
            and not needs_admin_key(route_path(scope["path"], self._root_path))
        )


class _ReadableAnswer:
    """One response, which gets the headers that vLLM's application has not given it."""

    __slots__ = ("_policy", "_request_headers", "_send")

    def __init__(self, policy: CORSMiddleware, request_headers: Headers, send: Send) -> None:
        self._policy = policy
        self._request_headers = request_headers
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] != "http.response.start":
            return self._send(message)
        if _has_passed_policy(message):
            return self._send(_with_readable_headers(message))
        return self._policy.send(message, self._send, self._request_headers)


def _is_preflight(scope: Scope) -> bool:
    """Return whether a request with an origin is one that CORSMiddleware answers itself."""
    return scope["method"] == "OPTIONS" and any(
        name == b"access-control-request-method" for name, _ in scope["headers"]
    )


def _has_passed_policy(message: Message) -> bool:
    headers = [(name.lower(), value.lower()) for name, value in message.get("headers", ())]
    return any(
        name == b"access-control-allow-origin" or (name == b"vary" and b"origin" in value)
        for name, value in headers
    )


def _with_readable_headers(message: Message) -> Message:
    """Return an answer of vLLM's, whose policy names no header that a page may read."""
    headers = message["headers"]
    names = {name.lower() for name, _ in headers}
    if b"access-control-allow-origin" not in names or _EXPOSED in names:
        return message
    return {**message, "headers": [*headers, (_EXPOSED, ", ".join(READABLE_HEADERS).encode())]}
