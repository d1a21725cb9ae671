"""Calls of clients at a scripted engine that dies, and what the supervisor does about it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from callers import DEADLINE_SECONDS, LiftedError, Output, PlainDialect, ScriptedLLM
from holdfast.engine.blame import Verdict
from holdfast.engine.replay import Calls
from holdfast.records import Death
from holdfast.request_context import REQUEST, RequestContext

RAISED = Death("worker_exception", "rank 0: ZeroDivisionError", is_accusing=True)
KILLED = Death("core_exit", "EngineCore was killed")
TRIAL_SECONDS = 60.0


@dataclass
class Bench:
    """Calls, the engine they are at, and what their callers have got."""

    calls: Calls = field(default_factory=lambda: Calls(PlainDialect()))
    llm: ScriptedLLM = field(default_factory=ScriptedLLM)
    generation: int = 0

    def start(self, llm: ScriptedLLM | None = None, *, is_open: bool = True) -> ScriptedLLM:
        """The next generation."""
        self.llm = llm or ScriptedLLM()
        self.generation += 1
        self.calls.started(self.llm, self.generation)
        if is_open:
            self.calls.opened()
        return self.llm

    def bury(self, death: Death = KILLED) -> Verdict:
        """What the supervisor does with a dead engine."""
        self.llm.die()
        self.calls.ended()
        return self.calls.accuse(death)

    def call(
        self, prompt: str, *, context: RequestContext | None = None, **options: Any
    ) -> asyncio.Task[list[Output]]:
        """A caller in a task of its own."""

        async def collect() -> list[Output]:
            REQUEST.set(context or RequestContext())
            arguments = {"prompt": prompt, "request_id": prompt, **options}
            return [output async for output in self.calls.run("generate", arguments)]

        return asyncio.create_task(collect())

    async def until_held(self, count: int) -> None:
        """Return when so many calls wait."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while self.calls.held != count:  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0)


def on_the_bench(scene: Callable[[Bench], Awaitable[None]]) -> Bench:
    """Play a scene within a deadline."""

    async def play() -> Bench:
        bench = Bench()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await scene(bench)
        return bench

    return asyncio.run(play())


@contextmanager
def lifted(kind: type[Exception]) -> Iterator[None]:
    """The block ends with one of our errors, as vLLM's layer sees it."""
    with pytest.raises(LiftedError) as caught:
        yield
    assert isinstance(caught.value.error, kind)
