"""The bodies and headers that every answer of ours shares."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse
from starlette.types import Receive, Send

STATE_HEADER = "x-holdfast-state"
SHOULD_RETRY_HEADER = "x-should-retry"


def openai_error(
    message: str, *, kind: str, status: int, headers: Mapping[str, str]
) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


async def close_websocket(receive: Receive, send: Send, *, code: int, reason: str) -> None:
    """Refuse a WebSocket with a code that its client sees; `reason` has at most 123 bytes."""
    # Accepted first: a close before that reaches the client as a bare 403, without the code.
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.close", "code": code, "reason": reason})
