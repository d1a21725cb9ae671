"""Server-sent events, byte by byte: what is whole is read, whatever the pieces it comes in."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.verify.answers import MalformedError
from holdfast.verify.records import Request
from holdfast.verify.streams import Chunk, Frames, Received, StreamedAnswer, read_frames

WELL = (
    'data: {"a": "é\\u00e9"}\r\n\r\n: ping\n\nevent: x\nid: 1\n'
    'data: {"b":\ndata: 2}\n\ndata: [DONE]\n\n'
)


def frames(*parts: bytes) -> Frames:
    """The frames of a stream that comes in these parts, a second apart."""
    return read_frames([Chunk(float(number), part) for number, part in enumerate(parts)])


def answer(text: str) -> StreamedAnswer:
    """A stream with these events, framed well."""
    chunks = (Chunk(0.0, text.encode()),)
    return StreamedAnswer(Request("POST", "/"), 200, "text/event-stream", chunks, 0.0)


@given(st.lists(st.integers(0, len(WELL.encode())), max_size=8))
def test_where_the_bytes_are_cut_does_not_matter(cuts: list[int]) -> None:
    """Also within a character and within the end of a line."""
    whole, edges = WELL.encode(), [0, *sorted(cuts), len(WELL.encode())]
    found = frames(*(whole[a:b] for a, b in pairwise(edges)))
    assert found.faults == []
    assert [event.data for event in found.events] == ['{"a": "é\\u00e9"}', '{"b":\n2}', "[DONE]"]


def test_an_event_has_the_time_of_its_end() -> None:
    """Not that of its first byte."""
    found = frames(b"data: {", b'"a": 1}\n', b"\ndata: [DONE]\n\n")
    assert [event.at_seconds for event in found.events] == [2.0, 2.0]


def test_an_event_has_its_own_name() -> None:
    """The last one of its lines, and not that of another event, also of one without data."""
    found = frames(b"event: a\nevent: b\ndata: {}\n\nevent: c\n\ndata: [DONE]\n\n")
    assert [event.name for event in found.events] == ["b", ""]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"data: {}\n\n", "the stream does not end with [DONE]"),
        (b"", "the stream does not end with [DONE]"),
        (b"data: {}\n\ndata: [DONE]\n", "the last event does not end with an empty line"),
        (b"data: {}\n\ndata: [DONE]", "the stream ends in the middle of a line: b'data: [DONE]'"),
        (b"data: {}\r\rdata: [DONE]", "the stream ends in the middle of a line: b'data: [DONE]'"),
        (
            b"x" * 81,
            f"the stream ends in the middle of a line: b'{'x' * 80}\N{HORIZONTAL ELLIPSIS}'",
        ),
        (b"data: {\n\ndata: [DONE]\n\n", "an event is not a JSON object: {"),
        (b"data: 3\n\ndata: [DONE]\n\n", "an event is not a JSON object: 3"),
        (b"data: [DONE]\n\ndata: [DONE]\n\n", "[DONE] is not the last event"),
        (b"{}\n\ndata: [DONE]\n\n", "a line is not a field of an event: {}"),
        (b"data: \xff\n\ndata: [DONE]\n\n", "a line is not UTF-8: b'data: \\xff'"),
    ],
)
def test_what_a_strict_reader_refuses_is_named(text: bytes, fault: str) -> None:
    """In words that say where."""
    found = frames(text)
    assert fault in found.faults


def test_a_broken_stream_has_no_documents() -> None:
    """What is built on it cannot be judged."""
    with pytest.raises(MalformedError, match="the stream is broken"):
        _ = answer("data: {}\n\n").documents


def test_nothing_is_read_behind_the_finish_reason() -> None:
    """As clients do; it is a fault of its own."""
    part = 'data: {"choices": [{"index": 0, "text": "%s", "finish_reason": %s}]}\n\n'
    text = part % ("a", "null") + part % ("b", '"stop"') + part % ("c", "null")
    said = answer(f"{text}data: [DONE]\n\n").said()
    assert (said.content, said.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_a_line_has_any_of_three_ends(end: bytes) -> None:
    """Also where each byte comes alone."""
    text = b"data: {}%bdata: [DONE]%b" % (2 * end, 2 * end)
    for parts in ([text], [bytes([one]) for one in text]):
        found = frames(*parts)
        assert found.faults == []
        assert [event.data for event in found.events] == ["{}", "[DONE]"]


def test_a_cr_ends_a_line_at_once() -> None:
    """The LF that comes later belongs to it, and is not an empty line."""
    found = frames(b"data: {\r", b"\ndata: }\r\n\r", b"\n", b"", b"\ndata: [DONE]\n\n")
    assert [(event.at_seconds, event.data) for event in found.events] == [
        (1.0, "{\n}"),
        (4.0, "[DONE]"),
    ]


def test_a_long_line_in_small_parts_is_read() -> None:
    """Each byte is looked at a few times: again with each part, they would be 200 GB."""
    part = b"0123456789"
    parts = [b'data: {"a": "', *([part] * 200_000), b'"}\n\n', b"data: [DONE]\n\n"]
    found = frames(*parts)
    assert found.faults == []
    assert len(found.events[0].data) == len('{"a": ""}') + 200_000 * len(part)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"data: {}\n\n" * 300_000, "it has more than 200,000 events"),
        (b":\n" * 1_000_000, "it has more than 800,000 lines"),
        (b"x\n" * 1_000_000, "the rest was not read"),
    ],
)
def test_a_stream_without_end_is_read_in_part(text: bytes, fault: str) -> None:
    """Its bytes are few, and what is made of each takes a hundred times as many."""
    found = frames(text)
    assert found.faults[-1] == fault
    assert len(found.events) <= 200_000
    assert len(found.faults) <= 1001


def test_small_chunks_are_joined_once_there_are_many() -> None:
    """Those that come together; the first ones, and those that come later, keep their times."""
    received = Received()
    for number in range(10_000):
        received.add(number / 1e6, b"a")
    for number in range(100_000):
        received.add(1.0 + number / 1e6, b"b")
    received.add(2.0, b"c")
    chunks = received.chunks()
    assert received.byte_count == 110_001
    assert b"".join(chunk.content for chunk in chunks) == b"a" * 10_000 + b"b" * 100_000 + b"c"
    assert len(chunks) <= 10_012
    assert chunks[7] == Chunk(7e-6, b"a")
    assert chunks[-1] == Chunk(2.0, b"c")
