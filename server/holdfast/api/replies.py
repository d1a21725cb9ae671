"""The bodies and headers that every answer of ours shares."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from starlette.responses import Response
from starlette.types import Receive, Send

from holdfast.errors import openai_error_body

STATE_HEADER = "x-holdfast-state"
SHOULD_RETRY_HEADER = "x-should-retry"

BODIES = 64
"""So many are kept: whoever is refused under load is refused in the same words."""
_kept_body = lru_cache(BODIES)(openai_error_body)


def openai_error(message: str, *, kind: str, status: int, headers: Mapping[str, str]) -> Response:
    """An error as OpenAI's clients read it."""
    body = _kept_body(message, kind=kind, status=status)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def close_websocket(receive: Receive, send: Send, *, code: int, reason: str) -> None:
    """Refuse a WebSocket with a code that its client sees; `reason` has at most 123 bytes."""
    # Accepted first: a close before that reaches the client as a bare 403, without the code.
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close", "code": code, "reason": reason})


async def unsent() -> None:
    """What is sent of a message that goes nowhere, or not yet."""
