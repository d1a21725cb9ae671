"""Is a request that is wrong refused, in words, and by the right side?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.verify.answers import dig, is_absent
from holdfast.verify.check import Check
from holdfast.verify.checks.asking import PROMPT, either
from holdfast.verify.target import Answer
from holdfast.verify.trial import CHAT, COMPLETIONS, Trial

_MAX_ASKED_TOKENS = 300_000
"""A longer prompt would exceed the limits of bodies that servers have."""
_REFUSED = range(400, 500)
_OF_VLLM = (404, 405)
"""How it says that it has no such route, or not for this method."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """A request that no server can do."""

    what: str
    path: str
    body: dict[str, Any] | None = None
    raw: str = ""
    statuses: range | tuple[int, ...] = _REFUSED


async def refusals(trial: Trial) -> None:
    """Each wrong request gets a status of its own fault and OpenAI's form of an error."""
    wrong = [one for one in _wrong(trial) if _is_there(trial, one.path)]
    for one in wrong:
        # Not even 429 is a refusal here: a server that limits requests gives it to any of them.
        answer = await trial.admitted(partial(trial.ask, one.path, one.body, raw=one.raw))
        is_refused = answer.status in one.statuses
        if trial.require(is_refused, f"{one.what} gets {answer.status}", answer):
            _require_form(trial, one, answer)
    for method, path in (("GET", "/v1/none"), ("PUT", CHAT)):
        answer = await trial.admitted(partial(trial.ask, path, method=method))
        said = f"{method} {path} gets {answer.status}"
        is_told = answer.status in _OF_VLLM
        if not trial.server.is_vllm:  # AWS API Gateway, for example, says it with 403
            is_told = answer.status in _REFUSED or is_absent(answer.status)
        trial.require(is_told, said, answer)
    trial.measure("wrong requests", len(wrong))
    path, body = either(trial, PROMPT, max_tokens=1)
    await trial.post(path, body)


def _require_form(trial: Trial, wrong: Wrong, answer: Answer) -> None:
    with trial.demanding_form(answer):
        said = f"{wrong.what} is refused without a message"
        trial.require(dig(answer.document, "error", "message", kind=str), said, answer)
        dig(answer.document, "error", "type", kind=str)


def _is_there(trial: Trial, path: str) -> bool:
    return {CHAT: "chat", COMPLETIONS: "completions"}[path] in trial.server.abilities


def _wrong(trial: Trial) -> Iterator[Wrong]:
    model = trial.server.model
    chat, completion = trial.chat_body(PROMPT), trial.completion_body(PROMPT)
    yield Wrong("a body that is not JSON", CHAT, raw='{"model": ')
    yield Wrong("a body that is not an object", CHAT, raw="[1, 2]")
    yield Wrong("a chat without messages", CHAT, {"model": model})
    yield Wrong("messages that are a text", CHAT, {**chat, "messages": "Hello"})
    yield Wrong("an unknown model", CHAT, {**chat, "model": f"{model}-none"}, statuses=(400, 404))
    yield Wrong("a temperature in words", CHAT, {**chat, "temperature": "warm"})
    yield Wrong("a negative temperature", CHAT, {**chat, "temperature": -1})
    yield Wrong("a `top_p` above 1", CHAT, {**chat, "top_p": 7})
    yield Wrong("a `max_tokens` in words", CHAT, {**chat, "max_tokens": "many"})
    yield Wrong("a stop that is an object", CHAT, {**chat, "stop": {"a": 1}})
    yield Wrong("a completion without a prompt", COMPLETIONS, {"model": model})
    yield Wrong("no answer at all", COMPLETIONS, {**completion, "n": 0})
    yield Wrong("a prompt that is an object", COMPLETIONS, {**completion, "prompt": {"a": 1}})
    longest = trial.server.max_model_len
    if longest and longest < _MAX_ASKED_TOKENS:
        too_long = {**completion, "prompt": [20] * (longest + 1)}
        yield Wrong("a prompt longer than the context", COMPLETIONS, too_long)


CHECKS = (
    Check(
        "refusals",
        "wire",
        refusals,
        "A wrong request gets a 4xx in OpenAI's form, never a 5xx, and the server goes on.",
    ),
)
