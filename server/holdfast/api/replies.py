"""The bodies and headers that every answer of ours shares."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import JSONResponse

STATE_HEADER = "x-holdfast-state"
SHOULD_RETRY_HEADER = "x-should-retry"


def openai_error(
    message: str, *, kind: str, status: int, headers: Mapping[str, str]
) -> JSONResponse:
    """An error as OpenAI's clients read it."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status, headers=headers)
