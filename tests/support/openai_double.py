"""A small server with OpenAI's API that answers well, or has one defect that a test asks for.

It stands in for any server: `holdfast verify` is tested against it. `double_model` is its model.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any, Literal, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from double_defects import MORE, WRONG_ANSWERS, Defect
from double_derender import derendered
from double_model import (
    MAX_MODEL_LEN,
    Generated,
    Vocabulary,
    fault_of,
    generate,
    stops_of,
    template,
    tokens_of,
)
from double_tools import deltas, finish_reason, parse
from double_typed import framed, message_events, message_of, response_events, response_of
from holdfast.configuration_record import Configuration, ModelFile
from holdfast.verify.checks.wire.leaving import LONG_PROMPT
from holdfast.verify.checks.wire.streams import PACED_TOKENS

Body = dict[str, Any]

MODEL = "double"
DERENDER = "/v1/chat/completions/derender"
MAX_BODY_BYTES = 1024 * 1024
_EVENT_STREAM = "text/event-stream"


class OpenAIDouble(Starlette):
    """The application; `defect` is empty for a server that is well.

    `known` has what it answers to questions of a test.
    """

    def __init__(
        self,
        defect: Defect | Literal[""] = "",
        api_key: str = "",
        known: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.defect = defect
        self.api_key = api_key
        self.admin_key = ""
        self.known = known
        self.max_model_len = MAX_MODEL_LEN
        self.is_hanging = asyncio.Event()
        """Set once a request has come that gets no answer."""
        self.configuration = Configuration(
            image="registry/double:1",
            versions={"holdfast": "0.0.0", "torch": "0.0.0"},
            flags=("--max-model-len", str(MAX_MODEL_LEN), "--tool-call-parser=hermes"),
            devices=("GPU", "GPU"),
            model=MODEL,
            files=(ModelFile("config.json", 2, "ab" * 32, "holdfast"),),
        )
        self.gauges: tuple[str, ...] = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        """The names of what `/metrics` counts: requests that run, and those that wait."""
        self.token_seconds = 0.002
        """How long a stream takes for a token, where a check looks at the times of its events."""
        self.generation = 1
        self.owner = "tests"
        """Of the model, in the list of models."""
        self.deaths = 0
        """Of engines, though nobody asked for it."""
        self._completions = 0
        self._running = 0
        self._left: set[asyncio.Task[None]] = set()
        """Streams that go on without their client."""
        self._last: Body = {}
        self._vocabulary = Vocabulary()
        posts = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/responses": self._responses,
            "/v1/messages": self._messages,
            "/v1/embeddings": self._embeddings,
            "/tokenize": self._tokenize,
        }
        gets = {
            "/v1/models": self._models,
            "/version": self._version,
            "/statusz": self._statusz,
            "/openapi.json": self._openapi,
            "/metrics": self._metrics,
        }
        self._paths = [*posts, *gets]
        posts[DERENDER] = self._derender
        super().__init__(
            routes=[Route(path, end, methods=["POST"]) for path, end in posts.items()]
            + [Route(path, end) for path, end in gets.items()],
            exception_handlers={HTTPException: self._refused},
        )

    def without(self, *paths: str) -> Self:
        """Answer 404 at these paths from now on."""
        routes = self.router.routes
        self.router.routes = [one for one in routes if getattr(one, "path", "") not in paths]
        return self

    def listing(self, *paths: str) -> Self:
        """Name these paths among its routes, whether or not it has them."""
        self._paths += paths
        return self

    def owned_by(self, owner: str) -> Self:
        """Be of another make than Holdfast from now on, and name the owner of the model."""
        self.owner = owner
        return self.without("/statusz")

    # Routes

    async def _models(self, request: Request) -> Response:
        self._admit(request)
        if self.defect == "a list of models that never comes":
            await self._hang(request)
        entry = {"id": MODEL, "object": "model", "created": 1, "owned_by": self.owner}
        entry["max_model_len"] = self.max_model_len
        if self.defect == "a model without its time":
            del entry["created"]
        entries = [entry] * (2 if self.defect == "a model listed twice" else 1)
        return JSONResponse({"object": "list", "data": entries})

    async def _version(self, _request: Request) -> Response:
        return JSONResponse({"version": "0.0.0"})

    async def _openapi(self, _request: Request) -> Response:
        return JSONResponse({"paths": {path: {} for path in self._paths}})

    async def _statusz(self, _request: Request) -> Response:
        progress = {"running": self._running, "waiting": 0}
        probe = {"passed": True, "limited": False, "proven_tokens": self.max_model_len}
        engine = {"generation": self.generation, "restarts": self.generation - 1}
        known = {"state": "READY", "engine": engine, "progress": progress, "probe": probe}
        served = asdict(self.configuration)
        if self.defect == "every chat repeats the key":
            served["flags"] = [f"--greeting={self.api_key}"]
        return JSONResponse({**known, "workspace": [self._workspace()], "configuration": served})

    def _workspace(self) -> Body:
        """What the first engine's rank counts; the next one begins again."""
        has_grown = self._completions > 1 and self.generation == 1
        return {
            "growths": {"locked": int(has_grown and self.defect == "a workspace grows unseen")},
            "rejections": {"x": int(has_grown and self.defect == "a workspace is refused unseen")},
        }

    async def _metrics(self, _request: Request) -> Response:
        has_died = self._completions > 1 and self.defect == "an engine dies unseen"
        name = 'holdfast_engine_deaths_total{cause="stall"}'
        lines = [f"{name} {float(self.deaths + has_died)}"]
        counts = zip(self.gauges, (self._running, 0), strict=False)
        lines += [f'{gauge}{{engine="0"}} {float(count)}' for gauge, count in counts]
        return PlainTextResponse("\n".join([*lines, ""]))

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        prompt = template(body) if "messages" in body else body["prompt"]
        ids = self._vocabulary.ids_of(prompt)
        return JSONResponse({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids})

    async def _derender(self, request: Request) -> Response:
        self._admit(request)
        if not (body := await request.json()):
            raise HTTPException(400, "there is nothing to parse")
        return JSONResponse(derendered(body, self._vocabulary.text_of, self.defect))

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        if self.defect == "every chat is 500":
            raise HTTPException(500, "out of order")
        if self.defect == "every chat repeats the key":
            raise HTTPException(500, f"out of order, {request.headers['authorization']}")
        if body.get("tools") and self.defect == "functions are 400":
            raise HTTPException(400, "functions need --enable-auto-tool-choice")
        is_smallest = body.get("max_tokens") == 1
        if self.defect == "no chat that ever comes" or (
            self.defect == "chats that never come" and not is_smallest
        ):
            await self._hang(request)
        return self._answer(body, template(body), is_chat=True)

    async def _completion(self, request: Request) -> Response:
        body = await self._body(request)
        self._completions += 1
        is_longest = len(body["prompt"]) == self.max_model_len - 1
        if self.defect == "the longest prompt is 500" and is_longest:
            raise HTTPException(500, "the workspace is locked")
        if self.defect == "the 100th completion is 500" and self._completions == 100:
            raise HTTPException(500, "out of memory")
        if self.defect == "answers mixed up":
            self._last = body
            await asyncio.sleep(0.01)  # for another to come
            body = {**body, "prompt": self._last["prompt"]}
        return self._answer(body, body["prompt"], is_chat=False)

    async def _responses(self, request: Request) -> Response:
        if self.defect == "responses are 500":
            raise HTTPException(500, "out of order")
        body = await self._body(request)
        prompt = template({"messages": [{"role": "user", "content": body["input"]}]})
        limits = {"max_tokens": body.get("max_output_tokens")}
        made = self._generate({**body, **limits}, prompt)
        answer = response_of(made, len(tokens_of(prompt)))
        events = response_events(made, answer, self.defect)
        return _typed(events) if body.get("stream") else JSONResponse(answer)

    async def _messages(self, request: Request) -> Response:
        body = await self._body(request)
        prompt = template(body)
        made = self._generate(body, prompt)
        answer = message_of(made, len(tokens_of(prompt)))
        if body.get("stream"):
            has_names = self.defect != "streamed messages without names of events"
            return _typed(message_events(made, answer, self.defect), has_names=has_names)
        if self.defect == "messages from the user":
            answer["role"] = "user"
        return JSONResponse(answer)

    async def _embeddings(self, _request: Request) -> Response:
        raise HTTPException(500 if self.defect == "embeddings are 500" else 400, "not this model")

    # What they share

    def _admit(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self.api_key and given != f"Bearer {self.api_key}":
            raise HTTPException(401, "the key is wrong")

    async def _body(self, request: Request) -> Body:
        self._admit(request)
        if self.defect == "large bodies are 500" and len(await request.body()) > MAX_BODY_BYTES:
            raise HTTPException(500, "out of memory")
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            raise HTTPException(400, "the body is not JSON") from None
        if isinstance(body, dict) and body.get("model", MODEL) != MODEL:
            raise HTTPException(404, f"there is no model {body['model']}")
        if isinstance(body, dict) and "max_completion_tokens" in body:
            body["max_tokens"] = body.pop("max_completion_tokens")
        is_taken = self.defect == "max_tokens in words taken"
        is_longer = self.defect == "a prompt beyond the context taken"
        if fault := fault_of(
            body, self.max_model_len, takes_words=is_taken, takes_longer=is_longer
        ):
            raise HTTPException(500 if self.defect == "wrong requests are 500" else 400, fault)
        if isinstance(body.get("max_tokens"), str):
            return {**body, "max_tokens": None}
        return dict(body)

    async def _refused(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code
        if self.defect == "refusals without a form":
            return PlainTextResponse(error.detail, status_code=status)
        said = {"message": error.detail, "type": "error", "param": None, "code": status}
        return JSONResponse({"error": said}, status_code=status)

    async def _hang(self, request: Request) -> None:
        """Wait until the client leaves; a server cannot end before its requests have."""
        self.is_hanging.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass

    def _answer(self, body: Body, prompt: str | list[int], *, is_chat: bool) -> Response:
        asked = len(prompt if isinstance(prompt, list) else tokens_of(prompt))
        text = self._vocabulary.text_of(prompt) if isinstance(prompt, list) else prompt
        generated = [self._generate(body, text) for _ in range(body.get("n") or 1)]
        written = sum(len(one.tokens) for one in generated)
        written -= len(generated) * asked if body.get("echo") else 0
        asked += self.defect == "prompt_tokens off by one"
        written += self.defect == "completion_tokens off by one"
        total = asked + written + (self.defect == "total_tokens off by one")
        usage = {
            "prompt_tokens": asked,
            "completion_tokens": written,
            "total_tokens": total,
        }
        identity = secrets.token_hex(8)
        head = {
            "id": f"chatcmpl-{identity}" if is_chat else f"cmpl-{identity}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": 1,
            "model": MODEL,
        }
        if body.get("stream"):
            parts = self._parts(head, generated, usage, body, is_chat=is_chat)
            is_paced = LONG_PROMPT in text or body.get("max_tokens") == PACED_TOKENS
            return StreamingResponse(
                self._events(parts, is_chat=is_chat, is_paced=is_paced), media_type=_EVENT_STREAM
            )
        if self.defect == "completions that call themselves chats":
            head["object"] = "chat.completion"
        choices = [
            self._choice(index, one, body, is_chat=is_chat) for index, one in enumerate(generated)
        ]
        return JSONResponse({**head, "choices": choices, "usage": usage})

    def _generate(self, body: Body, prompt: str) -> Generated:
        if self.defect == "seeds without effect":
            body = {**body, "seed": None}
        if self.defect == "a greedy story that changes" and "lighthouse" in prompt:
            body = {**body, "temperature": body["temperature"] or 1.0}
        keeps_stop = (
            self.defect == "a stop text that is kept"
            or (self.defect == "a stop text that chats keep" and "messages" in body)
            or (self.defect == "a stop text that leaks into streams" and body.get("stream"))
        )
        if self.defect == "chats that never end" and "messages" in body:
            most = body.get("max_tokens") or MAX_MODEL_LEN
            return Generated(tokens_of("on and on, " * most)[:most], "length")
        told = next((text for question, text in self.known.items() if question in prompt), "")
        if told:
            return Generated(tokens_of(told), "stop")
        made = generate(body, prompt, self.defect)
        if body.get("stream") and body.get("ignore_eos"):
            tokens = islice(cycle(made.tokens), body["max_tokens"])
            return Generated(list(tokens), "length")
        is_stopped = body.get("stop") and made.finish_reason == "stop"
        if keeps_stop and is_stopped:
            made = replace(made, tokens=[*made.tokens, *stops_of(body)[:1]])
        is_cut = self.defect == "streams that lose what stands before a stop text"
        if is_cut and is_stopped and body.get("stream"):
            made = replace(made, tokens=made.tokens[:-1])
        if self.defect == "cut answers that end by stop":
            made = replace(made, finish_reason="stop")
        right, wrong = WRONG_ANSWERS.get(self.defect, ("", ""))
        text = made.text.replace(right, wrong) if right else made.text
        more = MORE.get(self.defect, "") if "messages" in body else ""
        return replace(made, tokens=tokens_of(text + more)) if text + more != made.text else made

    def _choice(self, index: int, made: Generated, body: Body, *, is_chat: bool) -> Body:
        is_misnumbered = is_chat and self.defect == "choices of chats all numbered 0"
        if is_misnumbered or self.defect == "choices all numbered 0":
            index = 0
        said: Body = {"text": made.text}
        reason = made.finish_reason
        if is_chat:
            parsed = parse(made.text, body, self.defect)
            reason = finish_reason(parsed, body, reason, self.defect)
            message = {
                "role": "assistant",
                "content": parsed.content,
                **({"tool_calls": parsed.calls} if parsed.calls else {}),
                **self._thought(made, body),
            }
            if self.defect == "chats without a role":
                del message["role"]
            said = {"message": message}
        logprobs = self._logprobs(made.tokens, is_chat=is_chat) if body.get("logprobs") else None
        return {
            "index": index,
            **said,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def _thought(self, made: Generated, body: Body) -> Body:
        is_thought = "morning" in body["messages"][-1]["content"]
        if self.defect != "chats that only think" or not is_thought:
            return {}
        return {"content": None, "reasoning": made.text}

    def _logprobs(self, tokens: Sequence[str], *, is_chat: bool) -> Body:
        values: list[float | None] = [-0.5 for _ in tokens]
        if self.defect == "a logprob for all tokens but one":
            values.pop()
        is_unknown = is_chat and self.defect == "a logprob of a chat that is not a number"
        if is_unknown or self.defect == "a logprob that is not a number":
            values[-1] = None
        most = -0.1 if self.defect == "a greedy token that is not the likeliest" else -0.5
        if is_chat:
            other = _alternative("b", -2.0)
            return {
                "content": [
                    {
                        **_alternative(token, value),
                        "top_logprobs": [_alternative(token, most), other],
                    }
                    for token, value in zip(tokens, values, strict=False)
                ]
            }
        return {
            "tokens": list(tokens)[: len(values)],
            "token_logprobs": values,
            "top_logprobs": [{"a": most, "b": -2.0} for _ in values],
        }

    # Streams

    def _parts(
        self,
        head: Body,
        generated: Sequence[Generated],
        usage: Mapping[str, int],
        body: Body,
        *,
        is_chat: bool,
    ) -> Iterator[Body]:
        """The documents of a stream, in their order."""
        if is_chat:
            head = {**head, "object": "chat.completion.chunk"}
        usage = {**usage}
        for name in ("completion_tokens", "prompt_tokens"):
            if self.defect == f"streamed {name} off by one":
                usage |= {name: usage[name] + 1, "total_tokens": usage["total_tokens"] + 1}
        tail = {**head, "choices": [], "usage": usage}
        is_asked = (body.get("stream_options") or {}).get("include_usage")
        for index, made in enumerate(generated):
            parts = list(self._of_choice(index, made, body, is_chat=is_chat))
            if is_asked and self.defect == "usage in the middle":
                yield tail
            for part in parts:
                if self.defect == "ids that change":
                    head = {**head, "id": secrets.token_hex(8)}
                yield {**head, "choices": [part]}
        if (
            self.defect != "usage in the middle"
            if is_asked
            else self.defect == "usage nobody asked for"
        ):
            yield tail

    def _of_choice(
        self, index: int, made: Generated, body: Body, *, is_chat: bool
    ) -> Iterator[Body]:
        def part(text: str, reason: str | None = None) -> Body:
            said: Body = {"delta": {"content": text}} if is_chat else {"text": text}
            return {"index": index, **said, "finish_reason": reason}

        if is_chat:
            yield {"index": index, "delta": {"role": "assistant", "content": ""}}
        tokens, reason = list(made.tokens), made.finish_reason
        parsed = parse(made.text, body, self.defect) if is_chat else None
        if parsed and parsed.calls:
            tokens = tokens_of(parsed.content)
            reason = finish_reason(parsed, body, reason, self.defect)
        if self.defect == "a stream that drops a token" and len(tokens) > 2:
            del tokens[len(tokens) // 2]
        if self.defect == "all text of a chat in one event" and is_chat:
            tokens = ["".join(tokens)]
        for token in tokens:
            is_broken = self.defect == "a stream that breaks characters"
            yield part(token.encode().decode("ascii", "replace") if is_broken else token)
        for delta in deltas(parsed.calls, self.defect) if parsed else ():
            yield {"index": index, "delta": {"tool_calls": [delta]}, "finish_reason": None}
        yield part("", reason)
        if self.defect == "two finish reasons":
            yield part("", reason)
        if self.defect == "text behind the finish reason":
            yield part("more")

    async def _events(
        self, parts: Iterator[Body], *, is_chat: bool, is_paced: bool
    ) -> AsyncIterator[bytes]:
        firsts = {"all events at the end": 0, "all events but the first at the end": 1}
        if is_chat:
            firsts["all events of a chat at the end"] = 0
        held_from = firsts.get(self.defect)
        self._running += 1
        is_whole = False
        try:
            held = b""
            for number, part in enumerate(parts):
                event = self._event(number, json.dumps(part, ensure_ascii=False))
                if held_from is not None and number >= held_from:
                    held += event
                else:
                    yield event
                # As if the next token had to be computed.
                await asyncio.sleep(self.token_seconds if is_paced else 0)
            yield held + (b"" if self.defect == "no [DONE]" else b"data: [DONE]\n\n")
            is_whole = True
        finally:
            goes_on = self.defect == "streams that go on without their client" or (
                is_chat and self.defect == "chats that go on without their client"
            )
            is_written = self.defect == "streams that are written to their end without their client"
            if is_written and not is_whole:
                task = asyncio.create_task(self._write_on(parts))
                self._left.add(task)
                task.add_done_callback(self._left.discard)
            else:
                self._running -= is_whole or not goes_on

    async def _write_on(self, parts: Iterator[Body]) -> None:
        """Write the rest of a stream for nobody."""
        for _ in parts:
            await asyncio.sleep(self.token_seconds)
        self._running -= 1

    def _event(self, number: int, text: str) -> bytes:
        if number == 1 and self.defect == "an event split wrong":
            middle = len(text) // 2
            return f"data: {text[:middle]}\n\ndata: {text[middle:]}\n\n".encode()
        if number == 1 and self.defect == "an event without its empty line":
            return f"data: {text}\n".encode()
        if number == 1 and self.defect == "bytes that are not UTF-8":
            return b"data: \xf0\x9f\n\n"
        return f"data: {text}\n\n".encode()


def _alternative(token: str, value: float | None) -> Body:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


def _typed(events: Iterator[Body], *, has_names: bool = True) -> Response:
    return StreamingResponse(framed(events, has_names=has_names), media_type=_EVENT_STREAM)
