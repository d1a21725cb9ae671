"""Every error in the form of OpenAI's API: bodies, headers and the mapping of foreign errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Send

from holdfast.errors import openai_error_body, openai_type_of

STATE_HEADER = "x-holdfast-state"
SHOULD_RETRY_HEADER = "x-should-retry"

CACHED_BODIES = 64
"""The number of cached bodies: under load, many requests are refused with the same words."""
_cached_body = lru_cache(CACHED_BODIES)(openai_error_body)


def openai_error(message: str, *, kind: str, status: int, headers: Mapping[str, str]) -> Response:
    """Return an error response in OpenAI's form."""
    body = _cached_body(message, kind=kind, status=status)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def close_websocket(receive: Receive, send: Send, *, code: int, reason: str) -> None:
    """Refuse a WebSocket with a code that its client sees; `reason` has at most 123 bytes."""
    # It is accepted first: a close before that reaches the client as a bare 403, without the code.
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close", "code": code, "reason": reason})


async def send_nothing() -> None:
    """Send nothing, in place of a message that is dropped or held back."""


UNSUPPORTED_MEDIA_TYPE = "Unsupported Media Type"
"""vLLM's message begins with this, at status 400, if a body is not JSON."""


def in_openai_form(status: int, body: bytes) -> tuple[int, bytes]:
    """Return status and body of an error in OpenAI's form, unchanged if it has that form."""
    content = _parsed(body)
    error = content.get("error") if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str):
        return status, _encoded(status, _message(status, content, body))
    if status == HTTPStatus.BAD_REQUEST and UNSUPPORTED_MEDIA_TYPE in message:
        status = HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        return int(status), _encoded(status, "The body must be JSON: send 'application/json'.")
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
