"""Requests of clients to a scripted engine that dies, and what the supervisor does about it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from holdfast.engine.replay import ReplayManager
from holdfast.engine.suspects.blame import BlameVerdict
from holdfast.engine.suspects.suspicions import Suspicions
from holdfast.records import Death, Suspect
from holdfast.request_context import REQUEST, RequestContext
from scripted_llm import DEADLINE_SECONDS, AnsweredError, Output, PlainOutputs, ScriptedLLM

RAISED = Death("worker_exception", "rank 0: ZeroDivisionError", blames_requests=True)
KILLED = Death("core_exit", "EngineCore was killed")
TRIAL_SECONDS = 60.0


def named(*names: str, cause: Any = "core_exit", reached_tokens: int = 1) -> Death:
    """A death in a step of exactly these requests."""
    suspects = tuple(Suspect(name, reached_tokens, is_prefill=False) for name in names)
    return Death(cause, "ended by SIGSEGV", blames_requests=True, suspects=suspects)


@dataclass
class ReplayHarness:
    """A replay manager and the engine that it uses."""

    requests: ReplayManager = field(default_factory=lambda: ReplayManager(PlainOutputs()))
    llm: ScriptedLLM = field(default_factory=ScriptedLLM)
    generation: int = 0

    @property
    def suspicions(self) -> Suspicions:
        """What is known of clients."""
        return self.requests._suspicions

    def start(self, llm: ScriptedLLM | None = None, *, is_open: bool = True) -> ScriptedLLM:
        """The next generation."""
        self.llm = llm or ScriptedLLM()
        self.generation += 1
        self.requests.engine_started(self.llm, self.generation)
        if is_open:
            self.requests.open()
        return self.llm

    async def try_suspects(self, llm: ScriptedLLM | None = None) -> bool:
        """Start the next generation and try the suspects in it; False if it dies of them."""
        self.start(llm, is_open=False)
        return await self.requests.try_suspects(TRIAL_SECONDS)

    def bury(self, death: Death = KILLED) -> BlameVerdict:
        """What the supervisor does with a dead engine."""
        self.llm.die()
        self.requests.engine_ended()
        return self.requests.assign_blame(death)

    def call(
        self, prompt: str, *, context: RequestContext | None = None, **options: Any
    ) -> asyncio.Task[list[Output]]:
        """A caller in a task of its own."""

        async def collect() -> list[Output]:
            REQUEST.set(context or RequestContext())
            arguments = {"prompt": prompt, "request_id": prompt, **options}
            return [output async for output in self.requests.run("generate", arguments)]

        return asyncio.create_task(collect())

    async def until_held(self, count: int) -> None:
        """Return when this many requests wait."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while self.requests.held != count:  # noqa: ASYNC110 - the loop is all there is
                await asyncio.sleep(0)


def run_scene(scene: Callable[[ReplayHarness], Awaitable[None]]) -> ReplayHarness:
    """Play a scene within a deadline."""

    async def play() -> ReplayHarness:
        harness = ReplayHarness()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await scene(harness)
        return harness

    return asyncio.run(play())


@contextmanager
def answered(kind: type[Exception]) -> Iterator[None]:
    """The block ends with one of our errors, as vLLM's layer sees it."""
    with pytest.raises(AnsweredError) as caught:
        yield
    assert isinstance(caught.value.error, kind)


async def killed(
    harness: ReplayHarness,
    death: Death,
    prompts: Sequence[str],
    *,
    held: int | None = None,
    key: str = "",
) -> tuple[list[asyncio.Task[Any]], BlameVerdict]:
    """Send requests, end their engine, and wait until `held` of them wait for the next one."""
    harness.start().hold()
    requests = [harness.call(prompt, context=RequestContext(key=key)) for prompt in prompts]
    await harness.llm.until_received(len(prompts))
    verdict = harness.bury(death)
    await harness.until_held(len(prompts) if held is None else held)
    return requests, verdict
