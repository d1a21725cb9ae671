"""A server that comes between a run and its report."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from starlette.requests import Request
from starlette.responses import Response

from openai_double import OpenAIDouble


class Obstruction(OpenAIDouble):
    """Makes a directory in place of a file of the report, once it is asked for its version."""

    obstructed: Path

    def obstructing(self, path: Path) -> Self:
        """Make the directory there."""
        self.obstructed = path
        return self

    async def _version(self, request: Request) -> Response:
        self.obstructed.mkdir(exist_ok=True)
        return await super()._version(request)
