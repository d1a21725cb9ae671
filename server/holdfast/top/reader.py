"""What does the stream say? Its events, and the document that they make up.

The server is another process, perhaps another program: nothing of the stream is trusted.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from holdfast.status_page.patch import StatusDocument, merged

MAX_EVENT_BYTES = 16 << 20
"""The largest event of a real server has a few hundred kilobytes."""
_ID = re.compile("[!-~]{1,100}")
"""The names of events that a header can carry."""


class StreamError(Exception):
    """The stream is not that of a status page."""


@dataclass(frozen=True, slots=True)
class StatusEvent:
    """One server-sent event."""

    name: str
    data: str
    event_id: str


class EventParser:
    """Splits a stream into its events, in whatever parts it arrives."""

    def __init__(self) -> None:
        self._unparsed = b""

    def events(self, received: bytes) -> Iterator[StatusEvent]:
        """Yield the events that are complete with these bytes; comments are left out.

        Raises:
            StreamError: an event is too large.
        """
        *complete, self._unparsed = (self._unparsed + received).split(b"\n\n")
        if len(self._unparsed) > MAX_EVENT_BYTES:
            raise StreamError(f"an event is larger than {MAX_EVENT_BYTES} bytes")
        for block in complete:
            fields = _fields(block.decode(errors="replace"))
            if "data" in fields:
                yield StatusEvent(fields.get("event", ""), fields["data"], fields.get("id", ""))


@dataclass(slots=True)
class Mirror:
    """The document of a server, kept up to date from its events."""

    clock: Callable[[], float] = time.time
    document: StatusDocument = field(default_factory=dict)
    """Empty before the first snapshot."""
    last_event_id: str = ""
    has_said_goodbye: bool = False
    """Whether the server announced its end."""
    has_to_renew: bool = False
    """Whether the server ends this stream, but not itself."""
    _ahead_seconds: float = 0.0
    """How far the server's clock is ahead of ours."""

    def take(self, event: StatusEvent) -> None:
        """Apply an event; one of another name changes nothing.

        Raises:
            StreamError: its data is not a JSON object.
        """
        if event.name == "bye":
            self.has_said_goodbye = True
        elif event.name == "renew":
            self.has_to_renew = True
            self._set_clock(_object(event.data).get("time"))
        elif event.name in ("snapshot", "change"):
            data = _object(event.data)
            is_whole = event.name == "snapshot"
            self.document = data if is_whole else merged(self.document, data)
            self.last_event_id = event.event_id if _ID.fullmatch(event.event_id) else ""
            self.has_said_goodbye = self.has_to_renew = False
            if is_whole:
                self._ahead_seconds = 0.0
                self._set_clock(data.get("time"))

    @property
    def now_unix_seconds(self) -> float:
        """The present time, by the server's clock."""
        return self.clock() + self._ahead_seconds

    def _set_clock(self, sent: object) -> None:
        """Learn how far ahead the server is, if this is the time at which it sent an event."""
        with suppress(ValueError, OverflowError):
            self._ahead_seconds = datetime.fromisoformat(str(sent)).timestamp() - self.clock()


def _fields(block: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in block.split("\n"))
    return {name: value.removeprefix(" ") for name, colon, value in pairs if name and colon}


def _object(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StreamError("an event is not JSON") from error
    if not isinstance(found, dict):
        raise StreamError("an event is not a JSON object")
    return found
