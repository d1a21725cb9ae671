"""An `openai_double` that limits requests, as a server does for a key, or has no time for them."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from openai_double import OpenAIDouble

EVERY = 1 << 30
SLOW_SECONDS = 3.0


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


class SlowDouble(OpenAIDouble):
    """The application; the first chat that asks for more than a token waits for its turn."""

    _has_begun = False

    async def _chat(self, request: Request) -> Response:
        if not self._has_begun and (await request.json()).get("max_tokens", 1) > 1:
            self._has_begun = True
            await asyncio.sleep(SLOW_SECONDS)
        return await super()._chat(request)
