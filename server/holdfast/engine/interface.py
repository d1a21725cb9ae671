"""What Holdfast may ask of an engine. `async_engine` implements it with vLLM, tests with a fake."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from holdfast.engine.baseline import CanaryAnswer
from holdfast.engine.replay import ReplayManager
from holdfast.labels import CacheKind, SleepLevel, SleepTag
from holdfast.records import Death, EngineFacts, RankStats, Suspect
from holdfast.workspace.plan import GrowthPolicy, WorkspaceSpec

UntilOutOfMemory = Callable[[Callable[[], tuple[RankStats, ...]]], Coroutine[Any, Any, str]]
"""Returns what was left when the ranks of an engine were killed during its start.

It takes what reads the reports of the ranks, and calls that in a thread.
"""


class Maintenance(Protocol):
    """What an operator may have an engine do while it serves.

    Every method raises EngineSilentError if the engine does not answer in time, EngineRefusedError
    if it fails, and EngineLostError if it is dead.
    """

    async def start_profile(self, prefix: str | None) -> None:
        """Begin a profile; ConflictError if no profiler is configured."""

    async def stop_profile(self) -> None:
        """Write the profile; ConflictError if no profiler is configured."""

    async def reset_caches(self, kinds: frozenset[CacheKind]) -> None:
        """Empty these caches; ConflictError if one is in use."""

    async def save_sharded_state(
        self, path: str, *, pattern: str | None, max_size_bytes: int | None
    ) -> None:
        """Write each rank's weights to a directory on its host; no step runs meanwhile."""


class Engine(Protocol):
    """One generation of a running engine."""

    @property
    def maintenance(self) -> Maintenance:
        """Profiles, caches and saved weights."""

    async def sleep(self, level: SleepLevel) -> None:
        """Abort all requests and free the device's memory; level 2 discards the weights.

        Raises:
            EngineSilentError, EngineRefusedError, EngineLostError: its state is now unknown.
        """

    async def wake(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        """Take memory back, and return which tags still sleep. Raises as `sleep` does."""

    @property
    def generation(self) -> int:
        """The number of this generation, counted from 1."""

    @property
    def facts(self) -> EngineFacts:
        """Sizes and capabilities, constant for this generation."""

    def ranks(self, *, reads_steps: bool = True) -> tuple[RankStats, ...]:
        """Return what every rank last wrote. Never waits for the engine, and works after its death.

        Without the recent steps, this is cheap enough for each health check.
        """

    def scheduling_paused(self) -> AbstractAsyncContextManager[None]:
        """Keep new requests unscheduled while entered, and schedule them together on leaving."""

    async def queued_requests(self) -> int:
        """Return how many requests the engine has accepted and not finished."""

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""

    async def until_dead(self) -> Death:
        """Wait for its death, and return the cause within a second of any process's end."""

    @property
    def is_paused(self) -> bool:
        """Whether the engine was asked for something that keeps it from making steps."""

    def running_requests(self) -> Mapping[int, int]:
        """Count the requests in each of several engines; empty where there is only one."""

    def blocked_since_seconds(self) -> Mapping[int, float]:
        """Since when each scheduler has had requests waiting unheld and none running."""

    def deferring(self) -> frozenset[int]:
        """The engines whose scheduler currently has requests and defers all of them."""

    async def canary(self, prompt: Sequence[int] = ()) -> CanaryAnswer:
        """Have the engine generate one token; EngineLostError if it cannot.

        Return what it said after `prompt`. The result is empty without a prompt, and if another
        request shared a step with it.
        """

    def is_compiling(self) -> bool:
        """Whether one of its processes runs a compiler, for which a step may have to wait."""

    async def dump_stacks(self) -> str:
        """Describe for the log, within 10 s, what its processes are doing. Never raises."""

    def suspects(self) -> tuple[Suspect, ...] | None:
        """The requests of the running step; None if no step runs or its requests are unknown."""

    def declare_dead(self) -> None:
        """Fail every pending and every later call to it: the engine has died."""

    def process_ids(self) -> tuple[int, ...]:
        """Return the processes on this host that it cannot live without."""

    def process_tracebacks(self) -> str:
        """Return the tracebacks that its processes left, for the log; empty if none did."""

    def host_memory_bytes(self) -> int | None:
        """Measure the host memory of the processes in `process_ids`; None if that is impossible.

        See `processes.memory`. Compilers, which come and go, do not count. Any thread may ask.
        """

    def limit_context(self, tokens: int | None) -> None:
        """Have vLLM's own validation refuse requests over this limit of prompt and answer together.

        None restores the engine's own limit. The engine itself does not change.
        """

    async def set_growth(self, policy: GrowthPolicy) -> None:
        """Change the growth policy of every rank; EngineStartError if a rank rejects it.

        EngineLostError: the engine has died.
        """


class EngineLauncher(Protocol):
    """Starts one generation after another from one configuration."""

    @property
    def fingerprint(self) -> str:
        """A digest of everything that a learned reservation depends on."""

    @property
    def requests(self) -> ReplayManager:
        """The clients' requests, whichever generation runs them."""

    def directory_of(self, generation: int) -> Path:
        """Return the directory that the ranks of a generation write to."""

    async def until_startable(self, on_wait: Callable[[str], None]) -> None:
        """Return once all nodes that the engine needs are free; `on_wait` gets why it waits."""

    def running(self, spec: WorkspaceSpec) -> AbstractAsyncContextManager[Engine]:
        """Run an engine while entered. All its ranks have reported; no process is left behind.

        Raises:
            EngineStartError: the engine did not start.
            NodeLostError: another node was lost meanwhile.
            PluginMissingError: a rank did not report.
        """
