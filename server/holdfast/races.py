"""Awaits two things at once, where either may end first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

ENDED_SECONDS = 1.0
"""A task that was cancelled has ended by then, unless it refuses to."""

First = TypeVar("First")
Second = TypeVar("Second")


@asynccontextmanager
async def race(
    first: Awaitable[First], second: Awaitable[Second]
) -> AsyncIterator[tuple[asyncio.Future[First], asyncio.Future[Second]]]:
    """Run both until one is done, and yield both; what still runs at the exit is cancelled.

    Both have ended after the exit, however it comes about. Whatever they raise is in the futures
    alone.
    """
    both = (asyncio.ensure_future(first), asyncio.ensure_future(second))
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        yield both
    finally:
        for future in both:
            future.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def forget_cancellations(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Have cancelled tasks let go of what they used.

    Such a task keeps its CancelledError until its result is read, and with the traceback all frames
    of its coroutine. If one of these refers to the task, only the garbage collector can free them,
    and it frees nothing that is frozen.
    """
    ended, _ = await asyncio.wait([*tasks], timeout=ENDED_SECONDS)
    for task in ended:
        if task.cancelled():
            with suppress(asyncio.CancelledError):
                task.result()
