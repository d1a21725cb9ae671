"""What was requested, and what became of it? One line for each request, and its id.

The line never contains a prompt, an answer, a query or a key. vLLM's `--enable-log-requests` logs
prompts.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from functools import lru_cache
from http import HTTPStatus
from itertools import count
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.errors import openai_error
from holdfast.request_context import REQUEST, REQUEST_ID_HEADER, RequestContext, request_id_from

logger = logging.getLogger("holdfast.requests")

CLIENT_LEFT = 499
"""The logged status if the client left before the response began, as in nginx."""

_HEADER = REQUEST_ID_HEADER.encode()
_EXPECTED = frozenset({HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE})
"""The statuses that health checks and scrapes get all the time."""
_ROUTE_CHARACTERS = 128
_QUOTED_PATHS = 256
"""The number of cached paths; nearly all requests are for one or two of them."""
_SHOWN_SECONDS = 0.001
"""The console line omits shorter times."""
_ERROR_BODY_BYTES = 4096
_ERROR_TYPE = re.compile(r"[A-Za-z_]{1,64}")


class RequestLog:
    """The outermost ASGI layer: makes the context of each request, sets its id and logs its line.

    The client's `X-Request-Id` is used if it is 1 to 128 visible ASCII characters; otherwise the
    request gets a new one. Every response carries it. `on_finished` is called for each finished
    HTTP request except the probe's, with its scope, its status, its duration and its bytes.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        quiet_paths: Collection[str] = (),
        silent_paths: Collection[str] = (),
        is_on: bool = True,
        on_finished: Callable[..., None] | None = None,
    ) -> None:
        self._app = app
        self._on_finished = on_finished
        self._quiet_paths = frozenset(quiet_paths)
        """Requests to these paths are logged only if their status is unexpected."""
        self._silent_paths = frozenset(silent_paths)
        """Requests to these paths are never logged."""
        self._is_on = is_on
        self._numbers = count(1)
        self._inner_ids: set[bytes] = set()
        """vLLM's ids of the requests in progress that have the header. They must be unique.

        vLLM 0.32 uses the id to abort in some routes, and to find the engine's state of a query.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; answer 500 if that fails before a response has begun."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == _HEADER]
        request_id, inner_id = self._identify(given)
        context = RequestContext(request_id=request_id, number=next(self._numbers))
        exchange = _LoggedExchange(context, receive, send)
        token = REQUEST.set(context)
        if inner_id:
            self._inner_ids.add(inner_id)
        try:
            if given and given != [inner_id]:
                scope = _renamed(scope, inner_id)
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            if scope["type"] == "http" and not exchange.status:
                await _failed()(scope, exchange.receive, exchange.send)
            context.is_broken = context.is_broken or not exchange.is_complete
            raise
        finally:
            self._inner_ids.discard(inner_id)
            REQUEST.reset(token)
            if self._on_finished and scope["type"] == "http" and not context.is_probe:
                self._on_finished(
                    scope,
                    exchange.final_status,
                    duration_seconds=time.monotonic() - exchange.arrived_seconds,
                    received_bytes=exchange.received_bytes,
                    sent_bytes=exchange.body_bytes,
                )
            if self._is_on and logger.isEnabledFor(logging.INFO):
                self._write(scope, exchange)

    def _identify(self, given: list[bytes]) -> tuple[str, bytes]:
        """Return the id of the request, and the id for vLLM, which is empty if vLLM may choose.

        A request without the header may have a `request_id` in its body, which vLLM then uses.
        """
        request_id = request_id_from(given)
        inner = request_id.encode() if given else b""
        if inner in self._inner_ids:
            inner += b"-" + secrets.token_hex(4).encode()
        return request_id, inner

    def _write(self, scope: Scope, exchange: _LoggedExchange) -> None:
        context = exchange.context
        is_expected = context.route in self._quiet_paths and exchange.status in _EXPECTED
        if context.is_probe or is_expected or scope["path"] in self._silent_paths:
            return
        facts = _facts(scope, exchange)
        logger.info("%s", _sentence(facts), extra={"fields": facts})


class _LoggedExchange:
    """The messages between the server and the application for one request, and their times."""

    __slots__ = (
        "_receive",
        "_send",
        "arrived_seconds",
        "body_bytes",
        "close_code",
        "context",
        "first_byte_seconds",
        "has_client_left",
        "is_complete",
        "is_stream",
        "received_bytes",
        "status",
    )

    def __init__(self, context: RequestContext, receive: Receive, send: Send) -> None:
        self.context = context
        self.arrived_seconds = time.monotonic()
        self.first_byte_seconds: float | None = None
        self.status = 0
        self.body_bytes = 0
        self.received_bytes = 0
        self.is_stream = False
        self.is_complete = False
        self.has_client_left = False
        self.close_code: int | None = None
        self._receive = receive
        self._send = send

    @property
    def final_status(self) -> int:
        """The status that was sent, or 500 if none was."""
        return int(self.status or HTTPStatus.INTERNAL_SERVER_ERROR)

    async def receive(self) -> Message:
        """Return the server's next message."""
        message = await self._receive()
        if message["type"] == "http.request":
            self.received_bytes += len(message.get("body", b""))
        elif message["type"] == "http.disconnect":
            self.has_client_left = not self.is_complete
            if self.has_client_left:  # what the application still sends is lost
                self.status = self.status or CLIENT_LEFT
        elif message["type"] == "websocket.disconnect":
            self.close_code = self.close_code or message.get("code")
        return message

    def send(self, message: Message) -> Awaitable[None]:
        """Pass a message on to the server."""
        kind = message["type"]
        if kind == "http.response.body":
            body = message.get("body", b"")
            if body and self.first_byte_seconds is None:
                self._note_first(body)
            self.body_bytes += len(body)
            if not message.get("more_body", False):
                self.is_complete = True
        elif kind in {"http.response.start", "websocket.http.response.start"}:
            self.status = self.status or message["status"]
            message = self._named(message)
            self.is_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream")
                for name, value in message["headers"]
            )
        elif kind == "websocket.accept":
            self.status = HTTPStatus.SWITCHING_PROTOCOLS
            message = self._named(message)
        elif kind == "websocket.close":
            # A WebSocket that is closed before it was accepted is a plain 403 to the client.
            self.status = self.status or HTTPStatus.FORBIDDEN
            self.close_code = message.get("code", 1000)
        return self._send(message)

    def _note_first(self, body: bytes) -> None:
        self.first_byte_seconds = time.monotonic() - self.arrived_seconds
        if self.status >= HTTPStatus.BAD_REQUEST and not self.context.error:
            self.context.error = _error_type(body)

    def _named(self, message: Message) -> Message:
        """Return the message with our id of the request in place of any other."""
        headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != _HEADER]
        headers.append((_HEADER, self.context.request_id.encode("ascii")))
        return {**message, "headers": headers}


def _renamed(scope: Scope, inner_id: bytes) -> Scope:
    kept = [pair for pair in scope["headers"] if pair[0] != _HEADER]
    return {**scope, "headers": [*kept, (_HEADER, inner_id)]}


def _failed() -> Any:
    return openai_error(
        "The server failed on this request; its log says why.",
        kind="server_error",
        status=HTTPStatus.INTERNAL_SERVER_ERROR,
        headers={},
    )


def _error_type(body: bytes) -> str:
    """Return the type of an OpenAI error, which contains nothing of the request; else empty."""
    if len(body) > _ERROR_BODY_BYTES:
        return ""
    try:
        kind = json.loads(body)["error"]["type"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return kind if isinstance(kind, str) and _ERROR_TYPE.fullmatch(kind) else ""


def _facts(scope: Scope, exchange: _LoggedExchange) -> dict[str, Any]:
    """Return the fields of the line, in their order; unknown values are null."""
    context = exchange.context
    return {
        "request_id": context.request_id,
        "method": "WEBSOCKET" if scope["type"] == "websocket" else scope["method"],
        "route": _route(scope, context),
        "status": exchange.final_status,
        "duration_seconds": _rounded(time.monotonic() - exchange.arrived_seconds),
        "first_byte_seconds": _rounded(exchange.first_byte_seconds),
        "wait_seconds": _rounded(_waited_seconds(exchange)),
        "prompt_tokens": context.prompt_tokens,
        "output_tokens": context.output_tokens,
        "generation": context.generation or None,
        "replays": context.replays,
        "continued_at_tokens": list(context.continued_at_tokens) or None,
        "is_stream": exchange.is_stream,
        "body_bytes": exchange.body_bytes,
        "has_client_left": exchange.has_client_left,
        "is_broken": context.is_broken,
        "error": context.error or None,
        "close_code": exchange.close_code,
        "key": context.key or None,
        "client": scope["client"][0] if scope.get("client") else None,
        "engine_request_id": context.engine_request_id or None,
    }


def _route(scope: Scope, context: RequestContext) -> str:
    """Return the template of the route, or the quoted path, which cannot forge a field."""
    engine_route = (context.engine_scope or {}).get("route")
    template: str = context.route or getattr(engine_route, "path", "")
    if "{" in template:
        return template
    path: str = scope["path"]
    shown = _quoted(path[:_ROUTE_CHARACTERS])
    return shown if len(path) <= _ROUTE_CHARACTERS else f"{shown}..."


@lru_cache(_QUOTED_PATHS)
def _quoted(path: str) -> str:
    return quote(path, safe="/:@!$&'()*+,;=~", errors="replace")


def _waited_seconds(exchange: _LoggedExchange) -> float | None:
    """Return how long it waited for vLLM's application and the engine; None if it never entered."""
    entered_seconds = exchange.context.entered_seconds
    if entered_seconds is None:
        return None
    received_seconds = exchange.context.received_seconds or exchange.arrived_seconds
    return entered_seconds - received_seconds + exchange.context.waited_seconds


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _sentence(facts: dict[str, Any]) -> str:
    """Return the console line, which omits everything that is as usual."""
    words = [
        f"{facts['method']} {facts['route']} {facts['status']} in {facts['duration_seconds']:.3f}s"
    ]
    for name in ("first_byte", "wait"):
        seconds = facts[f"{name}_seconds"]
        if seconds is not None and seconds >= _SHOWN_SECONDS:
            words.append(f"{name}={seconds:.3f}s")
    if facts["prompt_tokens"]:
        words.append(f"tokens={facts['prompt_tokens']}+{facts['output_tokens']}")
    shown = ("generation", "replays", "error", "close_code", "key")
    words.extend(f"{name}={facts[name]}" for name in shown if facts[name])
    if facts["continued_at_tokens"]:
        words.append(f"continued_at_tokens={','.join(map(str, facts['continued_at_tokens']))}")
    words.extend(name for name in ("is_broken", "has_client_left") if facts[name])
    return " ".join([*words, f"id={facts['request_id']}"])
