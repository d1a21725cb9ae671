"""Ctrl-C and SIGTERM: the first ends the run with a report, the second ends the process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from holdfast.races import race

Result = TypeVar("Result")
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def noticed() -> Iterator[asyncio.Event]:
    """While entered, the first of the signals only sets the event.

    Every later one, and each one after it was left, raises KeyboardInterrupt, so that a terminal is
    released and the exit code says that the run was interrupted.
    """
    loop, interrupted = asyncio.get_running_loop(), asyncio.Event()

    def notice() -> None:
        interrupted.set()
        release()

    def release() -> None:
        for number in _NUMBERS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.default_int_handler)

    for number in _NUMBERS:
        loop.add_signal_handler(number, notice)
    try:
        yield interrupted
    finally:
        release()


async def unless(interrupted: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Return what the work returns; None if the event is set first, which cancels the work."""
    async with race(work, interrupted.wait()) as (attempt, _):
        return attempt.result() if attempt.done() else None
