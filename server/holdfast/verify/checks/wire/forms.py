"""Has an answer the form that clients rely on?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from holdfast.verify.answers import dig, dig_or
from holdfast.verify.check import Check
from holdfast.verify.checks.asking import PROMPT, judge_each
from holdfast.verify.scoring import NO_PENALTIES
from holdfast.verify.target import PATIENT_SECONDS, Answer
from holdfast.verify.trial import CHAT, MODELS, InconclusiveError, SkippedError, Trial

FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
_CHOICES = 2
_TOP = 2
_TOKENS = 8
_OK, _REFUSED = 200, range(400, 500)
_ROUNDING = 1e-6


async def chat(trial: Trial) -> None:
    """A whole chat."""
    answer = await trial.chat(PROMPT, max_tokens=8)
    with trial.demanding_form(answer):
        _require_head(trial, answer, "chat.completion")
        await _judge_name(trial, answer)
        role = dig(answer.document, "choices", 0, "message", "role", kind=str)
        trial.require(role == "assistant", f"the role is {role!r} and not 'assistant'", answer)
        answer.content()


async def completion(trial: Trial) -> None:
    """A whole completion."""
    answer = await trial.complete(PROMPT, max_tokens=8)
    with trial.demanding_form(answer):
        _require_head(trial, answer, "text_completion")
        await _judge_name(trial, answer)
        dig(answer.document, "choices", 0, "text", kind=str)


def _require_head(trial: Trial, answer: Answer, kind: str) -> None:
    """What both APIs have in common."""
    document = answer.document
    is_json = answer.content_type.startswith("application/json")
    trial.require(is_json, f"its type is {answer.content_type}", answer)
    trial.require(dig(document, "id", kind=str), "its id is empty", answer)
    found = dig(document, "object", kind=str)
    trial.require(found == kind, f"it is a {found!r} and not a {kind!r}", answer)
    trial.require(dig(document, "created", kind=int) > 0, "`created` is not a time", answer)
    choices = len(dig(document, "choices", kind=list))
    trial.require(choices == 1, f"it has {choices} choices and not 1", answer)
    index = dig(document, "choices", 0, "index", kind=int)
    trial.require(index == 0, f"the index of its choice is {index}", answer)
    reason = answer.finish_reason()
    trial.require(reason in FINISH_REASONS, f"its finish reason is {reason!r}", answer)
    dig(document, "usage", kind=dict)


async def _judge_name(trial: Trial, answer: Answer) -> None:
    """Blame the name of another model that is listed; an alias is the same one.

    vLLM answers with the first of its `--served-model-name`, OpenAI with the name of a snapshot.
    """
    named, asked = dig(answer.document, "model", kind=str), trial.server.model
    if named == asked:
        return
    roots = await _roots(trial)
    told = f"it names the model {named!r} and not {asked!r}"
    is_alias = bool(roots.get(asked)) and roots.get(asked) == roots.get(named)
    if not named or (named in roots and not is_alias):
        trial.blame(told, answer)
    elif not is_alias:
        trial.warn(told, answer)


async def _roots(trial: Trial) -> dict[str, str]:
    """What each listed name stands for; empty where the server does not say."""
    listed = await trial.admitted(partial(trial.ask, MODELS))
    models: list[Any] = dig_or(listed.document, "data", default=[])
    return {dig_or(one, "id", default=""): dig_or(one, "root", default="") for one in models}


async def choices(trial: Trial) -> None:
    """Several answers to one prompt, at once and as streams."""
    await judge_each(trial, _judge_choices, PROMPT, max_tokens=6, n=_CHOICES, temperature=1.0)


async def _judge_choices(trial: Trial, path: str, body: dict[str, Any]) -> None:
    answer = await trial.admitted(partial(trial.ask, path, body))
    if answer.status in _REFUSED:
        raise SkippedError("the server returns one choice, whatever `n` is")
    with trial.demanding_form(answer):
        given = dig(answer.document, "choices", kind=list)
        numbers = sorted(dig(one, "index", kind=int) for one in given)
        wanted = [*range(_CHOICES)]
        trial.require(numbers == wanted, f"the choices are numbered {numbers}", answer)
    stream = await trial.stream(path, body)
    for index in range(_CHOICES):
        reason = stream.said(index).finish_reason
        trial.require(reason, f"the choice {index} of the stream does not end", stream)


async def logprobs(trial: Trial) -> None:
    """One log-probability for each token, and each of them a log-probability."""
    await judge_each(trial, _judge_logprobs, PROMPT, max_tokens=_TOKENS)


async def _judge_logprobs(trial: Trial, path: str, body: dict[str, Any]) -> None:
    is_chat = path == CHAT
    wish = {"logprobs": True, "top_logprobs": _TOP} if is_chat else {"logprobs": _TOP}
    own = NO_PENALTIES if trial.server.is_vllm else {}
    asking = partial(trial.ask, path, {**body, **wish, **own}, deadline_seconds=PATIENT_SECONDS)
    answer = await trial.admitted(asking, PATIENT_SECONDS)
    if answer.status in _REFUSED:
        raise SkippedError("the server gives no log-probabilities")
    if not trial.require(answer.status == _OK, f"its status is {answer.status}", answer):
        return
    is_cut = answer.finish_reason() == "length"
    tokens = _TOKENS if is_cut else dig(answer.usage(), "completion_tokens", kind=int)
    with trial.demanding_form(answer):
        found = _chat_logprobs(answer) if is_chat else _completion_logprobs(answer)
        trial.require(
            len(found) == tokens, f"{len(found)} log-probabilities for {tokens} tokens", answer
        )
        for position, (sampled, most) in enumerate(found):
            is_one = math.isfinite(sampled) and sampled <= _ROUNDING
            said = f"the log-probability at position {position} is {sampled}"
            trial.require(is_one, said, answer)
            said = f"the greedy token at position {position} is not the likeliest"
            trial.require(sampled >= most - _ROUNDING, said, answer)


def _chat_logprobs(answer: Answer) -> list[tuple[float, float]]:
    """For each token its log-probability, and the greatest of all."""
    entries = dig(answer.document, "choices", 0, "logprobs", "content", kind=list)
    return [
        (
            _number(entry, "logprob"),
            max(_number(one, "logprob") for one in dig(entry, "top_logprobs", kind=list)),
        )
        for entry in entries
    ]


def _completion_logprobs(answer: Answer) -> list[tuple[float, float]]:
    """As `_chat_logprobs`."""
    found = dig(answer.document, "choices", 0, "logprobs", kind=dict)
    sampled: Sequence[Any] = dig(found, "token_logprobs", kind=list)
    tops: Sequence[Any] = dig(found, "top_logprobs", kind=list)
    if len(sampled) != len(tops):
        raise InconclusiveError("`top_logprobs` and `token_logprobs` differ in length")
    return [
        (_as_float(one), max(map(_as_float, top.values())))
        for one, top in zip(sampled, tops, strict=True)
    ]


def _number(entry: Any, name: str) -> float:
    return _as_float(entry.get(name) if isinstance(entry, dict) else None)


def _as_float(value: Any) -> float:
    """The number; NaN for what is none, such as null."""
    return float(value) if isinstance(value, int | float) else math.nan


CHECKS = (
    Check(
        "chat",
        "wire",
        chat,
        "A chat has the fields, types and values that OpenAI's clients rely on.",
        needs=("chat",),
    ),
    Check(
        "completion",
        "wire",
        completion,
        "A completion has the fields, types and values that OpenAI's clients rely on.",
        needs=("completions",),
    ),
    Check("choices", "wire", choices, "`n` answers come with the numbers 0 to n - 1."),
    Check(
        "logprobs",
        "wire",
        logprobs,
        "Every token has one finite log-probability, and greedy tokens have the greatest.",
    ),
)
