"""Events with types: what is in order passes, what clients could not put together is named."""

from __future__ import annotations

import json
import time
from typing import Any, get_args

import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent

from double_model import Generated
from double_typed import message_events, message_of, response_events, response_of
from holdfast.verify.answers import MalformedError
from holdfast.verify.checks.wire import messages, responses
from holdfast.verify.checks.wire.typed_events import (
    Order,
    TypedEvent,
    fault_of_order,
    typed_events,
)
from holdfast.verify.records import Request
from holdfast.verify.streams import Chunk, StreamedAnswer

Event = dict[str, Any]
MADE = Generated(["five", ", ", "six"], "length")
_MOST_SECONDS = 5.0
"""Many times what it takes, and a fraction of what a square would take."""


def stream_of(*frames: str) -> StreamedAnswer:
    """A stream with these frames."""
    chunks = (Chunk(0.0, "".join(f"{frame}\n\n" for frame in frames).encode()),)
    return StreamedAnswer(Request("POST", "/"), 200, "text/event-stream", chunks, 0.0)


def framed(event: Event) -> str:
    """The frame of an event."""
    return f"event: {event['type']}\ndata: {json.dumps(event)}"


def fault_of(events: list[Event], order: Order) -> str:
    """What is wrong with the order of these events."""
    return fault_of_order(typed_events(stream_of(*map(framed, events))), order)


def of_a_response() -> list[Event]:
    """The events of a response, in order."""
    return list(response_events(MADE, response_of(MADE, 3), ""))


def of_a_message() -> list[Event]:
    """The events of a message, in order."""
    return list(message_events(MADE, message_of(MADE, 3), ""))


def published(union: Any) -> set[str]:
    """The types of the events that a client knows."""
    kinds = get_args(get_args(union)[0])
    return {get_args(kind.model_fields["type"].annotation)[0] for kind in kinds}


def test_the_types_are_those_of_the_clients() -> None:
    """OpenAI publishes more, of functions and media; Anthropic's client knows two more by name."""
    assert responses.ORDER.types < published(ResponseStreamEvent)
    assert messages.ORDER.types - {"ping", "error"} == published(RawMessageStreamEvent)


def test_events_in_order_have_no_fault() -> None:
    """Each has its name and its type, and a ping may come anywhere."""
    assert fault_of(of_a_response(), responses.ORDER) == ""
    assert fault_of(of_a_message(), messages.ORDER) == ""


def test_thoughts_need_no_part() -> None:
    """An item of them may have events of its own before the text begins."""
    thoughts = [
        {"type": "response.output_item.added", "output_index": 0},
        {"type": "response.reasoning_text.delta", "output_index": 0, "content_index": 0},
        {"type": "response.output_item.done", "output_index": 0},
    ]
    first, *others = of_a_response()
    for event in others:
        if "output_index" in event:
            event["output_index"] = 1
    assert fault_of([first, *thoughts, *others], responses.ORDER) == ""


@pytest.mark.parametrize(
    ("number", "changed", "fault"),
    [
        (0, {"type": "ping"}, "its first event is 'ping' and not 'message_start'"),
        (-1, {"type": "ping"}, "its last event is 'ping' and not message_stop"),
        (2, {"type": "message_start"}, "message_start comes more than once"),
        (2, {"type": "error"}, "an event is an error: {'type': 'error'}"),
        (1, {"index": 1}, "content_block_start of 1 does not begin the next part"),
        (
            3,
            {"index": 1},
            "content_block_delta of 1 is about a part that has not begun, or has ended",
        ),
        (-3, {"type": "ping"}, "message_delta comes before a part has ended"),
    ],
)
def test_what_is_not_in_order_is_named(number: int, changed: Event, fault: str) -> None:
    """In words that say which event it is."""
    events = of_a_message()
    events[number] |= changed
    assert fault_of(events, messages.ORDER) == fault


def test_a_part_within_another_ends_before_it() -> None:
    """A part that is left open when the item ends is still open at the end."""
    events = [event for event in of_a_response() if event["type"] != "response.content_part.done"]
    fault = "response.incomplete comes before a part has ended"
    assert fault_of(events, responses.ORDER) == fault


def test_done_may_end_a_stream() -> None:
    """Clients of either API stop there, and do not wait for it."""
    event = framed({"type": "ping"})
    assert len(typed_events(stream_of(event))) == len(
        typed_events(stream_of(event, "data: [DONE]"))
    )


def test_the_text_at_the_end_of_a_part_is_that_of_its_deltas() -> None:
    """Line ends stay as they are, and each part has a text of its own."""

    def event(kind: str, part: int, **text: str) -> TypedEvent:
        document = {"output_index": 0, "content_index": part, **text}
        return TypedEvent("", f"response.output_text.{kind}", document)

    events = [
        event("delta", 0, delta="a\r\n"),
        event("delta", 1, delta="c"),
        event("delta", 0, delta="b"),
        event("done", 0, text="a\r\nb"),
        event("done", 1, text="c"),
        event("done", 2, text=""),
    ]
    assert responses.fault_of_ends(events) == ""
    fault = "the text of response.output_text.done is not that of the deltas before it"
    assert responses.fault_of_ends([*events, event("done", 0, text="a\nb")]) == fault
    assert responses.fault_of_ends([*events, event("done", 1, text="cb")]) == fault


@pytest.mark.parametrize("delta", ["", "x" * 1000])
def test_many_deltas_are_put_together_in_a_time_that_grows_with_them(delta: str) -> None:
    """In it neither a deadline nor Ctrl-C ends the check."""
    document = {"output_index": 0, "content_index": 0, "delta": delta, "text": delta * 50_000}
    added = TypedEvent("", "response.output_text.delta", document)
    ended = TypedEvent("", "response.output_text.done", document)
    ends = 1 if delta else 50_000
    started_seconds = time.process_time()
    assert responses.fault_of_ends([*[added] * 50_000, *[ended] * ends]) == ""
    assert time.process_time() - started_seconds < _MOST_SECONDS


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ((), "the stream has no events"),
        (("data: 3",), "an event is not a JSON object: 3"),
        (("data: {}",), "type is missing"),
        (("data: [DONE]", "data: {}"), "the stream is broken"),
    ],
)
def test_what_has_no_types_cannot_be_read(frames: tuple[str, ...], why: str) -> None:
    """The reason says what is missing."""
    with pytest.raises(MalformedError, match=why):
        typed_events(stream_of(*frames))
