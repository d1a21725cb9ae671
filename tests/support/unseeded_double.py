"""An `openai_double` that refuses seeds, as some gateways do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from starlette.exceptions import HTTPException
from starlette.requests import Request

from openai_double import Body, OpenAIDouble


class Unseeded(OpenAIDouble):
    """Refuses a seed with 400, until a test has it refuse something else."""

    _status = 400
    _field = "seed"
    _refusing_paths: Sequence[str] = ("/v1/chat/completions", "/v1/completions")

    def with_status(self, status: int) -> Self:
        """Refuse with another status."""
        self._status = status
        return self

    def for_field(self, field: str) -> Self:
        """Refuse another field."""
        self._field = field
        return self

    def only_at(self, path: str) -> Self:
        """Refuse at this path alone."""
        self._refusing_paths = (path,)
        return self

    async def _body(self, request: Request) -> Body:
        body = await super()._body(request)
        if body.get(self._field) and request.url.path in self._refusing_paths:
            raise HTTPException(self._status, f"{self._field} is not supported")
        return body
