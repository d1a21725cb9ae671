"""A stream of server-sent events, as it came: when which bytes arrived, and what they say.

Reading stops at nothing: what is wrong with the frames is noted, so that one check can report it,
and every other check asks for `documents`, which a broken stream does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from holdfast.verify.answers import (
    ELLIPSIS,
    MalformedError,
    dig,
    dig_or,
    excerpt,
    read_json,
)
from holdfast.verify.records import Request

DONE = "[DONE]"
NO_DONE = f"the stream does not end with {DONE}"
"""What is wrong with a stream of chats or completions, and right for others."""
_LINE_END = re.compile(rb"\r\n|\n|\r")
_SHOWN = 80
"""Characters or bytes of what is wrong, in a fault."""
_MOST_EVENTS = 200_000
"""Several times what any answer of a check can have; a hostile one fits millions into its bytes."""
_MOST_LINES = 4 * _MOST_EVENTS
_MOST_FAULTS = 1000
_FINE_CHUNKS = 10_000
"""Later ones are joined where they come at about the same time: each takes more than its bytes."""
_TOGETHER_SECONDS = 0.01
_MARKS = (b"{", b"[", b",")
"""Each value within another one, and each name, comes behind one of these in JSON."""
_FIELDS = frozenset({"data", "event", "id", "retry"})


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes that were read at once, or almost."""

    at_seconds: float
    """When the last of them came, since the request was sent."""
    content: bytes


class Received:
    """The chunks of an answer that is under way; of a great many small ones, some are joined."""

    def __init__(self) -> None:
        self.byte_count = self.mark_count = 0
        self._chunks: list[Chunk] = []
        self._parts: list[bytes] = []
        """Of the next chunk, which more may come to."""
        self._from_seconds = self._until_seconds = 0.0

    def add(self, at_seconds: float, content: bytes) -> None:
        """Take bytes that were read at once."""
        is_fine = len(self._chunks) < _FINE_CHUNKS
        if is_fine or at_seconds - self._from_seconds > _TOGETHER_SECONDS:
            self._join()
            self._from_seconds = at_seconds
        self._parts.append(content)
        self._until_seconds = at_seconds
        self.byte_count += len(content)
        self.mark_count += sum(map(content.count, _MARKS))

    def chunks(self) -> tuple[Chunk, ...]:
        """All that has come."""
        self._join()
        return tuple(self._chunks)

    def _join(self) -> None:
        if self._parts:
            self._chunks.append(Chunk(self._until_seconds, b"".join(self._parts)))
            self._parts = []


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    at_seconds: float
    """When its last byte had arrived."""
    data: str
    name: str = ""
    """The name of its kind, if it has one."""


@dataclass(frozen=True, slots=True)
class Said:
    """What one choice said in all its events together."""

    content: str
    reasoning: str
    finish_reason: str


@dataclass(frozen=True)
class StreamedAnswer:
    """One answer that was streamed to its end."""

    request: Request
    status: int
    content_type: str
    """As the server wrote it, in any case."""
    chunks: tuple[Chunk, ...]
    seconds: float
    retry_after: str = ""
    """The header; empty if there is none."""
    location: str = ""
    """The header of a redirect, in the same way."""

    @property
    def is_of_events(self) -> bool:
        """Whether its type is that of a stream of events."""
        return self.content_type.lower().startswith("text/event-stream")

    @cached_property
    def frames(self) -> Frames:
        """The events, and what is wrong with how they are framed."""
        return read_frames(self.chunks)

    @cached_property
    def documents(self) -> tuple[dict[str, Any], ...]:
        """The JSON object of each event but the last, `[DONE]`.

        Raises:
            MalformedError: the stream is not framed as it must be.
        """
        if self.frames.faults:
            raise MalformedError(f"the stream is broken: {self.frames.faults[0]}")
        return tuple(read_json(event.data) for event in self.frames.events[:-1])

    @property
    def text(self) -> str:
        """All of it, for people."""
        return b"".join(chunk.content for chunk in self.chunks).decode("utf-8", "replace")

    def said(self, index: int = 0) -> Said:
        """What the choice with that index said.

        Raises:
            MalformedError: the stream is broken, or a part of it is not of the right kind.
        """
        content, reasoning, finish_reason = "", "", ""
        for choice in self.choices(index):
            if finish_reason:  # clients do not read on
                break
            content += delta_text(choice)
            reasoning += delta_reasoning(choice)
            finish_reason = dig_or(choice, "finish_reason", default="")
        return Said(content, reasoning, finish_reason)

    def choices(self, index: int) -> Iterator[dict[str, Any]]:
        """What came of the choice with that index, event by event."""
        for document in self.documents:
            for choice in dig(document, "choices", kind=list):
                if dig(choice, "index", kind=int) == index:
                    yield choice

    def usage(self) -> dict[str, Any]:
        """The usage, from the last event that has one.

        Raises:
            MalformedError: none has.
        """
        found = [d["usage"] for d in self.documents if isinstance(d.get("usage"), dict)]
        if not found:
            raise MalformedError("no event has a usage, which stream_options asked for")
        return dict(found[-1])


def delta_text(choice: dict[str, Any]) -> str:
    """The text that an event adds to a chat or a completion."""
    if "text" in choice:
        return dig(choice, "text", kind=str)
    return dig_or(choice, "delta", "content", default="")


def delta_reasoning(choice: dict[str, Any]) -> str:
    """The thoughts that an event adds to a chat, under either name."""
    told = dig_or(choice, "delta", "reasoning", default="")
    return told or dig_or(choice, "delta", "reasoning_content", default="")


@dataclass(slots=True)
class Frames:
    """The events of a stream, and what is wrong with how they are framed."""

    events: list[Event] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read_frames(chunks: Sequence[Chunk]) -> Frames:
    """Take the bytes apart as the standard says, and note all that a strict reader refuses.

    https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """
    frames = Frames()
    fields: list[tuple[str, str]] = []
    for count, (at_seconds, line) in enumerate(_lines(chunks, frames)):
        if reason := _too_long(count, frames):
            frames.faults.append(reason)
            return frames
        try:
            text = line.decode()
        except UnicodeDecodeError:
            frames.faults.append(f"a line is not UTF-8: {_shown(line)}")
            continue
        if text:
            _take_line(text, fields, frames)
            continue
        if data := _values(fields, "data"):
            name = _values(fields, "event")[-1:]
            frames.events.append(Event(at_seconds, "\n".join(data), "".join(name)))
        fields = []
    if _values(fields, "data"):
        frames.faults.append("the last event does not end with an empty line")
    _check_documents(frames)
    return frames


def _too_long(lines: int, frames: Frames) -> str:
    """Why no more of a stream is read; empty if the next line is."""
    if len(frames.events) >= _MOST_EVENTS:
        return f"it has more than {_MOST_EVENTS:,} events"
    if lines >= _MOST_LINES:
        return f"it has more than {_MOST_LINES:,} lines"
    return "" if len(frames.faults) < _MOST_FAULTS else "the rest was not read"


def _lines(chunks: Sequence[Chunk], frames: Frames) -> Iterator[tuple[float, bytes]]:
    """Each line with the time at which it was complete, in time that grows with their bytes.

    A CR ends a line, and so does the LF behind it, also where that comes with the next chunk.
    """
    parts: list[bytes] = []
    is_behind_cr = False
    for chunk in chunks:
        content = chunk.content.removeprefix(b"\n") if is_behind_cr else chunk.content
        if chunk.content:
            is_behind_cr = chunk.content.endswith(b"\r")
        first, *others = _LINE_END.split(content)
        parts.append(first)
        for other in others:
            yield chunk.at_seconds, b"".join(parts)
            parts = [other]
    if rest := b"".join(parts):
        frames.faults.append(f"the stream ends in the middle of a line: {_shown(rest)}")


def _shown(line: bytes) -> str:
    """The beginning of a line, with an ellipsis if there is more."""
    shown = repr(line[:_SHOWN])
    return shown if len(line) <= _SHOWN else f"{shown[:-1]}{ELLIPSIS}{shown[-1]}"


def _values(fields: Sequence[tuple[str, str]], wanted: str) -> list[str]:
    return [value for name, value in fields if name == wanted]


def _take_line(text: str, fields: list[tuple[str, str]], frames: Frames) -> None:
    name, colon, value = text.partition(":")
    if not name and colon:  # a comment, as proxies are kept awake with
        return
    if name not in _FIELDS:
        frames.faults.append(f"a line is not a field of an event: {excerpt(text, _SHOWN)}")
    else:
        fields.append((name, value.removeprefix(" ")))


def _check_documents(frames: Frames) -> None:
    if not frames.events or frames.events[-1].data != DONE:
        frames.faults.append(NO_DONE)
    for event in frames.events[:-1]:
        if event.data == DONE:
            frames.faults.append(f"{DONE} is not the last event")
        elif not _is_object(event.data):
            frames.faults.append(f"an event is not a JSON object: {excerpt(event.data, _SHOWN)}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(read_json(text), dict)
    except MalformedError:
        return False
