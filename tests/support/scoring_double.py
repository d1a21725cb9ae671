"""A small server that scores tokens as vLLM does, by each code path, with one fault or none.

`toy_scorer` is its model. Here is what an engine has around one: chunks, a prefix cache, batches,
penalties, grammars and restarts.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from openai_double import MODEL, OpenAIDouble
from scoring_faults import Peculiarity
from toy_scorer import (
    BLOCK_TOKENS,
    MAX_TOKENS,
    VOCABULARY,
    Array,
    Weights,
    as_log_probs,
    log_probs,
    make_weights,
    quantized,
    scaled,
    swapped,
)

ADAPTER = "double-adapter"
STEP_TOKENS = 400
_SHIFTED_FROM = 400
_ALL_SHIFTED_FROM = {
    "positions off by one": _SHIFTED_FROM,
    "positions off by one after 4,096": 4096,
}
_BATCH_REQUESTS = 4
_BATCH_SECONDS = 0.1
"""For the others to come, where it matters."""
_ALONE_SECONDS = 0.02
"""For the first of them: some of a full batch may miss the others, and most will not."""
_WIDE = 12
_SHORT_TOKENS = 4
_BIASED = "biased first tokens of short prompts"
_FREE = "a grammar without effect"
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Context:
    """A prompt, and what the cache knows of it."""

    ids: tuple[int, ...]
    lost_end: int = 0
    """Where the block of keys ends that got lost; 0 if none did."""
    is_adapted: bool = False
    """Whether it is for the adapter."""


class ScoringDouble(OpenAIDouble):
    """The application; `peculiarity` is empty for a server that is well."""

    def __init__(
        self,
        peculiarity: Peculiarity = "",
        api_key: str = "",
        admin_key: str = "",
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        super().__init__(api_key=api_key)
        self.admin_key = admin_key
        self.peculiarity = peculiarity
        self.max_model_len = max_tokens
        self._weights = self._loaded()
        self._generation = 1
        self._cached: set[int] = set()
        self._hit_tokens = 0
        self._asking: list[Context] = []
        self._noise = random.Random(3)
        self.router.routes.append(Route("/admin/restart", self._restart, methods=["POST"]))

    def _loaded(self) -> Weights:
        changes = {
            "a weight scaled by 1.01": scaled,
            "two rows of the head swapped": swapped,
            "a quantized head": quantized,
        }
        weights = make_weights()
        change = changes.get(self.peculiarity)
        return change(weights) if change else weights

    # Routes

    async def _models(self, request: Request) -> Response:
        self._admit(request)
        entry = {"id": MODEL, "object": "model", "created": 1, "owned_by": "tests"}
        adapter = {**entry, "id": ADAPTER, "parent": MODEL}
        return JSONResponse(
            {"object": "list", "data": [{**entry, "max_model_len": self.max_model_len}, adapter]}
        )

    async def _statusz(self, _request: Request) -> Response:
        probe = {"passed": True, "limited": False, "proven_tokens": self.max_model_len}
        engine = {"generation": self._generation, "restarts": self._generation - 1}
        known = {"state": "READY", "engine": engine, "progress": {}, "probe": probe}
        return JSONResponse({**known, "workspace": []})

    async def _metrics(self, _request: Request) -> Response:
        name = 'vllm:prefix_cache_hits_total{engine="0",model_name="double"}'
        deaths = 'holdfast_engine_deaths_total{cause="stall"} 0.0'
        return PlainTextResponse(f"# TYPE x counter\n{name} {float(self._hit_tokens)}\n{deaths}\n")

    async def _restart(self, request: Request) -> Response:
        if request.headers.get("authorization", "") != f"Bearer {self.admin_key}":
            return JSONResponse({"error": {"message": "no admin key"}}, status_code=403)
        self._generation += 1
        if self.peculiarity == "a weight scaled by 1.01 after a restart":
            self._weights = scaled(self._weights)
        return JSONResponse({"state": "RECOVERING"}, status_code=202)

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        if body.get("stream"):
            raise HTTPException(400, "it writes no streams")
        text = str(body["messages"][-1]["content"])
        found = re.search(r"secret number of the harbour master is (\d+)", text)
        if found and self.peculiarity == "needles lost in the middle":
            middle = 0.3 < found.start() / len(text) < 0.7
            found = None if middle and len(text) > 1000 else found
        message = {"role": "assistant", "content": found.group(1) if found else "Who knows?"}
        space = " " if self.peculiarity == "a template changed by a space" else ""
        ids = _ids_of(f"<user>{space}{text}<assistant>")
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(text) // 4, "completion_tokens": 2, "total_tokens": 2}
        said = {"choices": [choice], "usage": usage}
        return JSONResponse({**said, "prompt_token_ids": ids})

    async def _completion(self, request: Request) -> Response:
        self._admit(request)
        body = await request.json()
        choice = {"index": 0, **await self._completed(body, _ids_of(body["prompt"]))}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return JSONResponse({"object": "text_completion", "choices": [choice], "usage": usage})

    # The engine

    async def _completed(self, body: Body, ids: list[int]) -> Body:
        is_scored = body.get("prompt_logprobs") is not None
        context = self._scheduled(ids, 0 if is_scored else self._cached_tokens(body, ids))
        context = replace(context, is_adapted=body["model"] == ADAPTER)
        width = body.get("logprobs") or 0
        prefill = self._prefill(context, is_whole=is_scored or len(ids) <= MAX_TOKENS)
        self._asking.append(context)
        try:
            tokens, tops = await self._decoded(body, context, prefill[-1])
        finally:
            self._asking.remove(context)
        self._remember(body, [*ids, *tokens])
        shown = [
            {f"token_id:{t}": v for t, v in self._top(r, t_, width).items() for t in [t]}
            for t_, r in zip(tokens, tops, strict=True)
        ]
        made: Body = {
            "text": self._text(body, tokens),
            "finish_reason": "length",
            "token_ids": tokens,
            "prompt_token_ids": ids,
            "logprobs": {"top_logprobs": shown} if width else None,
        }
        if is_scored:
            wide = body["prompt_logprobs"]
            entries = [
                self._top(row, token, wide) for row, token in zip(prefill, ids[1:], strict=False)
            ]
            made["prompt_logprobs"] = [
                None,
                *({str(t): {"logprob": v} for t, v in top.items()} for top in entries),
            ]
        return made

    def _text(self, body: Body, tokens: Sequence[int]) -> str:
        """What the tokens spell: nothing, or what a grammar of digits allows."""
        is_free = not body.get("structured_outputs") or self.peculiarity == _FREE
        return "" if is_free else "7" * len(tokens)

    def _scheduled(self, ids: Sequence[int], cached_tokens: int) -> Context:
        """The prompt, with the block that its way into the engine costs it."""
        lost_end = 0
        if self.peculiarity == "a prefix that lacks its last block":
            lost_end = cached_tokens
        is_cut = len(ids) - cached_tokens > STEP_TOKENS
        if is_cut and self.peculiarity == "the last block of a chunk dropped":
            lost_end = cached_tokens + STEP_TOKENS
        return Context(tuple(ids), lost_end)

    def _prefill(self, context: Context, *, is_whole: bool) -> Array:
        """What follows each token of the prompt, or only the last of a long one."""
        count = len(context.ids)
        rows = log_probs(
            self._weights_for(context),
            context.ids,
            slice(0 if is_whole else count - 1, count),
            positions=self._positions(count),
            lost_end=context.lost_end,
        )
        if self.peculiarity == "a NaN row" and len(rows) > 90:
            rows[40] = np.nan
        return self._noisy(rows)

    async def _decoded(
        self, body: Body, context: Context, first: Array
    ) -> tuple[list[int], list[Array]]:
        """The answer, and what each token of it was chosen from."""
        tokens, rows, row = list[int](), list[Array](), first
        if len(context.ids) <= _SHORT_TOKENS and self.peculiarity == _BIASED:
            row = as_log_probs((first + np.sin(np.arange(VOCABULARY)) * 0.1)[None])[0]
        for number in range(body.get("max_tokens") or 1):
            told, chosen_from = self._processed(body, row, context.ids, tokens)
            is_astray = self.peculiarity == "a sampler that strays" or (
                self.peculiarity == "answers without log-probs that stray"
                and body.get("logprobs") is None
            )
            if number == 7 and is_astray:
                chosen_from = chosen_from.copy()
                chosen_from[chosen_from.argmax()] = -np.inf
            if number == 1:
                told = await self._beside_others(context, tokens, told)
            tokens.append(int(chosen_from.argmax()))
            rows.append(told)
            row = self._decode(context, tokens)
        return tokens, rows

    def _weights_for(self, context: Context) -> Weights:
        return scaled(self._weights) if context.is_adapted else self._weights

    def _decode(self, context: Context, answer: Sequence[int] = ()) -> Array:
        ids = [*context.ids, *answer]
        count, weights, positions = len(ids), self._weights_for(context), self._positions(len(ids))
        if self.peculiarity == "decodes with positions off by one" and count > _SHIFTED_FROM:
            positions = positions.copy()
            positions[-1] += 1
        if self.peculiarity == "decodes with a quantized head":
            weights = quantized(weights)
        last = slice(count - 1, count)
        rows = log_probs(weights, ids, last, positions=positions, lost_end=context.lost_end)
        return np.asarray(self._noisy(rows)[0], np.float32)

    def _positions(self, count: int) -> Any:
        places = np.arange(count)
        shifted_from = _ALL_SHIFTED_FROM.get(self.peculiarity, count)
        return places + (places >= shifted_from)

    def _processed(
        self, body: Body, row: Array, prompt: Sequence[int], answer: Sequence[int]
    ) -> tuple[Array, Array]:
        """The row as it is told, and as a token is chosen from it."""
        chosen = row.copy()
        for token, bias in (body.get("logit_bias") or {}).items():
            chosen[int(token)] += bias
        is_told = self.peculiarity == "processed log-probs"
        if self.peculiarity != "penalties without effect":
            chosen -= self._penalties(body, prompt, answer)
        if body.get("repetition_penalty", 1) != 1:
            is_told |= self.peculiarity == "penalties in the log-probs"
        if body.get("structured_outputs") and self.peculiarity != _FREE:
            chosen[::3] -= 50.0
            is_told = True
            if self.peculiarity == "a grammar that rounds":
                chosen = chosen.astype(np.float16).astype(np.float32)
        return (as_log_probs(chosen[None])[0] if is_told else row), chosen

    def _penalties(self, body: Body, prompt: Sequence[int], answer: Sequence[int]) -> Array:
        """What each token loses because it was said: penalties but one count only the answer."""
        taken = np.zeros(VOCABULARY, np.float32)
        if body.get("repetition_penalty", 1) != 1:
            taken[list({*prompt, *answer})] += 1.0
        for token, count in Counter(answer).items():
            taken[token] += body.get("presence_penalty") or 0
            taken[token] += count * (body.get("frequency_penalty") or 0)
        return taken

    async def _beside_others(self, context: Context, answer: Sequence[int], row: Array) -> Array:
        """The row of another request in the same step, or of another model, if that is wrong."""
        if self.peculiarity == "an adapter that changes its neighbours":
            await asyncio.sleep(_BATCH_SECONDS)
            is_beside = any(one.is_adapted for one in self._asking)
            return self._decode(replace(context, is_adapted=True), answer) if is_beside else row
        if self.peculiarity != "two rows of a batch swapped":
            return row
        await asyncio.sleep(_ALONE_SECONDS)
        if len(self._asking) > 1:
            await asyncio.sleep(_BATCH_SECONDS - _ALONE_SECONDS)
        others = [one for one in self._asking if one.ids != context.ids]
        is_full = len(self._asking) >= _BATCH_REQUESTS
        return self._decode(others[0]) if others and is_full else row

    # What is around it

    def _cached_tokens(self, body: Body, ids: Sequence[int]) -> int:
        if self.peculiarity == "a cache that is off":
            return 0
        found = 0
        for end, block in _blocks(body.get("cache_salt", ""), ids):
            if end == len(ids) or block not in self._cached:
                break
            found = end
        self._hit_tokens += found
        return found

    def _remember(self, body: Body, ids: Sequence[int]) -> None:
        self._cached |= {block for _, block in _blocks(body.get("cache_salt", ""), ids)}

    def _noisy(self, rows: Array) -> Array:
        sizes = {"noise of 0.003 nat": 0.003, "noise of 2 nats": 2.0}
        size = sizes.get(self.peculiarity)
        if not size:
            return rows
        drawn = np.random.default_rng(self._noise.getrandbits(32))
        return as_log_probs(rows + (drawn.standard_normal(rows.shape) * size).astype(np.float32))

    def _top(self, row: Array, token: int, width: int) -> dict[int, float | None]:
        """The likeliest tokens, and the one that stands there."""
        best = [token, *(int(one) for one in np.argsort(-row)[:width])]
        digits = 2 if width >= _WIDE and self.peculiarity == "wide lists that are rounded" else 9
        return {
            one: None if math.isnan(row[one]) else round(float(row[one]), digits) for one in best
        }


def _blocks(salt: str, ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each block of a prompt ends, and a name of it that all before it have a part in."""
    name = hash(salt)
    for end in range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS):
        name = hash((name, *ids[end - BLOCK_TOKENS : end]))
        yield end, name


def _ids_of(prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        return [1, *(ord(character) % (VOCABULARY - 2) + 2 for character in prompt)]
    return list(prompt)
