"""An `openai_double` whose engine dies when a file appears, and begins again without a loss.

The file is what `touch FILE` makes as the command that kills the engine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from double_defects import Defect
from holdfast.verify.checks.survive.death import ANSWER_TOKENS, CLIENTS
from openai_double import OpenAIDouble

_CALM_ANSWERS = 2 * CLIENTS
_DEADLINE_SECONDS = 60


class MortalDouble(OpenAIDouble):
    """Long answers come at once at first; later ones wait for the engine's death."""

    def __init__(self, file: Path, defect: Defect | Literal[""] = "") -> None:
        super().__init__(defect)
        self._file = file
        self._long_answers = 0

    async def _completion(self, request: Request) -> Response:
        body = await self._body(request)
        self._notice_death()
        if body.get("max_tokens") == ANSWER_TOKENS:
            self._long_answers += 1
            if self._long_answers > _CALM_ANSWERS:
                await self._die(request)
                if self.defect == "answers lost with the engine":
                    raise HTTPException(500, "EngineDeadError")
                if self.defect == "answers that change with the engine":
                    return self._answer(body, f"{body['prompt']}!", is_chat=False)
        return await super()._completion(request)

    async def _die(self, request: Request) -> None:
        """Wait for the file while the client does, with as many others as ask."""
        self._running += 1
        async with asyncio.timeout(_DEADLINE_SECONDS):
            # A file has no event, and nor has a client.
            while not (self._file.exists() or await request.is_disconnected()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self._running -= 1
        self._notice_death()

    def _notice_death(self) -> None:
        """The next engine answers once there is the file."""
        if self._file.exists():
            self.generation, self.deaths = 2, 1
