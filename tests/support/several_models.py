"""An `openai_double` that lists several models, as a gateway or llama-swap does."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from openai_double import OpenAIDouble


class Several(OpenAIDouble):
    """Lists another model before its own, which alone it answers as."""

    def __init__(self, other: str = "another") -> None:
        super().__init__()
        self.other = other
        self.asked: list[str] = []
        """The paths of its requests for answers."""

    async def _models(self, request: Request) -> Response:
        told = json.loads(bytes((await super()._models(request)).body))
        (own,) = told["data"]
        return JSONResponse({**told, "data": [{**own, "id": self.other}, own]})

    async def _chat(self, request: Request) -> Response:
        self.asked.append(request.url.path)
        return await super()._chat(request)
