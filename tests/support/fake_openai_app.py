"""vLLM's routes that the probe calls, answered by a `FakeEngine`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fake_engine import IMAGE_PROMPT, FakeEngine, FakeRequest

Body = dict[str, Any]


def openai_app(engine: FakeEngine) -> Starlette:
    """Make an app with vLLM's routes that the probe calls, answered by `engine`."""

    def route(path: str, answer: Callable[[Body, list[FakeRequest]], Response]) -> Route:
        async def endpoint(request: Request) -> Response:
            body = await request.json()
            address = request.headers.get("X-data-parallel-rank")
            target = int(address) if address else None
            engine.received.append((path, body, target or 0))
            status = _status(engine, path, body)
            if status != 200:
                return JSONResponse({"error": {"message": "refused by a test"}}, status)
            prompts, asked = _prompts(body)
            tokens = min(asked, engine.facts.max_answer_tokens or asked)
            ignores_cache = "prompt_logprobs" in body
            requests = [
                engine.submit(prompt, tokens, target, ignores_cache=ignores_cache)
                for prompt in prompts
            ]
            if body.get("stream"):
                events = _events(engine, requests)
                return StreamingResponse(events, media_type="text/event-stream")
            return await _whole(engine, requests, lambda: answer(body, requests))

        return Route(path, endpoint, methods=["POST"])

    def completion(body: Body, requests: list[FakeRequest]) -> Response:
        choices = [_choice(engine, body, i, r) for i, r in enumerate(requests)]
        made = sum(request.made_tokens for request in requests)
        given = sum(len(request.prompt) for request in requests)
        usage = {"prompt_tokens": given, "completion_tokens": made}
        return _json({"choices": choices, "usage": usage})

    def vectors(body: Body, requests: list[FakeRequest]) -> Response:
        key = "data" if "task" in body else "embedding"
        data = [{"index": i, key: [engine.faults.embedding] * 4} for i, _ in enumerate(requests)]
        return _json({"data": data})

    async def transcription(request: Request) -> Response:
        async with request.form() as form:
            engine.received.append((request.url.path, dict(form), 0))
        status = engine.faults.refuses(request.url.path, {})
        if status != 200:
            return JSONResponse({"error": {"message": "refused by a test"}}, status)
        requests = [] if engine.faults.is_deaf else [engine.submit([5], 8, None)]
        return await _whole(engine, requests, lambda: _json({"text": "\n"}))

    async def models(_: Request) -> Response:
        base = [{"id": engine.facts.model, "parent": None}]
        adapters = [{"id": name, "parent": engine.facts.model} for name in engine.faults.adapters]
        return _json({"data": base + adapters})

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/audio/transcriptions", transcription, methods=["POST"]),
            route("/v1/completions", completion),
            route("/v1/chat/completions", completion),
            route("/v1/embeddings", vectors),
            route("/pooling", vectors),
        ]
    )


def _status(engine: FakeEngine, path: str, body: Body) -> int:
    limit = engine.context_limit_tokens
    is_too_long = limit is not None and max(map(len, _prompts(body)[0])) >= limit
    return 400 if is_too_long else engine.faults.refuses(path, body)


def _json(content: Body) -> Response:
    """Answer in JSON with NaN, which some servers write and Starlette refuses to."""
    return Response(json.dumps(content), media_type="application/json")


def _prompts(body: Body) -> tuple[list[list[int]], int]:
    if "messages" in body:
        is_text = isinstance(body["messages"][0]["content"], str)
        return [[5, 6, 7, 8, 9] if is_text else IMAGE_PROMPT], body["max_tokens"]
    return body.get("prompt") or body["input"], body.get("max_tokens", 1)


def _choice(engine: FakeEngine, body: Body, index: int, request: FakeRequest) -> Body:
    choice: Body = {"index": index, "text": "", "finish_reason": engine.faults.finish_reason}
    if body.get("logprobs") is not None:
        values = [engine.faults.logprob] * request.made_tokens
        choice["logprobs"] = {"token_logprobs": values, "top_logprobs": [{"a": v} for v in values]}
    if "prompt_logprobs" in body:
        told = [engine.faults.prompt_logprob(position) for position in range(len(request.prompt))]
        tops = [{str(t): {"logprob": v}} for t, v in zip(request.prompt, told, strict=True)]
        choice["prompt_logprobs"] = [None, *tops[1:]]
    return choice


async def _whole(
    engine: FakeEngine, requests: list[FakeRequest], answer: Callable[[], Response]
) -> Response:
    try:
        await asyncio.gather(*(_until_over(request) for request in requests))
    finally:
        for request in requests:
            engine.abort(request)
    if failed := [request.ended for request in requests if request.ended != "length"]:
        return JSONResponse({"error": {"message": failed[0]}}, 500)
    return answer()


def _until_over(request: FakeRequest) -> Awaitable[None]:
    return request.until_made(request.max_tokens)


async def _events(engine: FakeEngine, requests: list[FakeRequest]) -> AsyncIterator[str]:
    """Yield server-sent events in rounds, each with one token of every request."""
    try:
        for tokens in range(1, requests[0].max_tokens + 1):
            for index, request in enumerate(requests):
                await request.until_made(tokens)
                if request.ended not in ("", "length") or engine.faults.streams_error:
                    yield _event({"error": {"message": request.ended, "code": 500}})
                    return
                is_last = tokens == request.max_tokens
                reason = engine.faults.finish_reason if is_last else None
                yield _event({"choices": [{"index": index, "text": "", "finish_reason": reason}]})
        made = sum(request.made_tokens for request in requests)
        yield _event({"choices": [], "usage": {"completion_tokens": made}})
        if engine.faults.streams_done:
            yield "data: [DONE]\n\n"
    finally:
        for request in requests:
            engine.abort(request)


def _event(content: Body) -> str:
    return f"data: {json.dumps(content)}\n\n"
