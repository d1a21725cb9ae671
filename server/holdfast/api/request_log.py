"""Who asked what, and what became of it? One line for each request, and the name it goes by.

The line never holds a prompt, an answer, a query or a key. vLLM's `--enable-log-requests` is for
whoever wants to read prompts.
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
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.errors import openai_error
from holdfast.request_context import REQUEST, RequestContext

logger = logging.getLogger("holdfast.requests")

REQUEST_ID_HEADER = "x-request-id"
CLIENT_LEFT = 499
"""The status in the log of a request whose client left before the answer began, as nginx has it."""

_HEADER = REQUEST_ID_HEADER.encode()
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
"""No space, so that nobody can write into our line what looks like a field of it."""
_OWN_ID_BYTES = 16
_EXPECTED = frozenset({HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE})
"""What health checks and scrapes are answered, again and again."""
_ROUTE_CHARACTERS = 128
_QUOTED_PATHS = 256
"""So many are kept, of which nearly all requests are for one or two."""
_SHOWN_SECONDS = 0.001
"""Shorter times are left out of the line for people."""
_ERROR_BODY_BYTES = 4096
_ERROR_TYPE = re.compile(r"[A-Za-z_]{1,64}")


class RequestLog:
    """Pure ASGI, outermost: makes the record of each request, names it and writes its line.

    The client's `X-Request-Id` is taken if it is 1 to 128 visible ASCII characters, else the
    request gets a new one. Every answer carries it. `counted` is told of each HTTP request that is
    over, but for the probe's: its scope, its status, and as keywords its time and its bytes.
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
        """Of these only what nobody expects is written."""
        self._silent_paths = frozenset(silent_paths)
        """Of these nothing is."""
        self._is_on = is_on
        self._inner_ids: set[bytes] = set()
        """What vLLM calls the requests on their way that have the header. No two may share a name.

        vLLM 0.32 aborts by it in some routes, and finds by it what the engine keeps of a query.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as what is within does; if that fails before it began, with a 500."""
        if scope["type"] not in {"http", "websocket"}:
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == _HEADER]
        request_id, inner_id = self._identify(given)
        context = RequestContext(request_id=request_id)
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
        """What the request is called, and what vLLM is to call it; empty if vLLM may choose.

        A request without the header may have a `request_id` in its body, which vLLM takes then.
        """
        if not given or not _REQUEST_ID.fullmatch(given[0]):
            own = secrets.token_hex(_OWN_ID_BYTES)
            return own, own.encode() if given else b""
        is_taken = given[0] in self._inner_ids
        inner = given[0] + b"-" + secrets.token_hex(4).encode() if is_taken else given[0]
        return given[0].decode("ascii"), inner

    def _write(self, scope: Scope, exchange: _LoggedExchange) -> None:
        context = exchange.context
        is_expected = context.route in self._quiet_paths and exchange.status in _EXPECTED
        if context.is_probe or is_expected or scope["path"] in self._silent_paths:
            return
        facts = _facts(scope, exchange)
        logger.info("%s", _sentence(facts), extra={"fields": facts})


class _LoggedExchange:
    """What passes between the server and the application for one request, and when."""

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
        """What was answered, or would have been by a server that went on."""
        return int(self.status or HTTPStatus.INTERNAL_SERVER_ERROR)

    async def receive(self) -> Message:
        """The server's next message."""
        message = await self._receive()
        if message["type"] == "http.request":
            self.received_bytes += len(message.get("body", b""))
        elif message["type"] == "http.disconnect":
            self.has_client_left = not self.is_complete
            if self.has_client_left:  # whatever the application still says goes nowhere
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
            # Closed before it was accepted, it is a plain 403 to the client.
            self.status = self.status or HTTPStatus.FORBIDDEN
            self.close_code = message.get("code", 1000)
        return self._send(message)

    def _note_first(self, body: bytes) -> None:
        self.first_byte_seconds = time.monotonic() - self.arrived_seconds
        if self.status >= HTTPStatus.BAD_REQUEST and not self.context.error:
            self.context.error = _error_type(body)

    def _named(self, message: Message) -> Message:
        """With our name of the request in place of any other."""
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
    """The type of an OpenAI error, which holds nothing of the request; else empty."""
    if len(body) > _ERROR_BODY_BYTES:
        return ""
    try:
        kind = json.loads(body)["error"]["type"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return kind if isinstance(kind, str) and _ERROR_TYPE.fullmatch(kind) else ""


def _facts(scope: Scope, exchange: _LoggedExchange) -> dict[str, Any]:
    """The fields of the line, in their order; what is not known is null."""
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
    """The route with its parameters left open, or the path, where nothing can be forged by it."""
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
    """How long it waited before vLLM's application, and in it for an engine; None if not there."""
    entered_seconds = exchange.context.entered_seconds
    if entered_seconds is None:
        return None
    received_seconds = exchange.context.received_seconds or exchange.arrived_seconds
    return entered_seconds - received_seconds + exchange.context.waited_seconds


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _sentence(facts: dict[str, Any]) -> str:
    """The line for people: what is not said is as usual."""
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
    words.extend(name for name in ("is_broken", "has_client_left") if facts[name])
    return " ".join([*words, f"id={facts['request_id']}"])
