from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.telemetry.loop_lag import BLOCKED_SECONDS, INTERVAL_SECONDS, LargestOf, LoopLag

BLOCK_SECONDS = 2 * (INTERVAL_SECONDS + BLOCKED_SECONDS)
"""Seen as more than `BLOCKED_SECONDS`, wherever in an interval it begins."""
DEADLINE_SECONDS = 60.0


@given(
    lags=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 100)), max_size=30),
    wait_seconds=st.integers(0, 12),
)
def test_the_largest_of_the_window_is_that_of_a_list(
    lags: list[tuple[int, int]], wait_seconds: int
) -> None:
    """It is what searching all lags of the last ten seconds finds."""
    largest, seen, now = LargestOf(10), list[tuple[int, int]](), 0
    for pause_seconds, lag_seconds in lags:
        now += pause_seconds
        largest.add(lag_seconds, now)
        seen.append((now, lag_seconds))
    now += wait_seconds
    expected = max((lag for at, lag in seen if at >= now - 10), default=0)
    assert largest.seconds(now) == expected


def test_an_unmeasured_loop_has_no_lag() -> None:
    """Before it is entered and after it is left, time alone is not a delay."""
    lag = LoopLag()
    lag.mark()

    async def enter() -> None:
        async with lag.measured():
            await asyncio.sleep(0)

    asyncio.run(enter())
    assert lag.lag_seconds() == 0


def _block_for(seconds: float) -> None:
    """What a careless library does on the loop."""
    time.sleep(seconds)


def test_a_block_is_the_lag_of_the_last_minute() -> None:
    """What blocked the loop for longer than an interval is seen, and stays for a minute."""
    lag = LoopLag()

    async def block() -> None:
        async with lag.measured():
            await asyncio.sleep(0)
            _block_for(BLOCK_SECONDS)

    asyncio.run(block())
    assert lag.lag_seconds() > BLOCKED_SECONDS


def test_a_block_is_seen_while_it_lasts() -> None:
    """A scrape in a thread sees a loop that is still blocked."""
    lag, is_seen = LoopLag(), threading.Event()

    def scrape() -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline and not is_seen.is_set():
            if lag.lag_seconds() > BLOCKED_SECONDS:
                is_seen.set()

    async def block() -> None:
        async with lag.measured():
            await asyncio.sleep(0)
            scraper = threading.Thread(target=scrape)
            scraper.start()
            assert is_seen.wait(DEADLINE_SECONDS)
            scraper.join()

    asyncio.run(block())


def test_start_up_is_not_held_against_it(caplog: pytest.LogCaptureFixture) -> None:
    """What blocked before the mark is not warned of."""
    lag = LoopLag()

    async def block() -> None:
        async with lag.measured():
            await asyncio.sleep(0)
            _block_for(BLOCK_SECONDS)

    asyncio.run(block())
    assert not caplog.records


def test_a_block_after_the_mark_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """The second one within a minute adds to the number, not to the log."""
    lag = LoopLag()

    async def block() -> None:
        async with lag.measured():
            lag.mark()
            for seconds in (BLOCK_SECONDS, 2 * BLOCK_SECONDS):
                await asyncio.sleep(0)
                _block_for(seconds)
                await asyncio.sleep(2 * INTERVAL_SECONDS)  # at least one measurement ends

    with caplog.at_level(logging.WARNING):
        asyncio.run(block())
    assert lag.lag_seconds() > BLOCK_SECONDS
    (record,) = caplog.records
    assert "the event loop was blocked for" in record.getMessage()


def test_leaving_ends_the_task() -> None:
    """Nothing runs on the loop any more, also when the body fails."""

    async def fail() -> set[asyncio.Task[object]]:
        with pytest.raises(ValueError, match="body"):
            async with LoopLag().measured():
                raise ValueError("body")
        return asyncio.all_tasks()

    assert len(asyncio.run(fail())) == 1
