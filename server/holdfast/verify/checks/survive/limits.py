"""Are requests at the limit served, and those beyond it refused?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.verify.answers import dig, excerpt
from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.checks.survive.asking import ask_large, require_consent, require_life
from holdfast.verify.trial import CHAT, COMPLETIONS, TOKENIZE, SkippedError, Trial

_OK, _BAD_REQUEST, _SERVER_ERROR = 200, 400, 500
_MIB = 1024 * 1024
_MOST_TOKENS = 2_000_000
"""The longest prompt: a server may claim any length, and the prompt has to fit into memory here."""
_ANY_TOKEN = 20
"""An id that every vocabulary has, where the server does not name one."""


@dataclass(frozen=True, slots=True)
class Large:
    """A request that no server has to take."""

    what: str
    path: str
    body: dict[str, Any] | None = None
    raw: str = ""


async def longest_prompt(trial: Trial) -> None:
    """A prompt that leaves room for one token is answered, and one too long is refused."""
    require_consent(trial)
    longest = trial.server.max_model_len
    if longest is None:
        raise SkippedError("the server does not say how long a context may be")
    if longest > _MOST_TOKENS:
        raise SkippedError(f"a prompt of {longest} tokens is longer than any that is sent here")
    tokens = await _tokens(trial)
    for count, is_served in ((longest - 1, True), (longest + 1, False), (longest - 1, True)):
        prompt = [tokens[at % len(tokens)] for at in range(count)]
        what = f"a prompt of {count} tokens"
        body = trial.completion_body(prompt, max_tokens=1)
        answer = await ask_large(trial, what, COMPLETIONS, body)
        if answer is None:
            trial.blame(f"{what} got no answer")
        elif is_served:
            said = f"{what} got {answer.status}: {excerpt(answer.text)}"
            trial.require(answer.status == _OK, said)
            if answer.status == _OK:
                counted = dig(answer.usage(), "prompt_tokens", kind=int)
                trial.require(counted == count, f"{what} is counted as {counted}")
        else:
            is_refused = _BAD_REQUEST <= answer.status < _SERVER_ERROR
            trial.require(is_refused, f"{what} got {answer.status} and no refusal")
    await require_life(trial)
    trial.measure("longest prompt", longest - 1, "tokens")


async def large_bodies(trial: Trial) -> None:
    """What is larger than any request gets no 5xx, and the server answers the next one."""
    require_consent(trial)
    asked = list(_large(trial))
    for one in asked:
        answer = await ask_large(trial, one.what, one.path, one.body, one.raw)
        if answer is not None:
            said = f"{one.what}: {answer.status}, and no refusal"
            trial.require(answer.status < _SERVER_ERROR, said)
        await require_life(trial)
    trial.measure("requests", len(asked))


async def _tokens(trial: Trial) -> list[int]:
    """The ids of a sentence, to fill a prompt with."""
    if "tokenize" not in trial.server.abilities:
        return [_ANY_TOKEN]
    asked = {"model": trial.server.model, "prompt": "The lamp on the harbor wall is lit."}
    told = await trial.post(TOKENIZE, asked)
    return dig(told.document, "tokens", kind=list) or [_ANY_TOKEN]


def _large(trial: Trial) -> Iterator[Large]:
    completion = trial.completion_body("", max_tokens=1)
    yield Large("a prompt of 8 MiB", COMPLETIONS, {**completion, "prompt": "a " * (4 * _MIB)})
    yield Large("a body of 40 MiB", COMPLETIONS, raw=" " * (40 * _MIB) + "{}")
    yield Large("arrays 50,000 deep", COMPLETIONS, raw="[" * 50_000 + "]" * 50_000)
    if "chat" in trial.server.abilities:
        many = [{"role": "user", "content": "Hi"}] * 20_000
        yield Large("20,000 messages", CHAT, trial.chat_body(many, max_tokens=1))


CHECKS = (
    Check(
        "longest_prompt",
        "survive",
        longest_prompt,
        "The longest prompt is answered, a longer one is refused, and the server goes on.",
        profiles=FROM_STANDARD,
        needs=("completions",),
        deadline_seconds=3600.0,
    ),
    Check(
        "large_bodies",
        "survive",
        large_bodies,
        "Bodies of many megabytes, levels or messages get no 5xx, and the server goes on.",
        profiles=FROM_STANDARD,
        needs=("completions",),
        deadline_seconds=3600.0,
    ),
)
