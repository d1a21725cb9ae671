"""What Holdfast may ask of an engine: `async_llm` answers with vLLM, tests with a fake."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from holdfast.engine.replay import Calls
from holdfast.records import (
    CacheKind,
    Death,
    EngineFacts,
    RankStats,
    SleepLevel,
    SleepTag,
    Suspect,
)
from holdfast.workspace.plan import GrowthPolicy, WorkspaceSpec


class Upkeep(Protocol):
    """What an operator may have an engine do while it serves.

    Everything here raises EngineSilentError, EngineRefusedError or EngineLostError as the engine
    answers.
    """

    async def start_profile(self, prefix: str | None) -> None:
        """Begin a profile; ConflictError if no profiler is configured."""

    async def stop_profile(self) -> None:
        """Write the profile; ConflictError if no profiler is configured."""

    async def reset_caches(self, kinds: frozenset[CacheKind]) -> None:
        """Empty caches; ConflictError if one is in use."""

    async def save_sharded_state(
        self, path: str, *, pattern: str | None, max_size_bytes: int | None
    ) -> None:
        """Write the weights of each rank to a directory of its host; no step runs meanwhile."""


class Engine(Protocol):
    """One generation of a running engine."""

    @property
    def upkeep(self) -> Upkeep:
        """What else it can be asked to do."""

    async def sleep(self, level: SleepLevel) -> None:
        """Give up what runs and the memory of the device: of level 2 the weights are lost.

        Raises:
            EngineSilentError, EngineRefusedError, EngineLostError: nobody knows what it is now.
        """

    async def wake(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        """Take memory back; what is still asleep. Raises as `sleep` does."""

    @property
    def generation(self) -> int:
        """Counts from 1."""

    @property
    def facts(self) -> EngineFacts:
        """Sizes and capabilities, constant for this generation."""

    def ranks(self, *, with_steps: bool = True) -> tuple[RankStats, ...]:
        """What every rank last wrote. Never waits for the engine; works after its death.

        Without the recent steps it is cheap enough for every health request.
        """

    def scheduling_held(self) -> AbstractAsyncContextManager[None]:
        """While entered, requests queue up unscheduled; leaving schedules them together."""

    async def queued_requests(self) -> int:
        """Requests that the engine has accepted and not finished."""

    async def forget_prefixes(self) -> None:
        """Empty the prefix cache."""

    async def until_dead(self) -> Death:
        """Return, within a second of the death of any of its processes, the cause of it."""

    @property
    def is_paused(self) -> bool:
        """Whether it was told not to schedule, or to sleep."""

    def running_requests(self) -> Mapping[int, int]:
        """Requests that each engine of several has; empty where there is one."""

    def blocked_since_seconds(self) -> Mapping[int, float]:
        """Since when a scheduler has said that requests wait, nothing holds them, and none runs."""

    def deferring(self) -> frozenset[int]:
        """The engines whose scheduler says now that it has requests, and defers all of them."""

    async def canary(self) -> None:
        """Return when an engine that was idle has made one token; EngineLostError if it cannot."""

    def is_compiling(self) -> bool:
        """Whether a compiler runs below it, for which a step may have to wait."""

    async def dump_stacks(self) -> str:
        """What its processes are doing, for the log, within 10 s. Never raises."""

    def suspects(self) -> tuple[Suspect, ...] | None:
        """The requests of the step that runs; None if none does, or nobody knows which."""

    def give_up(self) -> None:
        """Have every call that waits for it fail now as lost, and every later one: it has died."""

    def last_words(self) -> str:
        """The tracebacks that its processes left, for the log; empty if there is none."""

    def limit_context(self, tokens: int | None) -> None:
        """Have vLLM's own validation refuse requests of more tokens, prompt and answer together.

        None is for all that the engine takes. The engine itself does not change.
        """

    async def set_growth(self, policy: GrowthPolicy) -> None:
        """Change the growth policy of every rank; EngineStartError if one does not take it.

        EngineLostError: the engine has died.
        """


class EngineLauncher(Protocol):
    """Starts one generation after the other from one configuration."""

    @property
    def fingerprint(self) -> str:
        """Names everything that a learned reservation depends on."""

    @property
    def calls(self) -> Calls:
        """What clients ask of the engine, whichever generation answers."""

    def directory_of(self, generation: int) -> Path:
        """The directory that the ranks of a generation write to."""

    def running(self, spec: WorkspaceSpec) -> AbstractAsyncContextManager[Engine]:
        """While entered, an engine runs, all of whose ranks report; no process is left behind.

        Raises:
            EngineStartError: the engine did not come up; PluginMissingError: a rank is silent.
        """
