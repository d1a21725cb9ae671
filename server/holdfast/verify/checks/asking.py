"""Requests that checks of several groups make."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from holdfast.verify.answers import MalformedError, is_absent
from holdfast.verify.target import Answer
from holdfast.verify.trial import (
    CHAT,
    COMPLETIONS,
    InconclusiveError,
    SkippedError,
    Trial,
    UnexpectedStatusError,
)

PROMPT = "Count: one, two, three, four,"
"""Any model goes on from it."""

_NEITHER = "the server answers neither chats nor completions"


def either(trial: Trial, prompt: str, **options: Any) -> tuple[str, dict[str, Any]]:
    """Path and body of a completion, or of a chat where there are no completions."""
    able = trial.server.abilities
    if "completions" in able:
        return COMPLETIONS, trial.completion_body(prompt, **options)
    if "chat" in able:
        return CHAT, trial.chat_body(prompt, **options)
    raise SkippedError(_NEITHER)


def each(trial: Trial, prompt: str, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """Path and body for each of both APIs that there is."""
    able = trial.server.abilities
    bodies = {
        "chat": (CHAT, trial.chat_body(prompt, **options)),
        "completions": (COMPLETIONS, trial.completion_body(prompt, **options)),
    }
    return [asked for name, asked in bodies.items() if name in able]


async def judge_each(
    trial: Trial,
    judge: Callable[[Trial, str, dict[str, Any]], Awaitable[None]],
    prompt: str,
    **options: Any,
) -> None:
    """Judge each of both APIs, whatever becomes of the other one.

    Raises:
        InconclusiveError: one of them cannot be judged.
        MalformedError: an answer of one of them cannot be read.
        SkippedError: none of them can show what the check looks at.
    """
    skipped: list[SkippedError] = []
    unjudged: list[InconclusiveError | MalformedError] = []
    asked = each(trial, prompt, **options)
    for path, body in asked:
        try:
            await judge(trial, path, body)
        except SkippedError as error:
            skipped.append(error)
        except (InconclusiveError, MalformedError) as error:
            unjudged.append(error)
    if unjudged:
        raise unjudged[0]
    if len(skipped) == len(asked):
        raise skipped[0] if skipped else SkippedError(_NEITHER)
    trial.measure("APIs judged", len(asked) - len(skipped))


async def post_listed(trial: Trial, path: str, body: Mapping[str, Any]) -> Answer:
    """The answer to a request at a route that not every server has.

    Raises:
        NoAnswerError: there is none in time.
        SkippedError: the server does not list it, or says there that it does not have it.
        UnexpectedStatusError: it answers with another status than 200.
    """
    if path not in trial.server.routes:
        raise SkippedError(f"the server lists no {path}")
    try:
        return await trial.post(path, body)
    except UnexpectedStatusError as error:
        # vLLM lists what it has, and frameworks also what the model cannot do.
        if trial.server.is_vllm or not is_absent(error.status):
            raise
        raise SkippedError(f"the server does not have {path}: {error}") from None
