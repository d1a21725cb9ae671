"""Has an answer the form that clients rely on?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from holdfast.verify.answers import MalformedError, dig, excerpt
from holdfast.verify.check import Check
from holdfast.verify.checks.asking import PROMPT, judge_each
from holdfast.verify.checks.wire.heads import has_no_error, judge_name, require_strict
from holdfast.verify.scoring import NO_PENALTIES
from holdfast.verify.target import PATIENT_SECONDS, THOUGHT_BEGINS, Answer
from holdfast.verify.trial import CHAT, SkippedError, Trial

FINISH_REASONS = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})
_CHOICES = 2
_TOP = 2
_TOKENS = 8
_OK, _REFUSED = 200, range(400, 500)
_ROUNDING = 1e-6
_TOLD_APART = 0.01
"""How far the same log-probability may differ in two places: one may have fewer digits."""
_SPELLED_AS_ID = "token_id:"
"""How vLLM spells every token with `--return-tokens-as-token-ids`."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_SHOWN = 80
"""Characters of the tokens, in a fault."""


async def chat(trial: Trial) -> None:
    """A whole chat."""
    answer = await trial.chat(PROMPT, max_tokens=8)
    with trial.demanding_form(answer):
        _require_head(trial, answer, "chat.completion")
        await judge_name(trial, answer, answer.document)
        role = dig(answer.document, "choices", 0, "message", "role", kind=str)
        trial.require(role == "assistant", f"the role is {role!r} and not 'assistant'", answer)
        answer.content()


async def completion(trial: Trial) -> None:
    """A whole completion."""
    answer = await trial.complete(PROMPT, max_tokens=8)
    with trial.demanding_form(answer):
        _require_head(trial, answer, "text_completion")
        await judge_name(trial, answer, answer.document)
        dig(answer.document, "choices", 0, "text", kind=str)


def _require_head(trial: Trial, answer: Answer, kind: str) -> None:
    """What both APIs have in common."""
    document = answer.document
    require_strict(trial, answer)
    is_json = answer.content_type.lower().startswith("application/json")
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


async def choices(trial: Trial) -> None:
    """Several answers to one prompt, at once and as streams."""
    await judge_each(trial, _judge_choices, PROMPT, max_tokens=6, n=_CHOICES, temperature=1.0)


async def _judge_choices(trial: Trial, path: str, body: dict[str, Any]) -> None:
    answer = await trial.admitted(partial(trial.ask, path, body))
    if answer.status in _REFUSED:
        raise SkippedError("the server returns one choice, whatever `n` is")
    if not trial.require(answer.status == _OK, f"its status is {answer.status}", answer):
        return
    with trial.demanding_form(answer):
        given = dig(answer.document, "choices", kind=list)
        numbers = sorted(dig(one, "index", kind=int) for one in given)
        wanted = [*range(_CHOICES)]
        trial.require(numbers == wanted, f"the choices are numbered {numbers}", answer)
    stream = await trial.stream(path, body)
    if not has_no_error(trial, stream):
        return
    told = [dig(one, "choices", kind=list) for one in stream.documents]
    numbers = sorted({dig(choice, "index", kind=int) for choices in told for choice in choices})
    trial.require(
        set(numbers) <= set(range(_CHOICES)), f"its choices are numbered {numbers}", stream
    )
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
    with trial.demanding_form(answer):
        if not has_no_error(trial, answer):
            return
        is_cut = answer.finish_reason() == "length"
        tokens = _TOKENS if is_cut else dig(answer.usage(), "completion_tokens", kind=int)
        require_strict(trial, answer)
        found = _chat_logprobs(answer) if is_chat else _completion_logprobs(answer)
        trial.require(
            len(found) == tokens, f"{len(found)} log-probabilities for {tokens} tokens", answer
        )
        for position, told in enumerate(found):
            for fault in _faults_of(told):
                trial.blame(f"at position {position}, {fault}", answer)
        _require_spelling(trial, answer, found)


@dataclass(frozen=True, slots=True)
class _Position:
    """What an answer tells of one of its tokens."""

    token: str
    spelled: bytes | None
    """The token's own bytes, which may be a part of a character; None if they are not told."""
    sampled: float
    most_likely: Sequence[float]
    """The greatest log-probabilities."""
    is_in_order: bool
    """Whether these begin with the greatest, where they have an order."""
    may_share_entries: bool = False
    """Whether tokens of one spelling have one entry, as in the object of a completion."""


def _faults_of(told: _Position) -> Iterator[str]:
    """What is wrong with the numbers of a greedy token."""
    is_one = math.isfinite(told.sampled) and told.sampled <= _ROUNDING
    if not is_one:
        yield f"the log-probability is {told.sampled}"
    if not told.most_likely:
        yield "no most likely tokens are listed"
        return
    if not all(map(math.isfinite, told.most_likely)):
        yield "a log-probability of the most likely tokens is not a finite number"
        return
    most = max(told.most_likely)
    if is_one and told.sampled < most - _ROUNDING:
        yield "the greedy token is not the likeliest"
    is_complete = not told.may_share_entries or len(told.most_likely) >= _TOP
    if is_one and is_complete and told.sampled > most + _TOLD_APART:
        yield f"the greedy token has {told.sampled}, and the likeliest one {most}"
    if not told.is_in_order:
        yield "the most likely tokens do not begin with the likeliest"


def _require_spelling(trial: Trial, answer: Answer, found: Sequence[_Position]) -> None:
    """Blame tokens that the answer cannot consist of.

    The tokens may spell more: marks around thoughts, and the end. Some servers spell tokens without
    the spaces before them, or cannot spell parts of a character.
    """
    said = answer.content().strip().removeprefix(THOUGHT_BEGINS)  # some servers add it
    if _BROKEN in said:  # and vLLM leaves what it cannot decode out of the tokens
        return
    spelled = "".join(told.token for told in found)
    is_spelled = _spells(spelled, filter(_is_plain, said))
    parts = [told.spelled for told in found if told.spelled is not None]
    text = b"".join(parts).decode("utf-8", "replace")
    if len(parts) == len(found) and _BROKEN not in text:
        spelled = text if is_spelled else spelled
        is_spelled = is_spelled and _spells(text, (one for one in said if not one.isspace()))
    are_ids = bool(found) and all(told.token.startswith(_SPELLED_AS_ID) for told in found)
    wrong = f"its tokens do not spell the answer, but {excerpt(spelled, _SHOWN)!r}"
    trial.require(is_spelled or are_ids, wrong, answer)


def _spells(spelled: str, characters: Iterable[str]) -> bool:
    """Whether the characters come in the text in their order."""
    left = iter(spelled)
    return all(one in left for one in characters)


def _is_plain(character: str) -> bool:
    """Whether it is printed, and a token of its own or whole in one."""
    return "!" <= character <= "~"


def _chat_logprobs(answer: Answer) -> list[_Position]:
    """What a chat tells, token by token."""
    entries = dig(answer.document, "choices", 0, "logprobs", "content", kind=list)
    return [_position_of(entry) for entry in entries]


def _position_of(entry: Any) -> _Position:
    most_likely = [_number(one, "logprob") for one in dig(entry, "top_logprobs", kind=list)]
    is_in_order = all(
        one >= following - _TOLD_APART
        for one, following in pairwise(most_likely)
        if math.isfinite(one) and math.isfinite(following)
    )
    token, sampled = dig(entry, "token", kind=str), _number(entry, "logprob")
    return _Position(token, _bytes_of(entry), sampled, most_likely, is_in_order)


def _bytes_of(entry: Any) -> bytes | None:
    """The bytes of a token.

    Raises:
        MalformedError: they are not a list of bytes.
    """
    if entry.get("bytes") is None:
        return None
    try:
        return bytes(dig(entry, "bytes", kind=list))
    except (TypeError, ValueError):
        raise MalformedError("the bytes of a token are not bytes") from None


def _completion_logprobs(answer: Answer) -> list[_Position]:
    """As `_chat_logprobs`; an object has no order."""
    found = dig(answer.document, "choices", 0, "logprobs", kind=dict)
    tokens: Sequence[Any] = dig(found, "tokens", kind=list)
    sampled: Sequence[Any] = dig(found, "token_logprobs", kind=list)
    tops: Sequence[Any] = dig(found, "top_logprobs", kind=list)
    if not len(tokens) == len(sampled) == len(tops):
        raise MalformedError(
            f"logprobs has {len(tokens)} tokens, {len(sampled)} token_logprobs and "
            f"{len(tops)} top_logprobs"
        )
    return [
        _Position(
            dig(tokens, at, kind=str),
            None,
            _as_float(sampled[at]),
            [_as_float(one) for one in dig(tops, at, kind=dict).values()],
            is_in_order=True,
            may_share_entries=True,
        )
        for at in range(len(tokens))
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
        "Every token has its text and one finite log-probability, and greedy tokens have the "
        "greatest.",
    ),
)
