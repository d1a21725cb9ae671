"""Two things that run at once: the first to end decides, and neither outlives the race."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from holdfast.races import forget_cancellations, race

DEADLINE_SECONDS = 60.0


async def _never() -> None:
    await asyncio.Event().wait()


async def _raising() -> None:
    raise ValueError("lost")


def test_the_second_is_cancelled_once_the_first_is_done() -> None:
    """Its result can be had until the end of the race."""

    async def scene() -> None:
        async with race(asyncio.sleep(0, "done"), _never()) as (first, second):
            assert first.result() == "done"
            assert not second.done()
        assert second.cancelled()

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_SECONDS))


def test_both_have_ended_when_the_race_is_cancelled() -> None:
    """Nothing runs on behind the caller's back."""

    async def scene() -> None:
        ended: list[str] = []

        async def runner(name: str) -> None:
            try:
                await _never()
            finally:
                ended.append(name)

        async def racing() -> None:
            async with race(runner("first"), runner("second")):
                pass

        running = asyncio.create_task(racing())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait({running})
        assert running.cancelled()
        assert sorted(ended) == ["first", "second"]

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_SECONDS))


def test_an_error_is_in_its_future() -> None:
    """One that nobody asks for is not reported as never retrieved."""

    async def scene() -> None:
        async with race(_never(), _raising()) as (first, second):
            assert not first.done()
            with pytest.raises(ValueError, match="lost"):
                second.result()

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_SECONDS))


class Owner:
    """Has a task whose coroutine refers to it."""

    def __init__(self) -> None:
        self.task = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        await asyncio.Event().wait()


def test_a_cancelled_task_lets_go_of_what_it_used() -> None:
    """Without the garbage collector, which frees nothing that is frozen."""

    async def scene() -> bool:
        owner = Owner()
        await asyncio.sleep(0)
        owner.task.cancel()
        await forget_cancellations([owner.task])
        freed = weakref.ref(owner)
        del owner
        return freed() is None

    gc.disable()
    try:
        assert asyncio.run(asyncio.wait_for(scene(), DEADLINE_SECONDS))
    finally:
        gc.enable()
