"""How does a generation of the engine end? One task knows, and others wait for it or race it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias, TypeVar

from holdfast.records import Death

Fate: TypeAlias = "asyncio.Task[Death]"
"""Ends with the death of the engine, and says why."""
Answer = TypeVar("Answer")


@asynccontextmanager
async def fate_of(
    *omens: Awaitable[Death], counted: Callable[[Death], None]
) -> AsyncIterator[Fate]:
    """While entered, the first of `omens` to come is the fate; it is told to `counted` once."""
    fate = asyncio.create_task(_first_of(*omens), name="fate of the engine")

    def count(ended: Fate) -> None:
        if not ended.cancelled() and ended.exception() is None:
            counted(ended.result())

    fate.add_done_callback(count)
    try:
        yield fate
    finally:
        fate.cancel()
        await asyncio.wait({fate})


async def within(fate: Fate, deadline_seconds: float) -> Death | None:
    """The death, if it comes in time."""
    await asyncio.wait({fate}, timeout=deadline_seconds)
    return fate.result() if fate.done() else None


async def unless(
    fate: Fate, work: Awaitable[Answer], *, grace_seconds: float = 0.0
) -> Answer | None:
    """What the work comes to; None if it has not ended so long after the death of the engine."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({fate, working}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({working}, timeout=grace_seconds)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        await asyncio.wait({working})


async def _first_of(*omens: Awaitable[Death]) -> Death:
    tasks = [asyncio.ensure_future(omen) for omen in omens]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
