"""Implements `interface.Engine` with one running generation of vLLM's AsyncLLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from holdfast.engine.baseline import CanaryAnswer
from holdfast.engine.loras import Loras
from holdfast.engine.maintenance import Maintenance
from holdfast.engine.rpc import check_canary, rpc_deadline
from holdfast.errors import EngineRefusedError, EngineSilentError, EngineStartError
from holdfast.labels import SleepLevel, SleepTag
from holdfast.nodes.channel import SILENCE_SECONDS
from holdfast.nodes.remote_ranks import RemoteRanks, root_death_of_nodes
from holdfast.patches.stat_logger import Queues
from holdfast.processes import tree
from holdfast.processes.deaths import DeathWatch, required_processes
from holdfast.processes.memory import host_memory_bytes
from holdfast.processes.stacks import is_compiling, stacks_of
from holdfast.races import forget_cancellations, race
from holdfast.records import Death, EngineFacts, RankStats, Suspect
from holdfast.worker.crash_records import tracebacks
from holdfast.worker.step_requests import read_reached_tokens, read_suspects
from holdfast.workspace.plan import GrowthPolicy, WorkspaceSpec
from holdfast.workspace.stats import read_all

logger = logging.getLogger("holdfast.engine")

RPC_DEADLINE_SECONDS = 30.0
SHUTDOWN_DEADLINE_SECONDS = 15.0


class AsyncEngine:
    """One generation of vLLM's engine, made by `EngineLauncher.running`; see `interface.Engine`."""

    def __init__(  # noqa: PLR0913, PLR0917 - the launcher names each part
        self,
        llm: Any,
        facts: EngineFacts,
        spec: WorkspaceSpec,
        processes: Callable[[], frozenset[psutil.Process]],
        queues: Queues,
        loras: Loras,
        *,
        remote: RemoteRanks | None,
        limit_context: Callable[[int], None],
    ) -> None:
        self._remote = remote
        self._limit_context = limit_context
        self._queues = queues
        self.maintenance = Maintenance(llm, facts)
        self._loras = loras
        self._is_held = False
        self.is_trying_canary = False
        """Whether the engine runs a canary request."""
        self._llm = llm
        self._facts = facts
        self._spec = spec
        self._processes = processes
        directory = Path(spec.stats_directory)
        local_ranks = read_all(directory, reads_steps=False)
        required = required_processes(processes(), llm.core_processes(), local_ranks)
        self._required = required
        self._watch = DeathWatch(
            directory,
            required,
            llm.core_processes(),
            has_errored=lambda: bool(llm.errored),
        )
        # Started before the first request: a pidfd must be opened while its process is surely ours.
        self._death = asyncio.create_task(self._first_death(), name=f"death {spec.generation}")

    @property
    def generation(self) -> int:
        return self._spec.generation

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def llm(self) -> Any:
        """vLLM's object, for the proxy."""
        return self._llm

    def ranks(self, *, reads_steps: bool = True) -> tuple[RankStats, ...]:
        local = read_all(Path(self._spec.stats_directory), reads_steps=reads_steps)
        return local if self._remote is None else self._remote.beside(local)

    def reached_tokens(self) -> Mapping[str, int]:
        """Return the tokens that the requests of the last steps have reached, by internal ID."""
        return read_reached_tokens(Path(self._spec.stats_directory))

    def requests_in_step(self) -> frozenset[str]:
        """Return vLLM's internal IDs of the requests in the running steps."""
        return frozenset(suspect.request_id for suspect in self.suspects() or ())

    @asynccontextmanager
    async def scheduling_paused(self) -> AsyncIterator[None]:
        self._is_held = True
        pausing = asyncio.ensure_future(self._pause_scheduling())
        try:
            try:
                await asyncio.shield(pausing)
                yield
            finally:
                # A task that is cancelled during the pause leaves a paused engine, too. Engines of
                # a data-parallel group refuse to resume before they have paused (0.32, 0.33).
                await asyncio.gather(pausing, return_exceptions=True)
                async with rpc_deadline("schedule again", RPC_DEADLINE_SECONDS):
                    await self._llm.resume_generation()
        finally:
            self._is_held = False

    async def _pause_scheduling(self) -> None:
        async with rpc_deadline("stop scheduling", RPC_DEADLINE_SECONDS):
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def queued_requests(self) -> int:
        return int(self._llm.get_num_unfinished_requests())

    async def reset_prefix_cache(self) -> None:
        async with rpc_deadline("empty its prefix cache", RPC_DEADLINE_SECONDS):
            await self._llm.reset_prefix_cache()

    async def set_growth(self, policy: GrowthPolicy) -> None:
        """Change the growth policy of every rank.

        Raises:
            EngineStartError: a rank rejected it. EngineLostError: the engine has died.
        """
        try:
            async with rpc_deadline("change its growth policy", RPC_DEADLINE_SECONDS):
                answers = await self._llm.collective_rpc("holdfast_set_growth", args=(policy,))
        except (EngineSilentError, EngineRefusedError) as error:
            raise EngineStartError(error.cause) from error
        failed = [answer["error"] for answer in answers if "error" in answer]
        if failed:
            raise EngineStartError(f"a rank rejected the growth policy {policy}: {failed[0]}")

    def limit_context(self, tokens: int | None) -> None:
        self._limit_context(self._facts.max_model_len if tokens is None else tokens)

    def process_ids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._required)

    def process_tracebacks(self) -> str:
        return tracebacks(Path(self._spec.stats_directory))

    def host_memory_bytes(self) -> int | None:
        try:
            return host_memory_bytes(self._required)
        except (OSError, psutil.Error):
            return None

    async def until_dead(self) -> Death:
        return await asyncio.shield(self._death)

    async def _first_death(self) -> Death:
        if self._remote is None:
            return await self._watch.death()
        # Other nodes wait for a process here that is stopped. On one node, the stall timeout leaves
        # time for a debugger.
        here = self._watch.death_or_stop(SILENCE_SECONDS)
        return await root_death_of_nodes(here, self._remote)

    async def restore_adapters(self) -> None:
        """Load the adapters that it should have, unless it dies meanwhile: nobody watches yet."""
        async with race(self._loras.restore(), self.until_dead()) as (restoring, _):
            if restoring.done():
                restoring.result()

    def report_unexplained_abort(self) -> None:
        self._watch.report_unexplained_abort()

    @property
    def is_paused(self) -> bool:
        return self._is_held or self.maintenance.stops_steps or self._loras.stops_steps

    async def sleep(self, level: SleepLevel) -> None:
        await self.maintenance.sleep(level)

    async def wake(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        asleep = await self.maintenance.wake(tags)
        if not asleep and self.maintenance.has_discarded_weights:
            await self._loras.restore(is_stale=True)
        return asleep

    def running_requests(self) -> Mapping[int, int]:
        counts: Mapping[int, int] = self._llm.requests_by_engine()
        return counts

    def blocked_since_seconds(self) -> Mapping[int, float]:
        return self._queues.blocked_since_seconds()

    def deferring(self) -> frozenset[int]:
        return self._queues.deferring()

    async def canary(self, prompt: Sequence[int] = ()) -> CanaryAnswer:
        before = {(rank.engine, rank.rank): rank.steps for rank in self.ranks(reads_steps=False)}
        self.is_trying_canary = True
        try:
            answer = await check_canary(self._llm, self._facts, prompt)
        finally:
            self.is_trying_canary = False
        if not answer.top:
            return answer
        has_company = any(
            step.requests > 1
            for rank in self.ranks()
            for step in rank.recent_steps
            if step.index > before.get((rank.engine, rank.rank), 0)
        )
        return CanaryAnswer() if has_company else answer

    def is_compiling(self) -> bool:
        is_elsewhere = self._remote is not None and self._remote.is_compiling
        return is_elsewhere or is_compiling(self._processes())

    async def dump_stacks(self) -> str:
        try:
            processes = self._processes()
        except OSError as error:  # too many open files, which does not end a stall
            return f"The stacks cannot be read: {error}"
        return await stacks_of(processes, Path(self._spec.stats_directory))

    def suspects(self) -> tuple[Suspect, ...] | None:
        running = read_suspects(Path(self._spec.stats_directory))
        return tuple(chain.from_iterable(running.values())) or None

    def declare_dead(self) -> None:
        self._llm.declare_dead()

    async def stop(self) -> None:
        """End the engine and all its processes; return when none is left.

        It runs nothing any more, so its processes get no orderly shutdown: that takes seconds, for
        which the clients of the next generation would wait too.
        """
        self._death.cancel()
        self._llm.stop_reading()
        try:
            async with asyncio.timeout(SHUTDOWN_DEADLINE_SECONDS):
                await asyncio.to_thread(self._llm.shutdown, timeout=0)
        except TimeoutError:
            logger.warning("vLLM did not stop its engine in time, so its processes are killed")
        remaining = await asyncio.to_thread(lambda: tree.kill(self._processes()))
        if remaining:
            logger.error("could not kill processes %s of the engine", remaining)
        await forget_cancellations([self._death, *self._llm.tasks()])
