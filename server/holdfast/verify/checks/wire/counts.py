"""Is what is counted, and paid for, what was read and written?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.verify.answers import dig
from holdfast.verify.check import Check
from holdfast.verify.checks.asking import PROMPT, each
from holdfast.verify.records import equal_to
from holdfast.verify.streams import StreamedAnswer
from holdfast.verify.target import Answer
from holdfast.verify.trial import (
    CHAT,
    COMPLETIONS,
    SkippedError,
    Trial,
    UnexpectedStatusError,
)

_MAX_TOKENS = 7
_REFUSED = range(400, 500)
_IDS = tuple(range(20, 33))
"""A prompt of token ids; every vocabulary has them."""
_UNUSUAL = "naïve 北京 \N{SLIGHTLY SMILING FACE}\n\ttabs  and  spaces 0.1e-5"
_CONVERSATION = (
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "And of Italy?"},
)


async def usage(trial: Trial) -> None:
    """The tokens that were written, at once and as a stream."""
    for path, body in each(trial, PROMPT, max_tokens=_MAX_TOKENS):
        whole = await trial.post(path, body)
        with trial.demanding_form(whole):
            _require_sums(trial, whole.usage(), whole.finish_reason(), whole)
        stream = await trial.stream(path, body)
        reason = stream.said().finish_reason
        with trial.demanding_form(stream):
            _require_sums(trial, stream.usage(), reason, stream)


def _require_sums(
    trial: Trial, counted: Mapping[str, Any], reason: str, answer: Answer | StreamedAnswer
) -> None:
    asked = dig(counted, "prompt_tokens", kind=int)
    answered = dig(counted, "completion_tokens", kind=int)
    total = dig(counted, "total_tokens", kind=int)
    said = f"{asked} and {answered} tokens are said to be {total}"
    trial.require(asked + answered == total, said, answer)
    is_right = answered == _MAX_TOKENS if reason == "length" else 0 <= answered <= _MAX_TOKENS
    said = f"{answered} tokens were written, ended by {reason}, with max_tokens {_MAX_TOKENS}"
    trial.require(is_right, said, answer)


async def prompt_tokens(trial: Trial) -> None:
    """The tokens that were read, against the server's own tokenizer.

    Raises:
        SkippedError: it answers only chats, which `/tokenize` does not accept.
    """
    counted_prompts = wrong = 0
    for body in _prompts(trial):
        path = CHAT if "messages" in body else COMPLETIONS
        ids = body.get("prompt")
        is_ids = isinstance(ids, list)
        try:
            wanted = len(_IDS) if is_ids else await _counted(trial, body)
        except SkippedError:
            if "completions" not in trial.server.abilities:
                raise
            trial.warn("/tokenize does not accept chats, so their tokens are not judged")
            continue
        if wanted is None:
            continue
        counted_prompts += 1
        whole = await trial.post(path, body)
        stream = await trial.stream(path, body)
        for answer in (whole, stream):
            counted = dig(answer.usage(), "prompt_tokens", kind=int)
            said = f"the prompt is said to have {counted} tokens and has {wanted}"
            wrong += not trial.require(counted == wanted, said, answer)
    trial.measure("wrong counts", wrong, limit=equal_to(0))
    trial.measure("prompts", counted_prompts)


async def _counted(trial: Trial, body: Mapping[str, Any]) -> int | None:
    """The tokens that `/tokenize` counts; None for a chat that the server does not answer either.

    Only one with a system role, which a chat template may refuse, as that of Gemma 2 does.

    Raises:
        SkippedError: `/tokenize` does not accept chats.
        UnexpectedStatusError: it refuses what the server answers.
    """
    try:
        return await trial.count_tokens(body)
    except UnexpectedStatusError as error:
        roles = [said["role"] for said in body.get("messages", ())]
        if "system" not in roles or error.status not in _REFUSED:
            raise
        try:
            await trial.post(CHAT, body)
        except UnexpectedStatusError as refusal:
            if refusal.status not in _REFUSED:
                raise
            trial.warn(f"the server refuses a chat, so its tokens are not judged: {refusal}")
            return None
        raise


def _prompts(trial: Trial) -> list[dict[str, Any]]:
    able, bodies = trial.server.abilities, []
    if "chat" in able:
        asked = (PROMPT, _UNUSUAL, _CONVERSATION)
        bodies += [trial.chat_body(one, max_tokens=1) for one in asked]
    if "completions" in able:
        given = (PROMPT, _UNUSUAL, list(_IDS))
        bodies += [trial.completion_body(one, max_tokens=1) for one in given]
    return bodies


CHECKS = (
    Check(
        "usage",
        "wire",
        usage,
        "`usage` adds up, and counts the tokens written: `max_tokens`, if that ended the answer.",
    ),
    Check(
        "prompt_tokens",
        "wire",
        prompt_tokens,
        "`usage.prompt_tokens` is what `/tokenize` counts, at once and as a stream.",
        needs=("tokenize",),
    ),
)
