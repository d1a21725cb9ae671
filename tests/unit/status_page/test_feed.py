"""One producer for all viewers, which does nothing without viewers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import datetime
from typing import Any

import pytest

from holdfast.status_page import feed as feeds
from holdfast.status_page.feed import (
    INTERVAL_SECONDS,
    KEPT_CHANGES,
    MAX_EVENTS_PER_SECOND,
    MAX_VIEWERS,
    Feed,
    interval_seconds,
)
from holdfast.status_page.wall_clock import WallClock
from holdfast.top.reader import EventParser, StatusEvent

DEADLINE_SECONDS = 60


class Counted:
    """A document with a number that a test sets, and how often it was built."""

    def __init__(self) -> None:
        self.number = 0
        self.builds = 0
        self.is_broken = False

    def build(self) -> dict[str, Any]:
        self.builds += 1
        if self.is_broken:
            raise RuntimeError("broken on purpose")
        return {"number": self.number, "constant": {"a": 1}}


async def read(events: AsyncGenerator[bytes, None]) -> list[StatusEvent]:
    """The events of the next part, without comments."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        return [*EventParser().events(await anext(events))]


async def read_first(events: AsyncGenerator[bytes, None]) -> StatusEvent:
    """The first event, which comes after the time to wait before a retry."""
    assert await read(events) == []
    (event,) = await read(events)
    return event


def played(
    scene: Callable[[Feed, Counted], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> Counted:
    """Play a scene with a feed that looks for changes as often as it can."""
    monkeypatch.setattr(feeds, "INTERVAL_SECONDS", 0.001)
    monkeypatch.setattr(feeds, "MAX_EVENTS_PER_SECOND", 1_000_000)
    counted = Counted()

    async def play() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await scene(Feed(counted.build), counted)

    asyncio.run(play())
    return counted


def test_the_document_comes_first_and_then_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The document has the time of its sending."""

    async def scene(feed: Feed, counted: Counted) -> None:
        async with feed.viewing(), aclosing(feed.events()) as events:
            first = await read_first(events)
            document = json.loads(first.data)
            assert first.name == "snapshot"
            assert document.pop("time").endswith("+00:00")
            assert document == {"number": 0, "constant": {"a": 1}}
            counted.number = 7
            (change,) = await read(events)
            assert (change.name, json.loads(change.data)) == ("change", {"number": 7})
            assert change.event_id != first.event_id

    played(scene, monkeypatch)


def test_nothing_is_sent_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except a comment, which keeps the connection open."""
    monkeypatch.setattr(feeds, "COMMENT_SECONDS", 0.05)

    async def scene(feed: Feed, counted: Counted) -> None:
        async with feed.viewing(), aclosing(feed.events()) as events:
            first = await read_first(events)
            builds = counted.builds
            assert await anext(events) == b": alive\n\n"
            assert counted.builds > builds
            counted.number = 1
            while not (found := await read(events)):
                pass
            change = found[0]
            numbers = [int(event.event_id.rpartition("-")[2]) for event in (first, change)]
            assert numbers[1] == numbers[0] + 1

    played(scene, monkeypatch)


def test_all_viewers_get_the_same_bytes_of_one_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change is built and encoded once, however many look."""

    async def scene(feed: Feed, counted: Counted) -> None:
        async with feed.viewing(), feed.viewing():
            assert feed.viewers == 2
            one, two = feed.events(), feed.events()
            async with aclosing(one), aclosing(two):
                await read_first(one)
                await read_first(two)
                counted.number = 1
                builds = counted.builds
                assert await anext(one) is await anext(two)
                assert counted.builds == builds + 1

    played(scene, monkeypatch)


@pytest.mark.parametrize("viewers", [0, 1, 5, 6, 50, MAX_VIEWERS])
def test_many_viewers_get_no_more_events_in_all_than_a_few(viewers: int) -> None:
    """So what they cost is bounded; nobody waits longer than a few seconds."""
    seconds = interval_seconds(viewers)
    assert INTERVAL_SECONDS <= seconds <= 10
    assert viewers / seconds <= MAX_EVENTS_PER_SECOND
    assert (seconds == INTERVAL_SECONDS) == (viewers <= INTERVAL_SECONDS * MAX_EVENTS_PER_SECOND)


def test_nothing_is_built_without_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first viewer, and after the last one."""

    async def scene(feed: Feed, counted: Counted) -> None:
        assert counted.builds == 0
        for _ in range(2):
            async with feed.viewing():
                pass
            builds = counted.builds
            for _ in range(100):
                await asyncio.sleep(0)
            assert (counted.builds, feed.viewers, feed._producer) == (builds, 0, None)

    assert played(scene, monkeypatch).builds


def test_viewers_that_come_and_go_cost_no_more_than_one_that_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loop of connections must not have the document built for each."""
    monkeypatch.setattr(feeds, "INTERVAL_SECONDS", DEADLINE_SECONDS)
    counted = Counted()

    async def come_and_go() -> None:
        feed = Feed(counted.build)
        for _ in range(50):
            async with feed.viewing(), aclosing(feed.events()) as events:
                assert (await read_first(events)).name == "snapshot"

    asyncio.run(come_and_go())
    assert counted.builds == 1


def test_a_viewer_that_comes_back_gets_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what changed without viewers."""

    async def scene(feed: Feed, counted: Counted) -> None:
        async with feed.viewing(), aclosing(feed.events()) as events:
            known = (await read_first(events)).event_id
        counted.number = 3
        async with feed.viewing(), aclosing(feed.events(known)) as events:
            change = await read_first(events)
            assert (change.name, json.loads(change.data)) == ("change", {"number": 3})

    played(scene, monkeypatch)


@pytest.mark.parametrize(
    "event_id", ["", "another0-1", "deadbeef-1", "nonsense", "deadbeef-" + "9" * 5000, "-1"]
)
def test_an_event_of_another_server_is_not_continued(
    event_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The viewer gets the whole document."""

    async def scene(feed: Feed, _: Counted) -> None:
        async with feed.viewing(), aclosing(feed.events(event_id)) as events:
            assert (await read_first(events)).name == "snapshot"

    played(scene, monkeypatch)


def test_an_event_of_the_future_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    """No viewer can have it."""

    async def scene(feed: Feed, _: Counted) -> None:
        last_event_id = f"{feed._name}-{10**15}"
        async with feed.viewing(), aclosing(feed.events(last_event_id)) as events:
            assert (await read_first(events)).name == "snapshot"

    played(scene, monkeypatch)


@pytest.mark.parametrize(
    ("missed", "names"),
    [(KEPT_CHANGES, ["change"] * KEPT_CHANGES), (KEPT_CHANGES + 1, ["snapshot"])],
)
def test_a_slow_viewer_gets_the_document_again(
    missed: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has missed more changes than are kept."""

    async def scene(feed: Feed, counted: Counted) -> None:
        async with feed.viewing(), aclosing(feed.events()) as events:
            await read_first(events)
            for number in range(1, missed + 1):
                counted.number = number
                feed._refresh()
            found = await read(events)
            assert [event.name for event in found] == names
            assert json.loads(found[-1].data)["number"] == missed

    played(scene, monkeypatch)


def test_the_end_is_told_after_the_last_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the server waits until its viewers know."""
    monkeypatch.setattr(feeds, "GOODBYE_SECONDS", float(DEADLINE_SECONDS))

    async def scene(feed: Feed, counted: Counted) -> None:
        met: list[str] = []

        async def view() -> None:
            async with feed.viewing(), aclosing(feed.events()) as events:
                async for part in events:
                    met.extend(event.name for event in EventParser().events(part))

        async with feed.running():
            viewer = asyncio.create_task(view())
            while "snapshot" not in met:  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0)
            counted.number = 9
        assert met == ["snapshot", "change", "bye"]
        await viewer

    played(scene, monkeypatch)


def test_a_failure_reaches_the_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged with the request, rather than that viewers keep an old document."""

    async def scene(feed: Feed, counted: Counted) -> None:
        async with feed.viewing(), aclosing(feed.events()) as events:
            await read_first(events)
            counted.is_broken = True
            with pytest.raises(RuntimeError, match="broken on purpose"):
                await read(events)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            async with feed.viewing():
                pass
        assert feed.viewers == 0

    played(scene, monkeypatch)


def test_a_stream_ends_so_that_its_key_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a goodbye, however much changes; a viewer that comes back has missed nothing."""
    monkeypatch.setattr(feeds, "MAX_STREAM_SECONDS", 0.05)

    async def scene(feed: Feed, counted: Counted) -> None:
        met: list[StatusEvent] = []
        async with feed.viewing(), aclosing(feed.events()) as events:
            async for part in events:
                met.extend(EventParser().events(part))
                counted.number += 1
        assert (met[0].name, met[-1].name) == ("snapshot", "renew")
        assert "bye" not in {event.name for event in met}
        sent = datetime.fromisoformat(json.loads(met[-1].data)["time"])
        assert abs(sent.timestamp() - time.time()) < DEADLINE_SECONDS
        monkeypatch.undo()
        async with feed.viewing(), aclosing(feed.events(met[-2].event_id)) as events:
            assert await read(events) == []
            assert {event.name for event in await read(events)} == {"change"}

    played(scene, monkeypatch)


def test_a_viewer_that_comes_after_a_failure_gets_what_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while one that has not read of the failure yet is still there."""

    async def scene(feed: Feed, counted: Counted) -> None:
        async with feed.viewing():
            counted.is_broken = True
            while feed._producer is None or not feed._producer.done():  # noqa: ASYNC110 - it ends by itself
                await asyncio.sleep(0)
            counted.is_broken = False
            async with feed.viewing(), aclosing(feed.events()) as events:
                assert (await read_first(events)).name == "snapshot"
                counted.number = 1
                assert [event.name for event in await read(events)] == ["change"]

    played(scene, monkeypatch)


def test_a_clock_that_was_set_is_told_with_the_whole_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A viewer knows how far the server's clock is ahead of its own from nothing else."""
    monkeypatch.setattr(feeds, "INTERVAL_SECONDS", 0.001)
    ahead_seconds = 0.0
    counted = Counted()

    async def play() -> None:
        nonlocal ahead_seconds
        feed = Feed(counted.build, WallClock(lambda: time.monotonic() + ahead_seconds))
        async with (
            asyncio.timeout(DEADLINE_SECONDS),
            feed.viewing(),
            aclosing(feed.events()) as events,
        ):
            await read_first(events)
            counted.number = 1
            assert [event.name for event in await read(events)] == ["change"]
            ahead_seconds = 3600.0
            assert [event.name for event in await read(events)] == ["snapshot"]
            counted.number = 2
            assert [event.name for event in await read(events)] == ["change"]

    asyncio.run(play())
