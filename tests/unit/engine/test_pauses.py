"""Pauses by vLLM's routes, whose callers may leave, over a scripted AsyncLLM."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from holdfast.engine.proxy import EngineProxy


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """What it comes to, in time."""
    return asyncio.run(asyncio.wait_for(work, 60))


@pytest.mark.parametrize("is_awake", [True, False])
def test_a_wake_up_by_vllms_route_says_whether_all_is_awake(*, is_awake: bool) -> None:
    """The route tells its client what the engine said, and an engine that rests stays paused."""

    class Sleeper:
        async def wake_up(self, _tags: list[str] | None) -> bool:
            return is_awake

        async def is_sleeping(self) -> bool:
            return not is_awake

    proxy = EngineProxy()
    proxy._current = Sleeper()
    assert run(proxy.wake_up(None)) is is_awake
    assert proxy.requests.aborts.is_paused is not is_awake


class PausedLLM:
    """Pauses as vLLM's engine does: it stays paused if the call fails, or its caller leaves.

    It is sent a pause once a thread that also reads images has emptied a cache.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self.renderer = SimpleNamespace(_mm_executor=ThreadPoolExecutor(max_workers=1))
        self.has_drained = asyncio.Event()
        self.has_resumed = asyncio.Event()
        self.has_resumed.set()

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        if clear_cache:
            thread = self.renderer._mm_executor
            await asyncio.get_running_loop().run_in_executor(thread, bool)
        if mode == "unknown":
            raise ValueError(mode)
        self.is_paused = True
        if mode == "wait":
            await self.has_drained.wait()
        if mode == "cache":
            raise RuntimeError("Failed to reset the KV connector cache.")

    async def resume_generation(self) -> None:
        await asyncio.sleep(0)
        self.is_paused = False
        await self.has_resumed.wait()

    async def is_sleeping(self) -> bool:
        return self.is_paused


def paused_proxy() -> EngineProxy:
    """A proxy of an engine that can be paused."""
    proxy = EngineProxy()
    proxy._current = PausedLLM()
    return proxy


async def until_idle(proxy: EngineProxy) -> None:
    """Return when no call that pauses the engine or has it go on is pending."""
    while proxy._pauses._pending:  # noqa: ASYNC110 - the loop is all there is
        await asyncio.sleep(0)


async def begun(call: Awaitable[None]) -> asyncio.Future[None]:
    """A call that waits for the engine."""
    future = asyncio.ensure_future(call)
    for _ in range(9):
        await asyncio.sleep(0)
    assert not future.done()
    return future


def test_a_pause_whose_caller_is_cancelled_goes_on() -> None:
    """As by --request-timeout: the engine pauses all the same, and then makes no steps."""

    async def live() -> None:
        proxy = paused_proxy()
        aborts = proxy.requests.aborts
        pausing = await begun(proxy.pause_generation(mode="wait"))
        pausing.cancel()
        await asyncio.wait({pausing})
        # The answers that it waits for need steps.
        assert (aborts.is_paused, aborts.stops_steps) == (True, False)
        proxy.current.has_drained.set()
        while not aborts.stops_steps:  # noqa: ASYNC110 - the loop is all there is
            await asyncio.sleep(0)
        await proxy.resume_generation()
        assert not aborts.is_paused

    run(live())


@pytest.mark.parametrize("mode", ["unknown", "cache"])
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_pause_that_fails_leaves_what_is_known_of_the_engine(
    mode: str, *, is_paused: bool
) -> None:
    """It was paused before, or has paused before the call failed, or was not paused at all."""

    async def live() -> None:
        proxy = paused_proxy()
        if is_paused:
            await proxy.pause_generation()
        with pytest.raises((ValueError, RuntimeError)):
            await proxy.pause_generation(mode=mode)
        assert proxy.current.is_paused is (is_paused or mode == "cache")
        assert proxy.requests.aborts.is_paused is proxy.current.is_paused

    run(live())


def test_a_pause_that_fails_after_its_caller_has_left_is_no_error_of_ours() -> None:
    """asyncio would log a traceback of an exception that nobody has retrieved."""
    logged: list[dict[str, Any]] = []

    async def live() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, said: logged.append(said))
        proxy = paused_proxy()
        with reading_images(proxy.current):
            pausing = await begun(proxy.pause_generation(mode="cache"))
            pausing.cancel()
            await asyncio.wait({pausing})
        await until_idle(proxy)
        gc.collect()

    run(live())
    assert logged == []


def test_an_engine_that_is_resumed_and_paused_at_once_is_paused() -> None:
    """The answer to the first call comes when the second one has begun."""

    async def live() -> None:
        proxy = paused_proxy()
        await proxy.pause_generation()
        proxy.current.has_resumed.clear()
        resuming = await begun(proxy.resume_generation())
        await proxy.pause_generation()
        proxy.current.has_resumed.set()
        await resuming
        assert proxy.requests.aborts.is_paused is proxy.current.is_paused is True

    run(live())


def test_an_engine_is_resumed_though_a_pause_still_waits_for_answers() -> None:
    """The end of that pause changes nothing any more, nor does its failure."""

    async def live() -> None:
        proxy = paused_proxy()
        pausing = await begun(proxy.pause_generation(mode="wait"))
        await proxy.resume_generation()
        assert not proxy.requests.aborts.is_paused
        proxy.current.has_drained.set()
        await pausing
        assert not proxy.requests.aborts.is_paused

    run(live())


@contextmanager
def reading_images(llm: PausedLLM) -> Iterator[None]:
    """Have the thread for images be busy while entered."""
    are_read = threading.Event()
    llm.renderer._mm_executor.submit(are_read.wait)
    try:
        yield
    finally:
        are_read.set()


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_an_engine_goes_on_if_a_pause_before_was_sent_late(mode: str) -> None:
    """Its caller has left, and the resume must not overtake it."""

    async def live() -> None:
        proxy = paused_proxy()
        with reading_images(proxy.current):
            pausing = await begun(proxy.pause_generation(mode=mode))
            pausing.cancel()
            resuming = asyncio.ensure_future(proxy.resume_generation())
            for _ in range(9):
                await asyncio.sleep(0)
        await resuming
        proxy.current.has_drained.set()
        await until_idle(proxy)
        assert (proxy.current.is_paused, proxy.requests.aborts.is_paused) == (False, False)

    run(live())


@pytest.mark.parametrize("options", [{}, {"clear_cache": False}])
def test_a_pause_after_a_resume_that_waits_for_another_is_in_effect(
    options: dict[str, bool],
) -> None:
    """Each is sent when the one before was sent, also what needs no cache emptied."""

    async def live() -> None:
        proxy = paused_proxy()
        calls = [proxy.pause_generation(), proxy.resume_generation()]
        with reading_images(proxy.current):
            waiting = [await begun(call) for call in calls]
            waiting.append(await begun(proxy.pause_generation(**options)))
        await asyncio.gather(*waiting)
        assert (proxy.current.is_paused, proxy.requests.aborts.is_paused) == (True, True)

    run(live())


def test_a_pause_that_fails_leaves_one_that_was_sent_late() -> None:
    """The mark is there when the engine aborts what runs."""

    async def live() -> None:
        proxy = paused_proxy()
        with reading_images(proxy.current):
            pausing = await begun(proxy.pause_generation())
            failing = asyncio.ensure_future(proxy.pause_generation(mode="unknown"))
            for _ in range(9):
                await asyncio.sleep(0)
        await pausing
        with pytest.raises(ValueError, match="unknown"):
            await failing
        assert (proxy.current.is_paused, proxy.requests.aborts.is_paused) == (True, True)

    run(live())


def test_a_pause_that_waits_for_another_does_not_reach_the_next_engine() -> None:
    """Nor does it mark that one as paused."""

    async def live() -> None:
        proxy = paused_proxy()
        lost = proxy.current
        with reading_images(lost):
            await begun(proxy.pause_generation())
            second = await begun(proxy.pause_generation())
            proxy._current = PausedLLM()
            proxy.requests.engine_started(proxy.current, 1)
        with pytest.raises(EngineDeadError):
            await second
        assert not proxy.requests.aborts.is_paused

    run(live())
