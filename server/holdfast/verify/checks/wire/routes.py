"""What of the other routes?"""

from __future__ import annotations

from typing import Any

from holdfast.verify.answers import dig
from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.target import Answer
from holdfast.verify.trial import SkippedError, Trial

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
_OTHERS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Hello"},
    "/v1/score": {"text_1": "Hello", "text_2": "Hi"},
    "/v1/rerank": {"query": "Hello", "documents": ["Hi"]},
    "/pooling": {"input": "Hello"},
    "/classify": {"input": "Hello"},
    "/detokenize": {"tokens": [20, 21]},
}
_OK, _NOT_IMPLEMENTED = 200, 501
_MAX_TOKENS = 16


async def responses(trial: Trial) -> None:
    """The Responses API, as far as one question goes."""
    body = {"model": trial.server.model, "input": "Hello!", "max_output_tokens": _MAX_TOKENS}
    answer = await _asked(trial, RESPONSES, body)
    with trial.demanding_form(answer):
        kind = dig(answer.document, "object", kind=str)
        trial.require(kind == "response", f"it is a {kind!r}", answer)
        status = dig(answer.document, "status", kind=str)
        trial.require(status in ("completed", "incomplete"), f"its status is {status!r}", answer)
        trial.require(dig(answer.document, "output", kind=list), "it has no output", answer)
        written = dig(answer.document, "usage", "output_tokens", kind=int)
        is_within = 0 <= written <= _MAX_TOKENS
        trial.require(is_within, f"{written} tokens with a maximum of {_MAX_TOKENS}", answer)


async def messages(trial: Trial) -> None:
    """The Messages API, as far as one question goes."""
    asked = [{"role": "user", "content": "Hello!"}]
    body = {"model": trial.server.model, "messages": asked, "max_tokens": _MAX_TOKENS}
    answer = await _asked(trial, MESSAGES, body)
    with trial.demanding_form(answer):
        kind = dig(answer.document, "type", kind=str)
        trial.require(kind == "message", f"it is a {kind!r}", answer)
        role = dig(answer.document, "role", kind=str)
        trial.require(role == "assistant", f"its role is {role!r}", answer)
        dig(answer.document, "content", kind=list)
        dig(answer.document, "stop_reason", kind=str)
        written = dig(answer.document, "usage", "output_tokens", kind=int)
        is_within = 0 <= written <= _MAX_TOKENS
        trial.require(is_within, f"{written} tokens with a maximum of {_MAX_TOKENS}", answer)


async def _asked(trial: Trial, path: str, body: dict[str, Any]) -> Answer:
    """The answer, if the server has the route.

    Raises:
        SkippedError: it has not.
    """
    if path not in trial.server.routes:
        raise SkippedError(f"the server lists no {path}")
    return await trial.post(path, body)


async def other_routes(trial: Trial) -> None:
    """What a model cannot do is refused, and does not look like a failure of the server."""
    listed = [path for path in _OTHERS if path in trial.server.routes]
    if not listed:
        raise SkippedError("the server lists no other routes")
    for path in listed:
        answer = await trial.ask(path, {"model": trial.server.model, **_OTHERS[path]})
        is_told = answer.status < 500 or answer.status == _NOT_IMPLEMENTED
        trial.require(is_told, f"{path} gets {answer.status}", answer)
    trial.measure("other routes", len(listed))


CHECKS = (
    Check(
        "responses",
        "wire",
        responses,
        "The Responses API answers a question in its form.",
        profiles=FROM_STANDARD,
        needs=("chat",),
    ),
    Check(
        "messages",
        "wire",
        messages,
        "The Messages API answers a question in its form.",
        profiles=FROM_STANDARD,
        needs=("chat",),
    ),
    Check(
        "other_routes",
        "wire",
        other_routes,
        "What the model cannot do gets a 4xx or 501, and never 500.",
        profiles=FROM_STANDARD,
    ),
)
