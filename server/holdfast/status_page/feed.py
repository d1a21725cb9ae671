"""One producer for all viewers: it builds the document, and encodes each change once.

It runs only while there are viewers. One that reads too slowly for the changes that are kept gets
the whole document again, so what a viewer occupies is bounded.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from holdfast.status_page.patch import StatusDocument, difference
from holdfast.status_page.wall_clock import WallClock
from holdfast.telemetry.logs import iso_time

MAX_VIEWERS = 100
MAX_VIEWERS_PER_KEY = 50
"""One key cannot take the places of all others. Viewers without a key are not told apart."""
INTERVAL_SECONDS = 0.5
"""The least time between two changes."""
MAX_EVENTS_PER_SECOND = 10
"""For all viewers together, so that fifty of them cost the server no more than five do."""
KEPT_CHANGES = 16
"""The changes that a slow viewer may be behind."""
COMMENT_SECONDS = 15.0
"""A silence of this length ends with a comment, which keeps proxies from closing the connection."""
MAX_STREAM_SECONDS = 300.0
"""A stream ends after this time, and its viewer comes back. So a key that was taken back, which is
then refused, sees nothing for longer."""
GOODBYE_SECONDS = 1.0
"""The time for viewers to be told of the end."""
RETRY_MILLISECONDS = 2000

_EVENT_ID = re.compile(r"(?P<name>[0-9a-f]{8})-(?P<number>[0-9]{1,18})")
_COMMENT = b": alive\n\n"
_BYE = b'event: bye\ndata: {"reason":"the server stops"}\n\n'


class Feed:
    """The document and its newest changes, as server-sent events. Belongs to one event loop."""

    def __init__(self, build: Callable[[], StatusDocument], clock: WallClock | None = None) -> None:
        self._build = build
        self._clock = clock or WallClock()
        self._name = secrets.token_hex(4)
        """Distinguishes the events of this process from those of another."""
        self._document: StatusDocument = {}
        self._built_seconds = -math.inf
        """When it was built last."""
        self._number = 0
        """The number of the newest change."""
        self._changes: deque[tuple[int, bytes]] = deque(maxlen=KEPT_CHANGES)
        self._snapshot = b""
        """The document as JSON without its first brace; empty until a viewer needs it."""
        self._changed = asyncio.Event()
        self._viewers = 0
        self._viewers_by_key: Counter[str] = Counter()
        self._empty = asyncio.Event()
        self._empty.set()
        self._producer: asyncio.Task[None] | None = None
        self._has_ended = False

    @property
    def viewers(self) -> int:
        """How many there are."""
        return self._viewers

    def is_full(self, key: str = "") -> bool:
        """Whether no further viewer with the key of this name is accepted; "" stands for none."""
        has_too_many = bool(key) and self._viewers_by_key[key] >= MAX_VIEWERS_PER_KEY
        return has_too_many or self._viewers >= MAX_VIEWERS

    def current(self) -> StatusDocument:
        """Return the document as of now, for one that looks only once."""
        return {"time": iso_time(time.time()), **self._build()}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """On leaving, tell all viewers that the server stops, and wait until they are told."""
        try:
            yield
        finally:
            self._has_ended = True
            if self._viewers:
                self._refresh()
            self._wake()
            with suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await self._empty.wait()

    @asynccontextmanager
    async def viewing(self, key: str = "") -> AsyncIterator[None]:
        """Count a viewer, and its key, while entered, and produce changes for it."""
        self._viewers += 1
        self._viewers_by_key[key] += 1
        self._empty.clear()
        try:
            if self._producer is None or self._producer.done():
                # One that comes and goes all the time must not have it built each time.
                if time.monotonic() - self._built_seconds >= INTERVAL_SECONDS:
                    self._refresh()
                self._producer = asyncio.create_task(self._produce(), name="status page")
            yield
        finally:
            self._viewers -= 1
            self._viewers_by_key[key] -= 1
            if not self._viewers_by_key[key]:
                del self._viewers_by_key[key]
            if not self._viewers:
                self._empty.set()
                await self._end_producer()

    async def events(self, last_event_id: str = "") -> AsyncGenerator[bytes, None]:
        """Yield events for a viewer until the server stops; use it within `viewing`.

        They begin after the last one that the viewer has, if that is known here. They end after
        `MAX_STREAM_SECONDS` with the request to come back. Each part that is yielded consists of
        whole events.
        """
        seen = self._number_of(last_event_id)
        end_seconds = time.monotonic() + MAX_STREAM_SECONDS
        yield b"retry: %d\n\n" % RETRY_MILLISECONDS
        while True:
            left_seconds = end_seconds - time.monotonic()
            if left_seconds <= 0 and not self._has_ended:
                yield _renewal()
                return
            if seen != self._number:
                events = self._events_after(seen)
                seen = self._number
                yield events
            elif self._has_ended:
                yield _BYE
                return
            elif not await self._has_changed(min(left_seconds, COMMENT_SECONDS)):
                yield _COMMENT

    async def _end_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.cancel()
            await asyncio.wait({producer})

    async def _has_changed(self, seconds: float) -> bool:
        """Wait for a change, or the end; False after a silence of this length."""
        self._raise_failure()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _raise_failure(self) -> None:
        if self._producer is not None and self._producer.done():
            self._producer.result()

    async def _produce(self) -> None:
        try:
            while True:
                await asyncio.sleep(interval_seconds(self._viewers))
                self._refresh()
        finally:
            self._wake()

    def _refresh(self) -> None:
        """Build the document, and keep what has changed."""
        document, self._built_seconds = self._build(), time.monotonic()
        if self._clock.was_set():
            # Only the whole document has the time, by which viewers set their clocks.
            self._changes.clear()
            self._number += 1
            self._wake()
        patch = difference(self._document, document)
        if not patch:
            return
        self._number += 1
        self._document, self._snapshot = document, b""
        change = b"id: %b\nevent: change\ndata: %b\n\n" % (self._id(), _encoded(patch))
        self._changes.append((self._number, change))
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _events_after(self, seen: int | None) -> bytes:
        """Return all changes after the one with this number, or the whole document."""
        if seen is None or not self._changes or seen < self._changes[0][0] - 1:
            return self._whole()
        return b"".join(change for number, change in self._changes if number > seen)

    def _whole(self) -> bytes:
        """Return the document with the time of its sending, by which clients set their clocks."""
        self._snapshot = self._snapshot or _encoded(self._document)[1:]
        return b'id: %b\nevent: snapshot\ndata: {"time":"%b",%b\n\n' % (
            self._id(),
            _now(),
            self._snapshot,
        )

    def _id(self) -> bytes:
        return f"{self._name}-{self._number}".encode()

    def _number_of(self, event_id: str) -> int | None:
        """Return the number of an event of this process; None if it is not one."""
        found = _EVENT_ID.fullmatch(event_id)
        if found is None or found["name"] != self._name or int(found["number"]) > self._number:
            return None
        return int(found["number"])


def interval_seconds(viewers: int) -> float:
    """Return the time between two changes: the more viewers, the longer."""
    return max(INTERVAL_SECONDS, viewers / MAX_EVENTS_PER_SECOND)


def _renewal() -> bytes:
    """Return the end of a stream, with the time: the viewer's own clock may have been set."""
    return b'event: renew\ndata: {"reason":"the key is checked again","time":"%b"}\n\n' % _now()


def _now() -> bytes:
    return iso_time(time.time()).encode()


def _encoded(document: StatusDocument) -> bytes:
    text = json.dumps(document, default=_plain, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _plain(value: Any) -> dict[str, Any]:
    """Return a read-only mapping as the dictionary that JSON knows."""
    return dict(value)
