"""Log-probs of token sequences, in the ways that `/v1/completions` of vLLM offers.

Sequences are token ids, so that nothing depends on how a text is cut into tokens. `prompt_logprobs`
tells the log-probs of a prompt, which is teacher forcing: each position has the same context in any
run, and a difference at one of them hides none behind it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from holdfast.verify.agreement import Scores, TopLogProbs
from holdfast.verify.answers import MalformedError, dig, dig_or
from holdfast.verify.baseline import WIDTH
from holdfast.verify.target import PATIENT_SECONDS, Answer
from holdfast.verify.trial import SkippedError, Trial, UnexpectedStatusError

NO_PENALTIES: Mapping[str, float] = MappingProxyType(
    {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
)
"""vLLM otherwise takes those of the model's `generation_config.json`, and reports log-probs before
it applies them: a greedy token need not be the likeliest then."""
_MIN_LOG_PROB = -9000.0
"""vLLM writes -9999 in place of minus infinity, which JSON lacks."""
_MAX_LOG_PROB = 0.01
_ID_PREFIX = "token_id:"
_GRAMMAR = "structured_outputs"
_REMEDY = "serve the model with Holdfast or with vLLM"
_REFUSED = (400, 422)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A greedy answer."""

    token_ids: tuple[int, ...]
    scores: Scores
    """The log-probs at the positions after the prompt."""
    fingerprint: str
    """`system_fingerprint`; empty if there is none."""
    text: str
    """What the server says that the tokens spell."""


async def token_ids_of(trial: Trial, text: str) -> list[int]:
    """The token ids of a text, as a prompt has them.

    Raises:
        SkippedError: the server does not report them.
    """
    answer = await _accepted(trial, text, max_tokens=1, return_token_ids=True)
    return _ids(dig(answer.document, "choices", 0, kind=dict), "prompt_token_ids")


async def scored(
    trial: Trial, ids: Sequence[int], *, width: int = WIDTH, salt: str = "", **options: Any
) -> Scores:
    """The log-probs at every position of a prompt but the first, and at the one behind it.

    vLLM does not look into its prefix cache for `prompt_logprobs`: this is one prefill.

    Raises:
        SkippedError: the server does not report them.
        MalformedError: one of them is not the logarithm of a probability.
    """
    asked = {"prompt_logprobs": width, **options}
    answer = await _completed(trial, ids, max_tokens=1, width=width, salt=salt, **asked)
    with _naming(answer):
        choice = dig(answer.document, "choices", 0, kind=dict)
        entries = choice.get("prompt_logprobs")
        if not isinstance(entries, list):
            raise SkippedError("the server does not report the log-probs of a prompt", _REMEDY)
        if len(entries) != len(ids):
            raise MalformedError(f"{len(entries)} log-probs for a prompt of {len(ids)} tokens")
        scores = {at: _prompt_top(entries[at], at, ids[at]) for at in range(1, len(ids))}
        return {**scores, **_answered(choice, len(ids), 1).scores}


async def decoded(
    trial: Trial,
    ids: Sequence[int],
    count: int,
    *,
    width: int = WIDTH,
    salt: str = "",
    **options: Any,
) -> Decoded:
    """A greedy answer of `count` tokens, with its log-probs.

    A prompt with a `salt` of its own, which is the default, meets no prefix of another request.
    It has fewer tokens only where a grammar allows no more.

    Raises:
        SkippedError: the server does not report its tokens.
        MalformedError: a log-prob is not the logarithm of a probability, or there are fewer tokens
            or more.
    """
    answer = await _completed(trial, ids, max_tokens=count, width=width, salt=salt, **options)
    with _naming(answer):
        choice = dig(answer.document, "choices", 0, kind=dict)
        found = _answered(choice, len(ids), count, may_end=_GRAMMAR in options)
    text = dig_or(choice, "text", default="")
    fingerprint = dig_or(answer.document, "system_fingerprint", default="")
    return Decoded(found.token_ids, found.scores, fingerprint, text)


async def written(trial: Trial, ids: Sequence[int], count: int) -> list[int]:
    """The tokens of a greedy answer that is asked without log-probs, as most clients ask.

    Raises:
        SkippedError: the server does not report them.
        MalformedError: there are fewer tokens, or more.
    """
    answer = await _completed(trial, ids, max_tokens=count, width=None, salt="")
    with _naming(answer):
        return _answer_ids(dig(answer.document, "choices", 0, kind=dict), count)


async def next_top(
    trial: Trial, ids: Sequence[int], *, width: int = WIDTH, salt: str = "", **options: Any
) -> TopLogProbs:
    """The log-probs at the position behind a prompt, as `decoded`."""
    made = await decoded(trial, ids, 1, width=width, salt=salt, **options)
    return made.scores[len(ids)]


async def _completed(
    trial: Trial,
    ids: Sequence[int],
    *,
    max_tokens: int,
    width: int | None,
    salt: str,
    **options: Any,
) -> Answer:
    asked = {
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "logprobs": width,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": salt or secrets.token_hex(8),
        **NO_PENALTIES,
        **options,
    }
    return await _accepted(trial, list(ids), **asked)


async def _accepted(trial: Trial, prompt: str | list[int], **asked: Any) -> Answer:
    """The answer to a completion with options of vLLM's own, which another server may refuse.

    Raises:
        SkippedError: it refuses them, and has not taken as much before in this run.
    """
    taken, width = await trial.once(_taken), asked.get("logprobs") or 0
    has_prompt = "prompt_logprobs" in asked
    try:
        answer = await trial.complete(prompt, deadline_seconds=PATIENT_SECONDS, **asked)
    except UnexpectedStatusError as error:
        is_known = taken.get(has_prompt, -1) >= width
        # A list that is wider than what every check needs is for its own check to judge.
        if error.status not in _REFUSED or is_known or width > WIDTH:
            raise
        raise SkippedError(
            f"the server refuses options of vLLM: {error}",
            f"{_REMEDY}, and with --max-logprobs {WIDTH} or more",
        ) from None
    taken[has_prompt] = max(taken.get(has_prompt, 0), width)
    return answer


async def _taken(_trial: Trial) -> dict[bool, int]:
    """The width of the widest lists that were told so far: if a prompt has them, and if not."""
    return {}


@contextmanager
def _naming(answer: Answer) -> Iterator[None]:
    """What is malformed here names the request that it answers."""
    try:
        yield
    except MalformedError as error:
        error.request = answer.request
        raise


def _answered(
    choice: Mapping[str, Any], first: int, count: int, *, may_end: bool = False
) -> Decoded:
    """The answer of a choice whose first token stands at position `first`."""
    ids = _answer_ids(choice, count, may_end=may_end)
    logprobs = choice.get("logprobs")
    tops = logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(tops, list):
        raise SkippedError("the server does not report the log-probs of an answer", _REMEDY)
    if len(tops) != len(ids):
        raise MalformedError(f"{len(tops)} log-probs for an answer of {len(ids)} tokens")
    scores = {
        first + offset: _answer_top(top, first + offset, token)
        for offset, (top, token) in enumerate(zip(tops, ids, strict=True))
    }
    return Decoded(tuple(ids), scores, "", "")


def _answer_ids(choice: Mapping[str, Any], count: int, *, may_end: bool = False) -> list[int]:
    """The tokens of an answer that the end of a text does not end: `ignore_eos`."""
    ids = _ids(choice, "token_ids")
    if len(ids) > count or (len(ids) < count and not (ids and may_end)):
        raise MalformedError(f"the answer has {len(ids)} tokens, and {count} were asked for")
    return ids


def _ids(choice: Any, name: str) -> list[int]:
    found = choice.get(name) if isinstance(choice, dict) else None
    if not isinstance(found, list) or not all(type(one) is int for one in found):
        raise SkippedError("the server does not report token ids (return_token_ids)", _REMEDY)
    return found


def _prompt_top(entry: Any, at: int, token: int) -> TopLogProbs:
    if not isinstance(entry, dict):
        raise MalformedError(f"position {at} of the prompt has no log-probs")
    values = {key: dig(value, kind=dict).get("logprob") for key, value in entry.items()}
    return _checked(values, at, token)


def _answer_top(entry: Any, at: int, token: int) -> TopLogProbs:
    if not isinstance(entry, dict):
        raise MalformedError(f"position {at}, in the answer, has no log-probs")
    if not all(key.startswith(_ID_PREFIX) for key in entry):
        raise SkippedError("the server does not name tokens by their ids", _REMEDY)
    values = {key.removeprefix(_ID_PREFIX): value for key, value in entry.items()}
    return _checked(values, at, token)


def _checked(values: Mapping[str, Any], at: int, token: int) -> TopLogProbs:
    """By token id, each the logarithm of a probability."""
    top = {}
    for key, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _MIN_LOG_PROB < value <= _MAX_LOG_PROB:
            raise MalformedError(f"at position {at} the log-prob of token {key} is {value}")
        top[int(key)] = float(value)
    if token not in top:
        raise MalformedError(f"position {at} has no log-prob of its token {token}")
    if math.fsum(map(math.exp, top.values())) > 1 + _MAX_LOG_PROB:
        raise MalformedError(f"at position {at} the probabilities are more than 1 together")
    return top


async def is_raw(trial: Trial, ids: Sequence[int]) -> bool:
    """Whether log-probs are told as they are before a bias, as vLLM does by default."""
    before = await next_top(trial, ids)
    best = max(before, key=before.__getitem__)
    try:
        biased = await next_top(trial, ids, logit_bias={str(best): -50})
    except UnexpectedStatusError:
        return False
    return best in biased and abs(biased[best] - before[best]) < 1
