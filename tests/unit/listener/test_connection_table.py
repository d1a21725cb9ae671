"""Which connections are told that they are late, and which one makes room for another?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.listener.connection_table import LATE_AT_ONCE, ConnectionSlots, DeadlineQueue

DEADLINE_SECONDS = 60


class Awaited:
    """Something that is late at some time, and then says so."""

    def __init__(self, name: str, told: Callable[[Awaited], None]) -> None:
        self.name = name
        self._told = told

    def is_late(self) -> None:
        """Its time is over."""
        self._told(self)


def late(seconds: float, started: str, *, done: str = "") -> str:
    """Return the late ones of these, started one after the other; some are stopped at once."""

    async def run() -> str:
        is_over, found = asyncio.Event(), list[str]()
        expected = len(set(started) - set(done))

        def told(one: Awaited) -> None:
            found.append(one.name)
            if len(found) == expected:
                is_over.set()

        deadlines = DeadlineQueue(seconds)
        awaited = {name: Awaited(name, told) for name in started}
        for name in started:
            deadlines.start(awaited[name].is_late)
        for name in done:
            deadlines.stop(awaited[name].is_late)
            assert awaited[name].is_late not in deadlines
        async with asyncio.timeout(DEADLINE_SECONDS):
            await is_over.wait()
        return "".join(found)

    return asyncio.run(run())


def test_all_are_told_in_their_order() -> None:
    """However many came at once."""
    many = "".join(map(chr, range(0x4E00, 0x4E00 + 5 * LATE_AT_ONCE)))
    assert late(0.01, many) == many


def test_a_stopped_entry_is_not_called() -> None:
    """Nor does it keep those behind it waiting."""
    assert late(0.01, "abcdef", done="abc") == "def"


def test_a_restarted_entry_has_the_whole_time_again() -> None:
    """It comes after the entries that were started meanwhile."""
    assert late(0.05, "aba") == "ba"


def test_a_member_may_start_itself_again() -> None:
    """So a check of a rate can repeat."""

    async def run() -> int:
        found: list[str] = []
        is_over = asyncio.Event()

        def told(one: Awaited) -> None:
            found.append(one.name)
            if len(found) == 3:
                is_over.set()
            else:
                deadlines.start(one.is_late)

        deadlines = DeadlineQueue(0.01)
        deadlines.start(Awaited("a", told).is_late)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await is_over.wait()
        return len(found)

    assert asyncio.run(run()) == 3


def test_a_time_of_zero_is_none() -> None:
    """Nobody is ever late, but it is still known what is awaited."""

    async def run() -> tuple[bool, bool]:
        found: list[Awaited] = []
        one, two = Awaited("a", found.append), Awaited("b", found.append)
        deadlines = DeadlineQueue(0)
        deadlines.start(one.is_late)
        deadlines.start(two.is_late)
        deadlines.stop(one.is_late)
        await asyncio.sleep(0.05)
        assert not found
        return one.is_late in deadlines, two.is_late in deadlines

    assert asyncio.run(run()) == (False, True)


def test_a_connection_is_evicted_as_was_allowed_last() -> None:
    """What closed it during its TLS handshake would leave it open after that."""
    slots, evicted = ConnectionSlots(1), list[str]()
    slot = slots.take_slot()
    assert slot is not None
    slot.allow_eviction(lambda: evicted.append("handshake"))
    slot.allow_eviction_last(lambda: evicted.append("connection"))
    assert slots.take_slot() is not None
    assert evicted == ["connection"]
    assert slots.take_slot() is None
