"""Who ends waits for the scrape that will show it, and for nobody else."""

from __future__ import annotations

import asyncio

import pytest

from fakes import FakeClock
from holdfast.telemetry.scrapes import LONGEST_WAIT_SECONDS, Scrapes


def scraped(*ages_seconds: float) -> Scrapes:
    """What remembers scrapes of these ages, the oldest first."""
    clock = FakeClock()
    end_seconds = clock.now_seconds
    scrapes = Scrapes(clock)
    for age_seconds in ages_seconds:
        clock.now_seconds = end_seconds - age_seconds
        scrapes.count()
    clock.now_seconds = end_seconds
    return scrapes


def waits(scrapes: Scrapes) -> bool:
    """Whether it waits, for a scrape that then comes."""

    async def scene() -> bool:
        waiting = asyncio.create_task(scrapes.until_next(unless=asyncio.Event().wait))
        for _ in range(3):
            await asyncio.sleep(0)
        was_waiting = not waiting.done()
        scrapes.count()
        async with asyncio.timeout(LONGEST_WAIT_SECONDS / 2):
            await waiting
        return was_waiting

    return asyncio.run(scene())


@pytest.mark.parametrize(
    ("ages_seconds", "is_awaited"),
    [
        ((), False),
        ((3,), False),
        ((33, 18, 3), True),
        ((33, 18), True),
        ((50, 35, 20), False),
        ((600, 540, 480), False),
        ((60, 45, 40, 25, 17), True),
    ],
    ids=["none", "one", "soon", "late", "no more", "long gone", "two in turns"],
)
def test_a_scrape_is_awaited_where_one_is_due(
    ages_seconds: tuple[float, ...], *, is_awaited: bool
) -> None:
    """By the longest pause between the last ones; one alone says nothing."""
    assert waits(scraped(*ages_seconds)) == is_awaited


def test_who_does_not_come_is_given_up() -> None:
    """The wait ends by itself."""

    async def scene() -> None:
        scrapes = Scrapes()
        scrapes.count()
        scrapes.count()
        async with asyncio.timeout(LONGEST_WAIT_SECONDS / 2):
            await scrapes.until_next(unless=asyncio.Event().wait)

    asyncio.run(scene())


def test_a_scrape_is_not_awaited_by_who_is_asked_to_stop() -> None:
    """The first signal ends the wait, whoever made a scrape seem due; so does an earlier one."""

    async def scene(*, is_asked_before: bool) -> None:
        scrapes, stop = scraped(60, 32, 3), asyncio.Event()
        if is_asked_before:
            stop.set()
        waiting = asyncio.create_task(scrapes.until_next(unless=stop.wait))
        await asyncio.sleep(0)
        stop.set()
        async with asyncio.timeout(LONGEST_WAIT_SECONDS / 2):
            await waiting

    asyncio.run(scene(is_asked_before=False))
    asyncio.run(scene(is_asked_before=True))
