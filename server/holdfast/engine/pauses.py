"""Pauses, resumes, sleeps and wake-ups by vLLM's routes, in the order in which they are asked for.

An engine does what it was told even if the caller is cancelled, as by `--request-timeout`. So the
calls go on, and know what has become of it. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from holdfast.engine.requests.aborts import Aborts

EngineCall = Callable[[], Coroutine[Any, Any, Any]]
"""Asks the engine for something."""


class Pauses:
    """Has the engine in use pause and go on, and tells `Aborts` whether it is paused."""

    def __init__(self, aborts: Aborts) -> None:
        self._aborts = aborts
        self._turn = asyncio.Lock()
        self._pending = set[asyncio.Task[Any]]()

    async def pause(self, llm: Any, call: EngineCall, quiet_seconds: float) -> None:
        """Pause the engine, which may abort what runs.

        It may hang in the call, which has no deadline: it may wait for long answers. So a lack of
        steps is a stall until the call returns, except in the first `quiet_seconds`.
        """
        await self._to_the_end(self._pause(llm, call, quiet_seconds))

    async def resume(self, llm: Any, call: EngineCall) -> None:
        """Have the engine go on."""
        await self._to_the_end(self._resume(llm, call))

    async def wake(self, llm: Any, call: EngineCall, quiet_seconds: float) -> bool:
        """Wake the engine, and return whether all of it is awake; until then it stays paused."""
        return bool(await self._to_the_end(self._wake(llm, call, quiet_seconds)))

    async def _to_the_end(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return what it comes to; it goes on if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._pending.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._pending.remove(task)
        if not task.cancelled():
            task.exception()  # it has no reader if its caller was cancelled

    async def _pause(self, llm: Any, call: EngineCall, quiet_seconds: float) -> None:
        async with self._in_turn(llm):
            pausing = asyncio.create_task(call())
            number = self._aborts.begin_pause()
        with self._aborts.steps_due_after(quiet_seconds):
            try:
                await pausing
            except Exception:
                # Another call may have paused it before, and it may have paused before it failed.
                self._aborts.settle(number, is_paused=bool(await llm.is_sleeping()))
                raise

    async def _resume(self, llm: Any, call: EngineCall) -> None:
        async with self._in_turn(llm):
            resuming = asyncio.create_task(call())
            number = self._aborts.pauses
        with self._aborts.steps_due_after(0.0):
            await resuming
        self._aborts.settle(number, is_paused=False)

    async def _wake(self, llm: Any, call: EngineCall, quiet_seconds: float) -> bool:
        async with self._in_turn(llm):
            waking = asyncio.create_task(call())
            number = self._aborts.pauses
        with self._aborts.steps_due_after(quiet_seconds):
            is_awake = bool(await waking)
            self._aborts.settle(number, is_paused=bool(await llm.is_sleeping()))
        return is_awake

    @asynccontextmanager
    async def _in_turn(self, llm: Any) -> AsyncIterator[None]:
        """Enter once the engine was sent what was asked for before; it may not have answered.

        Before vLLM sends a pause or a sleep, it empties a cache in the one thread that also reads
        images. What has passed through that thread afterwards comes later (0.32, 0.33).

        Raises:
            EngineDeadError: there is another engine by then.
        """
        generation = self._aborts.generation
        async with self._turn:
            if len(self._pending) > 1:
                thread = llm.renderer._mm_executor  # noqa: SLF001 - see above
                await asyncio.get_running_loop().run_in_executor(thread, bool)
            if generation != self._aborts.generation:
                raise EngineDeadError
            yield
