"""The errors of the admin routes, and the audit log of their calls."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.api.admin.models import ErrorReply
from holdfast.api.errors import openai_error
from holdfast.errors import RETRY_AFTER_SECONDS, HoldfastError, openai_type_of
from holdfast.request_context import current_request

logger = logging.getLogger("holdfast.admin")

UNAVAILABLE = 503
STATUSES = {
    400: "the query, the body or a name is invalid",
    401: "no key",
    403: "the key is not the admin key",
    404: "nothing has that name, or no admin key is configured",
    409: "the state, another call or the flags of the server do not allow it; nothing has changed",
    500: "the engine failed to do it",
    503: "there is no engine now",
    504: "the engine did not answer in time, and may still do it",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": meaning} for status, meaning in STATUSES.items()
}


def answer_errors(app: FastAPI) -> None:
    """Answer every error of `app` in OpenAI's form, with its remedy."""

    async def ours(request: Request, error: Exception) -> Response:
        return _refused(request, error) if isinstance(error, HoldfastError) else _broken(request)

    async def of_http(request: Request, error: Exception) -> Response:
        known = error if isinstance(error, HTTPException) else HTTPException(500)
        status = known.status_code
        return _reply(request, str(known.detail), openai_type_of(status), status, known.headers)

    async def of_body(request: Request, error: Exception) -> Response:
        problems = error.errors() if isinstance(error, RequestValidationError) else ()
        told = "; ".join(f"{_place(problem)}: {_words(problem)}" for problem in problems)
        return _reply(request, told or "The body is invalid.", "invalid_request_error", 400)

    app.add_exception_handler(HoldfastError, ours)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(RequestValidationError, of_body)
    app.add_exception_handler(Exception, ours)


class AuditLog:
    """ASGI layer: logs one line for each call of the routes of `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, and log which key was used and what became of it."""
        status = 500

        async def recording(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope = {**scope, "state": {}}
        try:
            await self._app(scope, receive, recording)
        finally:
            _log_call(scope, status)


def _log_call(scope: Scope, status: int) -> None:
    route = scope.get("route")
    named = "".join(f" {value!r}" for value in scope.get("path_params", {}).values())
    what = f"{route.name.replace('_', ' ')}{named}" if route else f"{scope['path'][:200]!r}"
    by = current_request().key or "an unnamed key"
    if status < 400:
        logger.info("admin %s by %s: %s", what, by, "accepted" if status == 202 else "done")
    else:
        refusal = scope["state"].get("refusal", "it failed")
        logger.warning("admin %s by %s: refused with %d: %s", what, by, status, refusal)


def _refused(request: Request, error: HoldfastError) -> Response:
    headers = {}
    if error.http_status == UNAVAILABLE:
        seconds = getattr(error, "retry_after_seconds", RETRY_AFTER_SECONDS)
        headers["retry-after"] = str(seconds)
    return _reply(request, error.line, error.openai_type, error.http_status, headers)


def _broken(request: Request) -> Response:
    return _reply(request, "The server failed on this call; see its log.", "server_error", 500)


def _reply(request: Request, message: str, kind: str, status: int, headers: Any = None) -> Response:
    request.state.refusal = message if message.isprintable() else repr(message)
    return openai_error(message, kind=kind, status=status, headers=headers or {})


def _place(problem: Any) -> str:
    return ".".join(str(part) for part in problem["loc"])


def _words(problem: Any) -> str:
    return str(problem["msg"]).removeprefix("Value error, ")
