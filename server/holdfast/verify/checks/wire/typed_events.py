"""Streams whose events say their type, as those of the Responses and the Messages API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.verify.answers import MalformedError, dig, dig_or, excerpt, read_json
from holdfast.verify.streams import DONE, NO_DONE, StreamedAnswer
from holdfast.verify.target import Answer
from holdfast.verify.trial import Trial

_ERROR = "error"

Numbers = Mapping[str, tuple[str, ...]]
"""By type of event, the fields that number the part of the answer which it is about."""


@dataclass(frozen=True, slots=True)
class TypedEvent:
    """One event."""

    name: str
    """The field `event` of its frame; empty if there is none."""
    type: str
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which the events of an API come."""

    types: frozenset[str]
    """Every one that an answer without functions may have."""
    first: str
    lasts: frozenset[str]
    begins: Numbers
    """What begins a part; a part within another one has the numbers of both."""
    goes_on: Numbers
    """What adds to a part that has begun."""
    ends: Numbers
    between: frozenset[str]
    """What comes while no part is open."""


@dataclass(frozen=True, slots=True)
class TypedSaid:
    """What an answer says, however it came."""

    text: str
    thoughts: str
    ending: str
    output_tokens: int


def typed_events(stream: StreamedAnswer) -> tuple[TypedEvent, ...]:
    """The events; `[DONE]` may end them, as clients allow, and does not have to.

    Raises:
        MalformedError: the stream is broken, or an event is not an object with a type.
    """
    faults = [fault for fault in stream.frames.faults if fault != NO_DONE]
    if faults:
        raise MalformedError(f"the stream is broken: {faults[0]}")
    found = []
    for event in stream.frames.events:
        if event.data == DONE:
            break
        document = read_json(event.data)
        if not isinstance(document, dict):
            raise MalformedError(f"an event is not a JSON object: {excerpt(event.data)}")
        found.append(TypedEvent(event.name, dig(document, "type", kind=str), document))
    if not found:
        raise MalformedError("the stream has no events")
    return tuple(found)


def ordered(trial: Trial, stream: StreamedAnswer, order: Order) -> tuple[TypedEvent, ...]:
    """The events of a stream; blame it if they are not in order.

    Raises:
        MalformedError: the stream is broken, or an event is not what its type promises.
    """
    trial.require(stream.is_of_events, f"its type is {stream.content_type!r}", stream)
    events = typed_events(stream)
    fault = fault_of_order(events, order)
    trial.require(not fault, fault, stream)
    # Clients pass over what they do not know.
    if others := sorted({event.type for event in events} - order.types):
        trial.warn(f"it has events of unknown types: {', '.join(others)}", stream)
    return events


def fault_of_order(events: Sequence[TypedEvent], order: Order) -> str:
    """What is wrong with the order of the events, or with their names; empty if nothing is.

    Raises:
        MalformedError: an event about a part has not the number of one.
    """
    for event in events:
        if event.type == _ERROR:
            return f"an event is an error: {excerpt(str(event.document))}"
        if event.name != event.type:
            return f"an event of type {event.type!r} is named {event.name!r}"
    if events[0].type != order.first:
        return f"its first event is {events[0].type!r} and not {order.first!r}"
    if events[-1].type not in order.lasts:
        return f"its last event is {events[-1].type!r} and not {_either(order.lasts)}"
    for types in ({order.first}, order.lasts):
        if sum(event.type in types for event in events) > 1:
            return f"{_either(types)} comes more than once"
    return _fault_of_parts(events, order)


def require_within(trial: Trial, answer: Answer | StreamedAnswer, written: int, most: int) -> None:
    """Blame an answer that says that it has another number of tokens than it may have."""
    trial.require(0 <= written <= most, f"{written} tokens with a maximum of {most}", answer)


def joined(parts: Iterable[Any], kind: str, name: str) -> str:
    """The texts of this name, one behind the other, in the parts of this type."""
    texts = (dig(one, name, kind=str) for one in parts if dig_or(one, "type", default="") == kind)
    return "".join(texts)


def _fault_of_parts(events: Sequence[TypedEvent], order: Order) -> str:
    begun: Counter[tuple[int, ...]] = Counter()  # parts within each part, and within the answer: ()
    open_parts: set[tuple[int, ...]] = {()}
    for event in events:
        part = _part_of(event, order)
        said = f"{event.type} of {'.'.join(map(str, part))}"
        if event.type in order.begins:
            outer, number = part[:-1], part[-1]
            if outer not in open_parts or number != begun[outer]:
                return f"{said} does not begin the next part"
            begun[outer] += 1
            open_parts.add(part)
        elif part not in open_parts:
            return f"{said} is about a part that has not begun, or has ended"
        elif event.type in order.ends:
            open_parts.remove(part)
        elif event.type in order.between and len(open_parts) > 1:
            return f"{event.type} comes before a part has ended"
    return ""


def _part_of(event: TypedEvent, order: Order) -> tuple[int, ...]:
    """The numbers of the part that an event is about; none if it is about the whole answer."""
    for numbers in (order.begins, order.goes_on, order.ends):
        if event.type in numbers:
            return tuple(dig(event.document, name, kind=int) for name in numbers[event.type])
    return ()


def _either(types: Iterable[str]) -> str:
    return " or ".join(sorted(types))
