"""An `openai_double` that limits requests, as a server does for a key, or has no time for them."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from openai_double import OpenAIDouble

EVERY = 1 << 30
SLOW_SECONDS = 3.0


class LimitedDouble(OpenAIDouble):
    """The application; `refused` is how many of the next chats get 429, or another status."""

    def __init__(
        self, retry_after: str = "0", known: dict[str, str] | None = None, status: int = 429
    ) -> None:
        super().__init__(known=known or {})
        self.retry_after = retry_after
        self.status = status
        self.refused = 0

    async def _chat(self, request: Request) -> Response:
        if not self.refused:
            return await super()._chat(request)
        self.refused -= 1
        return JSONResponse({}, self.status, {"Retry-After": self.retry_after})


class AlternatingDouble(OpenAIDouble):
    """The application; of the requests to each path in `limited`, every other one gets 429."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.limited: tuple[str, ...] = ()
        self._let_in: set[str] = set()
        """The paths whose next request is answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse for now."""
        path = scope["path"] if scope["type"] == "http" else ""
        if path not in self.limited or path in self._let_in:
            self._let_in.discard(path)
            await super().__call__(scope, receive, send)
            return
        self._let_in.add(path)
        await JSONResponse({}, 429, {"Retry-After": "0"})(scope, receive, send)


class SlowDouble(OpenAIDouble):
    """The application; the first chat that asks for more than a token waits for its turn."""

    _has_begun = False

    async def _chat(self, request: Request) -> Response:
        if not self._has_begun and (await request.json()).get("max_tokens", 1) > 1:
            self._has_begun = True
            await asyncio.sleep(SLOW_SECONDS)
        return await super()._chat(request)
