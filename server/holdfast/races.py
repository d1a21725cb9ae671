"""Awaits two things at once, where either may end first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

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
