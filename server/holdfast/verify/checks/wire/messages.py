"""Does the Messages API answer, at once and as a stream?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.verify.answers import dig, dig_or
from holdfast.verify.check import FROM_STANDARD, Check
from holdfast.verify.checks.asking import PROMPT, post_listed
from holdfast.verify.checks.twins import compare
from holdfast.verify.checks.wire.heads import (
    judge_name,
    require_same_input,
    require_strict,
)
from holdfast.verify.checks.wire.typed_events import (
    Order,
    TypedEvent,
    TypedSaid,
    joined,
    ordered,
    require_within,
    typed_events,
)
from holdfast.verify.streams import StreamedAnswer
from holdfast.verify.target import Answer
from holdfast.verify.trial import Trial

_MESSAGES = "/v1/messages"
_MAX_TOKENS = 48
_BLOCK = ("index",)
_INPUT_TOKENS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")

ORDER = Order(
    # https://docs.anthropic.com/en/api/messages-streaming
    types=frozenset(
        {
            "content_block_delta",
            "content_block_start",
            "content_block_stop",
            "error",
            "message_delta",
            "message_start",
            "message_stop",
            "ping",
        }
    ),
    first="message_start",
    lasts=frozenset({"message_stop"}),
    begins={"content_block_start": _BLOCK},
    goes_on={"content_block_delta": _BLOCK},
    ends={"content_block_stop": _BLOCK},
    between=frozenset({"message_delta", "message_stop"}),
)


async def messages(trial: Trial) -> None:
    """One question, at once and as a stream."""
    body = {
        "model": trial.server.model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
    }
    answer = await post_listed(trial, _MESSAGES, body)
    with trial.demanding_form(answer):
        require_strict(trial, answer)
        await _require_head(trial, answer, answer.document)
        dig(answer.document, "content", kind=list)
        dig(answer.document, "stop_reason", kind=str)
        _require_usage(trial, answer, answer.document)
    stream = await trial.stream(_MESSAGES, body)
    with trial.demanding_form(stream):
        require_strict(trial, stream)
        events = ordered(trial, stream, ORDER)
        await _require_head(trial, stream, dig(events[0].document, "message", kind=dict))
        _require_usage(trial, stream, _ending_of(events))
        told = (events[0].document.get("message"), _ending_of(events))
        counted = [_input_tokens(document) for document in told]
        require_same_input(trial, stream, counted, _input_tokens(answer.document))
    if not trial.faults:
        await compare(trial, _MESSAGES, body, _at_once, _in_parts)


async def _require_head(
    trial: Trial, answer: Answer | StreamedAnswer, message: Mapping[str, Any]
) -> None:
    kind = dig(message, "type", kind=str)
    trial.require(kind == "message", f"it is a {kind!r}", answer)
    role = dig(message, "role", kind=str)
    trial.require(role == "assistant", f"its role is {role!r}", answer)
    dig(message, "usage", "input_tokens", kind=int)
    await judge_name(trial, answer, message)


def _require_usage(
    trial: Trial, answer: Answer | StreamedAnswer, document: Mapping[str, Any]
) -> None:
    written = dig(document, "usage", "output_tokens", kind=int)
    require_within(trial, answer, written, _MAX_TOKENS)


def _input_tokens(document: Any) -> int:
    """The tokens read; those that a cache had or got are counted by themselves."""
    return sum(dig_or(document, "usage", name, default=0) for name in _INPUT_TOKENS)


def _at_once(answer: Answer) -> TypedSaid:
    blocks = dig(answer.document, "content", kind=list)
    return TypedSaid(
        joined(blocks, "text", "text"),
        joined(blocks, "thinking", "thinking"),
        dig(answer.document, "stop_reason", kind=str),
        dig(answer.document, "usage", "output_tokens", kind=int),
    )


def _in_parts(stream: StreamedAnswer) -> TypedSaid:
    events = typed_events(stream)
    deltas = [event.document.get("delta") for event in events]
    ending = _ending_of(events)
    return TypedSaid(
        joined(deltas, "text_delta", "text"),
        joined(deltas, "thinking_delta", "thinking"),
        dig(ending, "delta", "stop_reason", kind=str),
        dig(ending, "usage", "output_tokens", kind=int),
    )


def _ending_of(events: Sequence[TypedEvent]) -> dict[str, Any]:
    """The last `message_delta`, which has reason and usage; an empty one if there is none."""
    found = [event.document for event in events if event.type == "message_delta"]
    return found[-1] if found else {}


CHECKS = (
    Check(
        "messages",
        "wire",
        messages,
        "The Messages API answers in its form; its stream says the same, in order and with usage.",
        profiles=FROM_STANDARD,
        needs=("chat",),
    ),
)
