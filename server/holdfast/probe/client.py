"""The client of our own listener: it sends requests, and accepts only whole answers.

The bodies are those of vLLM 0.32's OpenAI routes. An answer is whole if its status is 200, each
choice ended by its length or a stop, and every number in it is finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from holdfast.errors import ProbeFailedError
from holdfast.probe.sizes import is_pooling
from holdfast.records import EngineFacts

ProbeRequestBody = dict[str, Any]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
POOLING = "/pooling"
MODELS = "/v1/models"
RANK_HEADER = "X-data-parallel-rank"
CLAMPED_LOGPROB = -9999.0
"""vLLM writes this for minus infinity, which no sampled token has, and 500 for NaN."""
_EXCERPT_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Message:
    """One HTTP request, and the engine that it is for."""

    path: str
    body: ProbeRequestBody
    prompts: int = 1
    engine: int | None = None
    """None leaves the choice to vLLM."""
    output_tokens: int | None = None
    """The tokens that all its answers together must have."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The header that addresses the engine, if one is chosen."""
        return {} if self.engine is None else {RANK_HEADER: str(self.engine)}


def completion(
    facts: EngineFacts, prompts: Sequence[Sequence[int]], tokens: int
) -> ProbeRequestBody:
    """Make a body of token-id prompts that are each answered with exactly `tokens` tokens."""
    return {
        "model": facts.model,
        "prompt": list(prompts),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "add_special_tokens": False,
    }


def chat(facts: EngineFacts, tokens: int) -> ProbeRequestBody:
    """Make the body of a chat, which goes through template and tokenizer."""
    return {
        "model": facts.model,
        "messages": [{"role": "user", "content": "Say one word."}],
        "max_tokens": tokens,
        "temperature": 0.0,
    }


def pooling(facts: EngineFacts, prompts: Sequence[Sequence[int]]) -> tuple[str, ProbeRequestBody]:
    """Return the first route that the model serves, and a body of token-id prompts for it."""
    body: ProbeRequestBody = {
        "model": facts.model,
        "input": list(prompts),
        "add_special_tokens": False,
    }
    if "embed" in facts.tasks:
        return EMBEDDINGS, body
    task = next(t for t in ("classify", "token_classify", "token_embed") if t in facts.tasks)
    return POOLING, {**body, "task": task}


def top_logprobs(facts: EngineFacts, wanted: int) -> ProbeRequestBody:
    """Ask for the log-probs of `wanted` tokens, or as many as the server allows.

    The result is empty if it allows none, or if the model does not generate.
    """
    if not facts.max_logprobs or is_pooling(facts):
        return {}
    allowed = wanted if facts.max_logprobs < 0 else min(wanted, facts.max_logprobs)
    return {"logprobs": allowed, "return_tokens_as_token_ids": True}


def streamed(body: ProbeRequestBody) -> ProbeRequestBody:
    """Make the same request for server-sent events that end with the usage."""
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


async def post(client: httpx.AsyncClient, message: Message) -> httpx.Response:
    """Send `message` and return the response, with any status.

    Raises:
        ProbeFailedError: the connection failed.
    """
    try:
        return await client.post(
            message.path, json=message.body, headers=message.headers, timeout=None
        )
    except httpx.HTTPError as error:
        raise ProbeFailedError(broken(message, error)) from error


async def exchange(client: httpx.AsyncClient, message: Message) -> ProbeRequestBody:
    """Send `message` and return its whole answer.

    Raises:
        ProbeFailedError: there is no answer, or it is not whole.
    """
    return read(message, await post(client, message))


def read(message: Message, response: httpx.Response) -> ProbeRequestBody:
    """Return the whole answer in `response`.

    Raises:
        ProbeFailedError: it is not whole.
    """
    if response.status_code != httpx.codes.OK:
        raise ProbeFailedError(refusal(message, response.status_code, response.text))
    answer = parsed(message, response.text)
    if message.path in (COMPLETIONS, CHAT):
        _check_choices(message, answer)
    else:
        _check_vectors(message, answer)
    return answer


def refusal(message: Message, status: int, text: str) -> str:
    """Describe an answer with a status other than 200."""
    return f"{message.path} answered HTTP {status}: {_excerpt(text)}"


def is_whole(reason: Any) -> bool:
    """Whether a choice that ended for `reason` is complete."""
    return reason in ("length", "stop")


def _check_choices(message: Message, answer: ProbeRequestBody) -> None:
    choices = _list(answer.get("choices"))
    if len(choices) != message.prompts:
        raise ProbeFailedError(
            f"{message.path} returned {len(choices)} of {message.prompts} choices."
        )
    _check_ends(message, {_get(choice, "finish_reason") for choice in choices})
    _check_usage(message, _get(answer, "usage"))
    if message.body.get("logprobs") is not None:
        for choice in choices:
            _check_logprobs(_get(choice, "logprobs"), message.body["max_tokens"])


def _check_ends(message: Message, reasons: Iterable[Any]) -> None:
    odd = [reason for reason in reasons if not is_whole(reason)]
    if odd:
        raise ProbeFailedError(f"{message.path} ended early with finish_reason {odd[0]!r}.")


def _check_usage(message: Message, usage: Any) -> None:
    tokens = _get(usage, "completion_tokens")
    if not isinstance(tokens, int) or tokens < 1:
        raise ProbeFailedError(f"{message.path} returned no token.")
    if message.output_tokens is not None and tokens != message.output_tokens:
        raise ProbeFailedError(
            f"{message.path} returned {tokens} tokens instead of {message.output_tokens}."
        )


def _check_logprobs(logprobs: Any, tokens: int) -> None:
    sampled = _list(_get(logprobs, "token_logprobs"))
    if len(sampled) != tokens:
        raise ProbeFailedError(f"the answer has {len(sampled)} log-probs for {tokens} tokens.")
    for value in sampled:
        if not _is_finite(value) or value <= CLAMPED_LOGPROB:
            raise ProbeFailedError(f"the log-prob {value} of a sampled token is not finite.")
    for top in _list(_get(logprobs, "top_logprobs")):
        values = top.values() if isinstance(top, dict) else (None,)
        if not all(map(_is_finite, values)):
            raise ProbeFailedError("a top log-prob is not finite.")


def _check_vectors(message: Message, answer: ProbeRequestBody) -> None:
    data = _list(answer.get("data"))
    if len(data) != message.prompts:
        raise ProbeFailedError(f"{message.path} returned {len(data)} of {message.prompts} vectors.")
    for entry in data:
        vector = _get(entry, "embedding") or _get(entry, "data")
        if not vector or not _are_finite(vector):
            raise ProbeFailedError(f"{message.path} returned a vector that is not finite.")


def _are_finite(value: Any) -> bool:
    return all(map(_are_finite, value)) if isinstance(value, list) else _is_finite(value)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(slots=True)
class Stream:
    """The server-sent events of one answer, read as they arrive."""

    message: Message
    lines: AsyncIterator[str]
    begun: set[int] = field(default_factory=set)
    """The choices that have sent something."""
    reasons: dict[int, Any] = field(default_factory=dict)
    usage: Any = None

    async def until_all_began(self) -> None:
        """Read until every prompt of the request has its first token.

        Raises:
            ProbeFailedError: the stream ended earlier.
        """
        while len(self.begun) < self.message.prompts:
            if not await self._read_event():
                raise ProbeFailedError(
                    f"{self.message.path} ended before the first token of every choice."
                )

    async def to_its_end(self) -> None:
        """Read the rest.

        Raises:
            ProbeFailedError: what was streamed is not whole.
        """
        while await self._read_event():
            pass
        if len(self.begun) != self.message.prompts or self.reasons.keys() != self.begun:
            raise ProbeFailedError(f"{self.message.path} ended with an incomplete answer.")
        _check_ends(self.message, self.reasons.values())
        _check_usage(self.message, self.usage)

    async def _read_event(self) -> bool:
        """Read one event; False at the end of a whole stream."""
        try:
            async for line in self.lines:
                if not line.startswith("data:"):
                    continue
                text = line.removeprefix("data:").strip()
                if text == "[DONE]":
                    return False
                self._take(parsed(self.message, text))
                return True
        except httpx.HTTPError as error:
            raise ProbeFailedError(broken(self.message, error)) from error
        raise ProbeFailedError(f"{self.message.path} closed its stream without [DONE].")

    def _take(self, event: ProbeRequestBody) -> None:
        if "error" in event:
            text = _excerpt(json.dumps(event["error"]))
            raise ProbeFailedError(f"{self.message.path} streamed an error: {text}")
        self.usage = event.get("usage") or self.usage
        for choice in _list(event.get("choices")):
            index = _get(choice, "index")
            self.begun.add(index)
            if _get(choice, "finish_reason") is not None:
                self.reasons[index] = _get(choice, "finish_reason")


@asynccontextmanager
async def stream(client: httpx.AsyncClient, message: Message) -> AsyncIterator[Stream]:
    """Open a streamed answer; leaving early aborts the request.

    Raises:
        ProbeFailedError: the connection failed, or the status is not 200.
    """
    request = client.build_request(
        "POST", message.path, json=message.body, headers=message.headers, timeout=None
    )
    try:
        response = await client.send(request, stream=True)
    except httpx.HTTPError as error:
        raise ProbeFailedError(broken(message, error)) from error
    try:
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode("utf-8", "replace")
            raise ProbeFailedError(refusal(message, response.status_code, text))
        # Keep it here: an iterator of lines that is collected closes the response.
        events = Stream(message, _lines(response.aiter_bytes()))
        yield events
    finally:
        await response.aclose()


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the lines of server-sent events, each of which vLLM ends with a line feed.

    httpx also ends a line at U+0085, U+2028 and other characters, which JSON may hold unescaped:
    https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace")


def broken(message: Message, error: httpx.HTTPError) -> str:
    """Describe a connection that failed."""
    return f"{message.path} did not answer: {type(error).__name__} {error}"


def parsed(message: Message, text: str) -> ProbeRequestBody:
    """Return the JSON object in an answer.

    Raises:
        ProbeFailedError: the text is not a JSON object.
    """
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ProbeFailedError(f"{message.path} did not return a JSON object: {_excerpt(text)}")
    return answer


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _excerpt(text: str) -> str:
    return " ".join(text.split())[:_EXCERPT_CHARACTERS]
