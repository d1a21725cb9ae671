"""Does the Responses API answer, at once and as a stream?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from itertools import pairwise
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

RESPONSES = "/v1/responses"
_MAX_TOKENS = 48
_ITEM, _PART = ("output_index",), ("output_index", "content_index")
_TEXT, _THOUGHT = "response.output_text.delta", "response.reasoning_text.delta"
_TEXT_ENDS = "response.output_text.done"
_ENDS = frozenset({"response.completed", "response.incomplete"})

ORDER = Order(
    # https://platform.openai.com/docs/api-reference/responses-streaming
    types=_ENDS
    | {
        "error",
        "response.content_part.added",
        "response.content_part.done",
        "response.created",
        "response.failed",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.output_text.annotation.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.queued",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.refusal.delta",
        "response.refusal.done",
    },
    first="response.created",
    lasts=_ENDS,
    begins={"response.output_item.added": _ITEM, "response.content_part.added": _PART},
    # Some servers begin no part for thoughts, and clients need none.
    goes_on={_TEXT: _PART, _TEXT_ENDS: _PART, _THOUGHT: _ITEM},
    ends={"response.content_part.done": _PART, "response.output_item.done": _ITEM},
    between=_ENDS,
)


async def responses(trial: Trial) -> None:
    """One question, at once and as a stream."""
    body = {
        "model": trial.server.model,
        "input": PROMPT,
        "max_output_tokens": _MAX_TOKENS,
        "temperature": 0,
    }
    answer = await post_listed(trial, RESPONSES, body)
    with trial.demanding_form(answer):
        require_strict(trial, answer)
        await _require_form(trial, answer, answer.document)
    stream = await trial.stream(RESPONSES, body)
    with trial.demanding_form(stream):
        require_strict(trial, stream)
        events = ordered(trial, stream, ORDER)
        await _require_whole(trial, stream, events)
        fault = fault_of_ends(events)
        trial.require(not fault, fault, stream)
        counted = _input_tokens(dig(events[-1].document, "response", kind=dict))
        require_same_input(trial, stream, [counted], _input_tokens(answer.document))
    if not trial.faults:
        await compare(trial, RESPONSES, body, _at_once, _in_parts)


async def _require_form(
    trial: Trial, answer: Answer | StreamedAnswer, response: Mapping[str, Any]
) -> None:
    kind = dig(response, "object", kind=str)
    trial.require(kind == "response", f"it is a {kind!r}", answer)
    status = dig(response, "status", kind=str)
    trial.require(status in ("completed", "incomplete"), f"its status is {status!r}", answer)
    trial.require(dig(response, "output", kind=list), "it has no output", answer)
    usage = dig(response, "usage", kind=dict)
    written = dig(usage, "output_tokens", kind=int)
    require_within(trial, answer, written, _MAX_TOKENS)
    asked, total = (dig(usage, name, kind=int) for name in ("input_tokens", "total_tokens"))
    said = f"{asked} and {written} tokens are said to be {total}"
    trial.require(asked + written == total, said, answer)
    await judge_name(trial, answer, response)


async def _require_whole(
    trial: Trial, stream: StreamedAnswer, events: Sequence[TypedEvent]
) -> None:
    """The response at the end is the one that the events before it have told."""
    numbers = [dig(event.document, "sequence_number", kind=int) for event in events]
    is_rising = all(one < following for one, following in pairwise(numbers))
    trial.require(is_rising, "its sequence numbers do not rise", stream)
    first, last = (dig(event.document, "response", kind=dict) for event in (events[0], events[-1]))
    await _require_form(trial, stream, last)
    is_same = dig(first, "id", kind=str) == dig(last, "id", kind=str)
    trial.require(is_same, "its first and last event have the ids of two responses", stream)
    is_same = _said_in(last).text == _in_parts(stream).text
    trial.require(is_same, "the text of its last event is not that of its deltas", stream)


def fault_of_ends(events: Iterable[TypedEvent]) -> str:
    """What is wrong with the text at the end of a part; empty if it is that of its deltas.

    Raises:
        MalformedError: an event has no text, or not the number of a part.
    """
    # Not texts: one that a mapping holds is copied whole by each `+=`.
    written: defaultdict[tuple[int, ...], StringIO] = defaultdict(StringIO)
    for event in events:
        if event.type not in (_TEXT, _TEXT_ENDS):
            continue
        part = written[tuple(dig(event.document, name, kind=int) for name in _PART)]
        if event.type == _TEXT:
            part.write(dig(event.document, "delta", kind=str))
            continue
        if dig(event.document, "text", kind=str) != part.getvalue():
            return f"the text of {event.type} is not that of the deltas before it"
    return ""


def _input_tokens(response: Mapping[str, Any]) -> int:
    return dig_or(response, "usage", "input_tokens", default=0)


def _at_once(answer: Answer) -> TypedSaid:
    return _said_in(answer.document)


def _in_parts(stream: StreamedAnswer) -> TypedSaid:
    documents = [event.document for event in typed_events(stream)]
    return replace(
        _said_in(dig(documents[-1], "response", kind=dict)),
        text=joined(documents, _TEXT, "delta"),
        thoughts=joined(documents, _THOUGHT, "delta"),
    )


def _said_in(response: Mapping[str, Any]) -> TypedSaid:
    parts = [part for item in dig(response, "output", kind=list) for part in _content_of(item)]
    return TypedSaid(
        joined(parts, "output_text", "text"),
        joined(parts, "reasoning_text", "text"),
        dig(response, "status", kind=str),
        dig(response, "usage", "output_tokens", kind=int),
    )


def _content_of(item: Any) -> list[Any]:
    """The parts of an item; thoughts may have none."""
    parts: list[Any] = dig_or(item, "content", default=[])
    return parts


CHECKS = (
    Check(
        "responses",
        "wire",
        responses,
        "The Responses API answers in its form; its stream says the same, in order and with usage.",
        profiles=FROM_STANDARD,
        needs=("chat",),
    ),
)
