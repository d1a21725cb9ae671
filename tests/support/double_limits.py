"""An `openai_double` that limits requests, as a server does for a key or under load."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from openai_double import OpenAIDouble

EVERY = 1 << 30


class LimitedDouble(OpenAIDouble):
    """The application; `refused` is how many of the next chats get 429."""

    def __init__(self, retry_after: str = "0", known: dict[str, str] | None = None) -> None:
        super().__init__(known=known or {})
        self.retry_after = retry_after
        self.refused = 0

    async def _chat(self, request: Request) -> Response:
        if not self.refused:
            return await super()._chat(request)
        self.refused -= 1
        return JSONResponse({}, 429, {"Retry-After": self.retry_after})
