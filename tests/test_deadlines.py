"""One timer for many deadlines: each is told in time, and those that were done are not."""

from __future__ import annotations

import asyncio

from holdfast.connections.deadlines import LATE_AT_ONCE, Deadlines

DEADLINE_SECONDS = 20


def late(seconds: float, members: int, *, done: int = 0) -> list[int]:
    """Who was late, of so many members of which the first `done` were done at once."""

    async def run() -> list[int]:
        is_over, found = asyncio.Event(), list[int]()

        def is_late(member: int) -> None:
            found.append(member)
            if len(found) == members - done:
                is_over.set()

        deadlines = Deadlines(seconds, is_late)
        for member in range(members):
            deadlines.start(member)
        for member in range(done):
            deadlines.stop(member)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await is_over.wait()
        return found

    return asyncio.run(run())


def test_all_are_told_in_their_order() -> None:
    """However many came at once."""
    assert late(0.01, 5 * LATE_AT_ONCE) == list(range(5 * LATE_AT_ONCE))


def test_who_was_done_is_not_told() -> None:
    """Nor does it keep those behind it waiting."""
    assert late(0.01, 10, done=5) == [5, 6, 7, 8, 9]


def test_who_is_started_again_has_the_whole_time_again() -> None:
    """And comes after those who were started meanwhile."""

    async def run() -> list[str]:
        found: list[str] = []
        deadlines: Deadlines[str] = Deadlines(0.05, found.append)
        for member in ("a", "b", "a"):
            deadlines.start(member)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while deadlines.oldest is not None:  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0.01)
        return found

    assert asyncio.run(run()) == ["b", "a"]


def test_a_member_may_start_itself_again() -> None:
    """So whoever checks a rate does it over and over."""

    async def run() -> int:
        found: list[str] = []
        is_over = asyncio.Event()

        def is_late(member: str) -> None:
            found.append(member)
            if len(found) == 3:
                is_over.set()
            else:
                deadlines.start(member)

        deadlines: Deadlines[str] = Deadlines(0.01, is_late)
        deadlines.start("a")
        async with asyncio.timeout(DEADLINE_SECONDS):
            await is_over.wait()
        return len(found)

    assert asyncio.run(run()) == 3


def test_a_time_of_zero_is_none() -> None:
    """Nobody is ever late, but the oldest is still known."""

    async def run() -> str | None:
        deadlines: Deadlines[str] = Deadlines(0, lambda _: None)
        deadlines.start("a")
        deadlines.start("b")
        deadlines.stop("a")
        return deadlines.oldest

    assert asyncio.run(run()) == "b"
