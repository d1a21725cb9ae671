"""What arrives is a document, in whatever parts it arrives."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.top.reader import MAX_EVENT_BYTES, EventParser, Mirror, StatusEvent, StreamError

STREAM = (
    b"retry: 2000\n\n"
    b'id: 1f-1\nevent: snapshot\ndata: {"time":"1970-01-01T00:02:00.000+00:00","a":{"b":1}}\n\n'
    b": alive\n\n"
    b'id: 1f-2\nevent: change\ndata: {"a":{"b":null,"c":2}}\n\n'
    b'event: bye\ndata: {"reason":"the server stops"}\n\n'
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=6))
def test_the_parts_in_which_it_arrives_do_not_matter(cuts: list[int]) -> None:
    """A comment or a time to wait is not an event."""
    edges = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    parts = (STREAM[begin:end] for begin, end in pairwise(edges))
    found = [event for part in parts for event in parser.events(part)]
    assert [(event.name, event.event_id) for event in found] == [
        ("snapshot", "1f-1"),
        ("change", "1f-2"),
        ("bye", ""),
    ]


def test_changes_make_the_document() -> None:
    """A snapshot replaces it, and says what time it is there."""
    mirror = Mirror(clock=lambda: 100.0)
    for event in EventParser().events(STREAM):
        mirror.take(event)
    assert mirror.document["a"] == {"c": 2}
    assert (mirror.last_event_id, mirror.has_said_goodbye) == ("1f-2", True)
    assert mirror.now_unix_seconds == 120.0
    mirror.take(StatusEvent("snapshot", "{}", "2e-1"))
    assert (mirror.document, mirror.last_event_id) == ({}, "2e-1")
    assert not mirror.has_said_goodbye
    assert mirror.now_unix_seconds == 100.0


def test_unknown_events_change_nothing() -> None:
    """A later version may have more of them."""
    mirror = Mirror()
    mirror.take(StatusEvent("news", "not even JSON", "1f-3"))
    assert (mirror.document, mirror.last_event_id) == ({}, "")


@pytest.mark.parametrize("data", ["", "nonsense", "[]", "1", "[" * 100_000, json.dumps("text")])
def test_what_is_no_document_is_refused(data: str) -> None:
    """Any server may answer at that address."""
    with pytest.raises(StreamError):
        Mirror().take(StatusEvent("snapshot", data, ""))


def test_an_event_without_end_is_refused() -> None:
    """Before it fills the memory."""
    parser = EventParser()
    part: Any = b"data: " + b"x" * (MAX_EVENT_BYTES // 2)
    assert list(parser.events(part)) == []
    with pytest.raises(StreamError, match="larger"):
        list(parser.events(part))


def test_an_end_that_asks_to_come_back_is_no_goodbye() -> None:
    """The next event ends it."""
    mirror = Mirror()
    mirror.take(StatusEvent("renew", "{}", ""))
    assert (mirror.has_to_renew, mirror.has_said_goodbye) == (True, False)
    mirror.take(StatusEvent("change", "{}", "1f-3"))
    assert not mirror.has_to_renew


def test_an_end_that_asks_to_come_back_says_what_time_it_is() -> None:
    """Our own clock may have been set; a server that is older says nothing of it."""
    now = [100.0]
    mirror = Mirror(clock=lambda: now[0])
    mirror.take(StatusEvent("snapshot", '{"time":"1970-01-01T00:02:00.000+00:00"}', "1f-1"))
    now[0] = 5000.0
    mirror.take(StatusEvent("renew", '{"time":"1970-01-01T00:07:00.000+00:00"}', ""))
    assert mirror.now_unix_seconds == 420.0
    mirror.take(StatusEvent("renew", "{}", ""))
    assert mirror.now_unix_seconds == 420.0
    assert mirror.last_event_id == "1f-1"
