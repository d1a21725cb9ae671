"""When does a generation of the engine end? A task ends with its death; others await or race it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias, TypeVar

from holdfast.errors import EngineLostError
from holdfast.records import Death

DeathTask: TypeAlias = "asyncio.Task[Death]"
"""A task that ends with the death of the engine, which is its result."""
WorkResult = TypeVar("WorkResult")


@asynccontextmanager
async def first_death(
    *signals: Awaitable[Death], on_death: Callable[[Death], None]
) -> AsyncIterator[DeathTask]:
    """While entered, a task waits for the first of `signals`; `on_death` is called with it once."""
    death_task = asyncio.create_task(_first_of(*signals), name="death of the engine")

    def count(ended: DeathTask) -> None:
        if not ended.cancelled() and ended.exception() is None:
            on_death(ended.result())

    death_task.add_done_callback(count)
    try:
        yield death_task
    finally:
        death_task.cancel()
        await asyncio.wait({death_task})


async def death_within(death_task: DeathTask, deadline_seconds: float) -> Death | None:
    """Return the death, or None if it does not come before the deadline."""
    await asyncio.wait({death_task}, timeout=deadline_seconds)
    return death_task.result() if death_task.done() else None


async def run_unless_dead(
    death_task: DeathTask, work: Awaitable[WorkResult], *, grace_seconds: float = 0.0
) -> WorkResult | None:
    """Return the result of `work`, or None if the engine died and the grace is over."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({death_task, working}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({working}, timeout=grace_seconds)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        await asyncio.wait({working})


async def is_alive_after(death_task: DeathTask, work: Awaitable[None]) -> bool:
    """Do what needs the engine, and return whether it is alive after that."""
    try:
        await run_unless_dead(death_task, work)
    except EngineLostError:
        return False
    return not death_task.done()


async def _first_of(*signals: Awaitable[Death]) -> Death:
    tasks = [asyncio.ensure_future(signal) for signal in signals]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
