"""A `scoring_double` that serves a soak of hours in a moment, with one fault that comes late.

Its clock is the soak's. A request of the load takes minutes on it, so that a test need not wait.
"""

from __future__ import annotations

import asyncio
import json
from typing import Literal

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from double_model import Generated
from openai_double import Body, OpenAIDouble
from scoring_double import ScoringDouble
from toy_scorer import scaled

Ageing = Literal[
    "one answer is 500",
    "every answer is 500",
    "an engine dies",
    "a workspace grows",
    "a workspace is refused",
    "memory leaks",
    "answers get slower",
    "greedy answers change",
    "weights change",
    "decodes change",
    "the prefix cache rots",
]
"""What goes wrong some hours after the beginning."""

HOUR_SECONDS = 3600.0
LATE_SECONDS = 2.5 * HOUR_SECONDS
"""When it begins."""
_COUNTED = ("/v1/chat/completions", "/v1/completions")
_GIB, _MIB = 1 << 30, 1 << 20
_LEAK_BYTES_AN_HOUR = 4 * _MIB
_SCATTER_BYTES = 64 * 1024
_SLOWER = 1.5
_SOAK_SECONDS = 6 * HOUR_SECONDS


class SoakedDouble(ScoringDouble):
    """The application; `ageing` is empty for a server that stays as it is.

    `tells_scores` makes it tell token ids and log-probs, which takes longer.
    """

    def __init__(
        self,
        ageing: Ageing | Literal[""] = "",
        *,
        tells_scores: bool = False,
        answer_seconds: float = 300.0,
    ) -> None:
        super().__init__()
        self.ageing = ageing
        self._answer_seconds = answer_seconds
        self._tells_scores = tells_scores
        self.has_aged = asyncio.Event()
        """Set once it is late."""
        self.most_at_a_time = 0
        """Requests that were under way together."""
        self._now_seconds = 0.0
        self._is_changed = False
        self._samples = 0
        self._at_a_time = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the answers that are under way, to their last byte."""
        is_counted = scope.get("path") in _COUNTED
        self._at_a_time += is_counted
        self.most_at_a_time = max(self.most_at_a_time, self._at_a_time)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_a_time -= is_counted

    def clock(self) -> float:
        """Seconds since the beginning."""
        return self._now_seconds

    def _has(self, ageing: Ageing) -> bool:
        return self.ageing == ageing and self._now_seconds > LATE_SECONDS

    async def _models(self, request: Request) -> Response:
        return await OpenAIDouble._models(self, request)

    async def _statusz(self, request: Request) -> Response:
        document = json.loads(bytes((await OpenAIDouble._statusz(self, request)).body))
        growths = {"warmup": 9, "locked": int(self._has("a workspace grows"))}
        rejections = {"scratch": int(self._has("a workspace is refused"))}
        rank = {"growths": growths, "rejections": rejections}
        return JSONResponse({**document, "workspace": [rank]})

    async def _metrics(self, request: Request) -> Response:
        page = await super()._metrics(request)
        leaked = _LEAK_BYTES_AN_HOUR * self._now_seconds / HOUR_SECONDS
        self._samples += 1
        scatter = _SCATTER_BYTES * (self._samples % 3)
        held = _GIB + scatter + (leaked if self.ageing == "memory leaks" else 0)
        lines = (
            f"process_resident_memory_bytes {held / 4}",
            f"holdfast_engine_host_memory_bytes {held * 3 / 4}",
            'holdfast_engine_deaths_total{cause="requested"} 3.0',
            f'holdfast_engine_deaths_total{{cause="stall"}} {float(self._has("an engine dies"))}',
        )
        return PlainTextResponse("\n".join((bytes(page.body).decode().strip(), *lines, "")))

    async def _chat(self, request: Request) -> Response:
        self._begin()
        return await OpenAIDouble._chat(self, request)

    async def _completion(self, request: Request) -> Response:
        is_scored = self._tells_scores and "return_token_ids" in await request.json()
        if not is_scored:
            self._begin()
            return await OpenAIDouble._completion(self, request)
        if self._has("weights change") and not self._is_changed:
            self._weights, self._is_changed = scaled(self._weights), True
        if self._has("decodes change"):
            self.peculiarity = "decodes with a quantized head"
        if self._has("the prefix cache rots"):
            self.peculiarity = "a prefix that lacks its last block"
        return await super()._completion(request)

    def _generate(self, body: Body, prompt: str) -> Generated:
        is_changed = self._has("greedy answers change")
        return super()._generate(body, f"{prompt}!" if is_changed else prompt)

    def _begin(self) -> None:
        """Let the time of a request pass, which may end in an error."""
        is_slow = self.ageing == "answers get slower"
        slower = 1 + _SLOWER * self._now_seconds / _SOAK_SECONDS if is_slow else 1
        self._now_seconds += self._answer_seconds * slower
        if self._now_seconds > LATE_SECONDS:
            self.has_aged.set()
        is_one = self._has("one answer is 500") and not self._is_changed
        self._is_changed |= is_one
        if is_one or self._has("every answer is 500"):
            raise HTTPException(500, "EngineDeadError")
