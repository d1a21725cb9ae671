"""The first signal is noticed, later ones interrupt, and what waits is cancelled."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from holdfast.verify.interruption import noticed, unless

NUMBERS = (signal.SIGINT, signal.SIGTERM)
DEADLINE_SECONDS = 30


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """The handlers of the test's own process are back at the end."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def forever(ended: list[str]) -> str:
    """Work that ends only if it is cancelled, and notes that."""
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cancelled")
    return "done"


async def at_once() -> str:
    return "done"


@pytest.mark.parametrize("first", NUMBERS)
@pytest.mark.parametrize("second", NUMBERS)
def test_only_the_first_signal_is_noticed(first: signal.Signals, second: signal.Signals) -> None:
    """A second one of either kind interrupts the process as Ctrl-C does."""

    async def twice() -> None:
        with noticed() as interrupted:
            signal.raise_signal(first)
            async with asyncio.timeout(DEADLINE_SECONDS):
                await interrupted.wait()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(second)

    asyncio.run(twice())


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_after_the_run_interrupts(number: signal.Signals) -> None:
    """While the report is written there is nothing left to end early."""

    async def entered() -> None:
        with noticed():
            pass

    asyncio.run(entered())
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_work_is_cancelled_when_the_event_is_set() -> None:
    """And has ended when the wait for it does."""
    ended: list[str] = []

    async def interrupt() -> str | None:
        interrupted = asyncio.Event()
        asyncio.get_running_loop().call_soon(interrupted.set)
        async with asyncio.timeout(DEADLINE_SECONDS):
            return await unless(interrupted, forever(ended))

    assert asyncio.run(interrupt()) is None
    assert ended == ["cancelled"]


def test_work_that_ends_first_is_answered() -> None:
    """With what it returned."""

    async def undisturbed() -> str | None:
        return await unless(asyncio.Event(), at_once())

    assert asyncio.run(undisturbed()) == "done"
