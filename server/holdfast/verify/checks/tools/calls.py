"""The calls of functions in an answer, whole or streamed, and what is wrong with their form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any

from holdfast.verify.answers import MalformedError, dig, dig_or, read_json
from holdfast.verify.streams import StreamedAnswer
from holdfast.verify.target import Answer


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function."""

    name: str
    arguments: str
    """As they came: text that should be a JSON object."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What an answer says and calls, however it came."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]
    finish_reason: str


@dataclass(slots=True)
class _Merged:
    """A call as clients put it together from the parts of a stream."""

    identity: str = ""
    name: str = ""
    arguments: StringIO = field(default_factory=StringIO)
    """Not a text: one that an object holds is copied whole by each `+=`."""


@dataclass(slots=True)
class Merge:
    """The calls of a stream, and what a strict client refuses about their parts."""

    calls: dict[int, _Merged] = field(default_factory=dict)
    last: int = -1
    """The greatest index."""
    faults: list[str] = field(default_factory=list)


def whole_turn(answer: Answer) -> Turn:
    """What an answer that came at once says and calls.

    Raises:
        MalformedError: a part of it has not the right kind.
    """
    calls = tuple(
        Call(dig(call, "function", "name", kind=str), dig(call, "function", "arguments", kind=str))
        for call in raw_calls(answer)
    )
    return Turn(answer.content(), answer.reasoning(), calls, answer.finish_reason())


def raw_calls(answer: Answer) -> list[Any]:
    """The calls as the answer has them; none if the field is missing or null."""
    message = dig(answer.document, "choices", 0, "message", kind=dict)
    return [] if message.get("tool_calls") is None else dig(message, "tool_calls", kind=list)


def streamed_turn(answer: StreamedAnswer) -> Turn:
    """What a streamed answer says and calls, put together as clients do it.

    Raises:
        MalformedError: the stream is broken, or a part of it has not the right kind.
    """
    said = answer.said()
    merged = merge(answer).calls
    calls = tuple(Call(merged[at].name, merged[at].arguments.getvalue()) for at in sorted(merged))
    return Turn(said.content, said.reasoning, calls, said.finish_reason)


def merge(answer: StreamedAnswer) -> Merge:
    """Put the parts of the calls of a stream together, by their index.

    Raises:
        MalformedError: the stream is broken, or a part of a call has not the right kind.
    """
    merged = Merge()
    for part in _parts(answer):
        _add(part, merged)
    for index, call in merged.calls.items():
        if not call.name:
            merged.faults.append(f"call {index} of the stream has no name")
    if list(merged.calls) != list(range(len(merged.calls))):
        told = ", ".join(map(str, merged.calls))
        merged.faults.append(f"the calls of the stream have the indices {told}")
    return merged


def as_read(turn: Turn) -> Turn:
    """The turn as clients read it: arguments as JSON, and no text that is only space beside calls.

    Servers copy a call from the model's text, or write its JSON again with other spaces, and some
    drop the space before it.
    """
    if not turn.calls:
        return turn
    calls = tuple(replace(call, arguments=_canonical(call.arguments)) for call in turn.calls)
    return replace(turn, content=turn.content if turn.content.strip() else "", calls=calls)


def _canonical(arguments: str) -> str:
    """The same JSON in one spelling; what is not JSON, as it is."""
    try:
        return json.dumps(read_json(arguments), sort_keys=True)
    except MalformedError:
        return arguments


def is_object(arguments: str) -> bool:
    """Whether arguments are as they have to be: a JSON object."""
    try:
        return isinstance(read_json(arguments), dict)
    except MalformedError:
        return False


def is_cut(answer: Answer | StreamedAnswer, body: Mapping[str, Any]) -> bool:
    """Whether `max_tokens` ended it; a server may say `tool_calls` all the same."""
    written = dig(answer.usage(), "completion_tokens", kind=int)
    return written >= int(body["max_tokens"])


def _parts(answer: StreamedAnswer) -> Iterator[Mapping[str, Any]]:
    for choice in answer.choices(0):
        delta: dict[str, Any] = dig_or(choice, "delta", default={})
        if delta.get("tool_calls") is not None:
            yield from dig(delta, "tool_calls", kind=list)


def _add(part: Mapping[str, Any], merged: Merge) -> None:
    """Add one part to its call, as OpenAI's client does, and note what it would stumble over."""
    index = dig(part, "index", kind=int)
    if merged.calls and index not in (merged.last, merged.last + 1):
        merged.faults.append(f"a part of call {index} comes behind call {merged.last}")
    merged.last = max(index, merged.last)
    is_new = index not in merged.calls
    call = merged.calls.setdefault(index, _Merged())
    identity = dig_or(part, "id", default="")
    if is_new and not identity:
        merged.faults.append(f"the first part of call {index} has no id")
    if not is_new and identity not in ("", call.identity):
        merged.faults.append(f"the id of call {index} changes")
    call.identity = call.identity or identity
    name = dig_or(part, "function", "name", default="")
    if name and call.name:
        merged.faults.append(f"the name of call {index} comes twice")
    call.name = call.name or name
    call.arguments.write(dig_or(part, "function", "arguments", default=""))
