"""An `openai_double` that also scores tokens, so that one server can be asked by every group.

What asks for token ids is answered as `scoring_double` does, all else as `openai_double`.
"""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from double_defects import Defect
from openai_double import OpenAIDouble
from scoring_double import ScoringDouble
from scoring_faults import Peculiarity
from toy_scorer import MAX_TOKENS


class WholeDouble(ScoringDouble):
    """The application; it has one defect, one peculiarity or nothing that is wrong."""

    def __init__(
        self,
        defect: Defect | Literal[""] = "",
        peculiarity: Peculiarity = "",
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        super().__init__(peculiarity, max_tokens=max_tokens)
        self.defect = defect

    async def _statusz(self, request: Request) -> Response:
        return await OpenAIDouble._statusz(self, request)

    async def _metrics(self, request: Request) -> Response:
        answers = (await one._metrics(self, request) for one in (OpenAIDouble, ScoringDouble))
        return PlainTextResponse("".join([bytes(one.body).decode() async for one in answers]))

    async def _chat(self, request: Request) -> Response:
        return await (await _kind_for(request))._chat(self, request)

    async def _completion(self, request: Request) -> Response:
        return await (await _kind_for(request))._completion(self, request)


async def _kind_for(request: Request) -> type[OpenAIDouble]:
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        return OpenAIDouble
    is_scored = isinstance(body, dict) and body.get("return_token_ids")
    return ScoringDouble if is_scored else OpenAIDouble
