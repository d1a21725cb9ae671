"""Starts and stops vLLM's AsyncLLM, one generation after the other, in this process.

The rules of a restart were each paid for in a run (vLLM 0.32): a VllmConfig is never reused, since
a start adds to it; the constructor blocks, so it runs in a thread; its output handler must be
started on the loop at once, or an early death is missed; the renderer outlives the engine.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from holdfast.engine import compat, processes
from holdfast.engine.calls import Calls
from holdfast.engine.client import EngineProxy
from holdfast.engine.deaths import DeathWatch, must_live
from holdfast.engine.facts import engine_facts, world
from holdfast.engine.stat_logger import Queues, prometheus_logger
from holdfast.errors import EngineStartError, PluginMissingError
from holdfast.records import Death, EngineFacts, RankStats
from holdfast.workspace.causes import root_cause, tracebacks
from holdfast.workspace.plan import SPEC_VARIABLE, GrowthPolicy, WorkspaceSpec
from holdfast.workspace.stats import read_all

logger = logging.getLogger("holdfast.engine")

ABANDON_DEADLINE_SECONDS = 30.0
DEATH_POLL_SECONDS = 0.2
LONGEST_SOCKET_PATH = 64
"""Linux takes 107 bytes, and vLLM adds a slash and a UUID."""
RPC_DEADLINE_SECONDS = 30.0
SHUTDOWN_DEADLINE_SECONDS = 15.0


class AsyncEngine:
    """One generation of vLLM's engine. Made by `EngineLauncher.start`; see `interface.Engine`."""

    def __init__(
        self,
        llm: Any,
        facts: EngineFacts,
        spec: WorkspaceSpec,
        family: frozenset[psutil.Process],
        queues: Queues,
    ) -> None:
        self._queues = queues
        self._is_held = False
        self._llm = llm
        self._facts = facts
        self._spec = spec
        self._family = family
        self._watch = DeathWatch(
            Path(spec.stats_directory),
            must_live(family, compat.core_processes(llm), self.ranks(with_steps=False)),
            compat.core_processes(llm),
            has_errored=lambda: bool(llm.errored),
        )
        # Before the first request: a pidfd is opened while its process is certain to be ours.
        self._death = asyncio.create_task(self._watch.death(), name=f"death {spec.generation}")

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

    def ranks(self, *, with_steps: bool = True) -> tuple[RankStats, ...]:
        return read_all(Path(self._spec.stats_directory), with_steps=with_steps)

    @asynccontextmanager
    async def scheduling_held(self) -> AsyncIterator[None]:
        self._is_held = True
        try:
            async with _answered():
                await self._llm.pause_generation(mode="keep", clear_cache=False)
            try:
                yield
            finally:
                async with _answered():
                    await self._llm.resume_generation()
        finally:
            self._is_held = False

    async def queued_requests(self) -> int:
        return int(self._llm.get_num_unfinished_requests())

    async def forget_prefixes(self) -> None:
        async with _answered():
            await self._llm.reset_prefix_cache()

    async def set_growth(self, policy: GrowthPolicy) -> None:
        """Change the growth policy of every rank.

        Raises:
            EngineStartError: a rank did not take it.
        """
        async with _answered():
            answers = await self._llm.collective_rpc("holdfast_set_growth", args=(policy,))
        failed = [answer["error"] for answer in answers if "error" in answer]
        if failed:
            raise EngineStartError(f"a rank refused the growth policy {policy}: {failed[0]}")

    def last_words(self) -> str:
        return tracebacks(Path(self._spec.stats_directory))

    async def until_dead(self) -> Death:
        return await asyncio.shield(self._death)

    def accuse_termination(self) -> None:
        self._watch.accuse_termination()

    @property
    def is_paused(self) -> bool:
        return self._is_held

    def running_requests(self) -> Mapping[int, int]:
        return compat.requests_by_engine(self._llm)

    def blocked_since_seconds(self) -> Mapping[int, float]:
        return self._queues.blocked_since_seconds()

    def is_compiling(self) -> bool:
        return False

    async def canary(self) -> None:
        pass

    async def dump_stacks(self) -> str:
        return ""

    async def stop(self) -> None:
        """End the engine and every process of it; returns when none is left.

        Nothing runs in it any more, so that nobody is asked to leave in order: that takes vLLM's
        processes seconds, which a client that waits for the next generation would wait too.
        """
        self._death.cancel()
        # The renderer is kept for the next generation, see `compat.kept_renderer`.
        self._llm.renderer = None
        left_behind = await asyncio.to_thread(processes.shared_memory, self._family)
        try:
            async with asyncio.timeout(SHUTDOWN_DEADLINE_SECONDS):
                await asyncio.to_thread(self._llm.shutdown, timeout=0)
        except TimeoutError:
            logger.warning("vLLM did not stop its engine in time; killing its processes")
        remaining = await asyncio.to_thread(processes.kill, self._family)
        processes.unlink(left_behind)
        if remaining:
            logger.error("processes %s of the engine could not be killed", remaining)


class EngineLauncher:
    """Starts generations from one pristine configuration."""

    def __init__(  # noqa: PLR0913 - what one configuration resolves to
        self,
        config: Any,
        arguments: Any,
        *,
        fingerprint: str,
        has_template: bool,
        runtime_directory: Path,
        is_probing: Callable[[], bool],
    ) -> None:
        self._config = config
        self._arguments = arguments
        self._fingerprint = fingerprint
        self._has_template = has_template
        self._runtime_directory = runtime_directory
        self.queues = Queues()
        self._logger_class = prometheus_logger(is_probing, self.queues)
        self._renderer: Any | None = None
        self._generation = 0
        self.proxy = EngineProxy()

    @property
    def fingerprint(self) -> str:
        """Names what a learned reservation depends on."""
        return self._fingerprint

    @property
    def calls(self) -> Calls:
        """What clients ask of the engine, whichever generation answers."""
        return self.proxy.calls

    @property
    def is_restartable(self) -> bool:
        """Whether a dead engine can be started again: on several nodes the others are not told."""
        return int(self._config.parallel_config.nnodes) == 1

    def next_generation(self) -> tuple[int, Path]:
        self._generation += 1
        return self._generation, self._runtime_directory / str(self._generation)

    @asynccontextmanager
    async def running(self, spec: WorkspaceSpec) -> AsyncIterator[AsyncEngine]:
        """A running engine behind the proxy; see `interface.EngineLauncher`."""
        engine = await self._start(spec)
        self.proxy.use(engine.llm)
        self.calls.started(engine.llm, engine.generation)
        self.calls.gave_up = engine.accuse_termination
        try:
            yield engine
        finally:
            self.calls.ended()
            compat.declare_dead(engine.llm)
            self.proxy.use(None)
            self._logger_class.generation_ended()
            await asyncio.shield(engine.stop())
            shutil.rmtree(spec.stats_directory, ignore_errors=True)

    async def _start(self, spec: WorkspaceSpec) -> AsyncEngine:
        directory = Path(spec.stats_directory)
        _prepare(directory, spec)
        before = processes.children()
        try:
            llm = await self._construct(directory, before)
        except BaseException:
            await asyncio.shield(
                asyncio.to_thread(lambda: processes.kill(processes.children() - before))
            )
            raise
        family = processes.children() - before
        try:
            return await self._engine(llm, spec, family)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(processes.kill, family))
            raise

    async def _construct(self, directory: Path, before: frozenset[psutil.Process]) -> Any:
        construct = asyncio.create_task(asyncio.to_thread(self._blocking_construct, directory))
        try:
            with compat.start_errors(lambda: root_cause(directory)):
                return await asyncio.shield(construct)
        except asyncio.CancelledError:
            await _abandon(construct, before)
            raise

    def _blocking_construct(self, directory: Path) -> Any:
        variables = {SPEC_VARIABLE: str(directory / "spec.json"), **self._socket_directory()}
        is_silent = self._arguments.disable_log_stats
        with _environment(variables), compat.kept_renderer(self._renderer):
            return AsyncLLM.from_vllm_config(
                # A start adds to its configuration, so each gets its own copy.
                vllm_config=copy.deepcopy(self._config),
                usage_context=UsageContext.OPENAI_API_SERVER,
                enable_log_requests=self._arguments.enable_log_requests,
                aggregate_engine_logging=self._arguments.aggregate_engine_logging,
                disable_log_stats=is_silent,
                stat_loggers=None if is_silent else [self._logger_class],
            )

    def _socket_directory(self) -> dict[str, str]:
        """Have vLLM's sockets in our directory: processes that are killed leave theirs behind.

        Not where the user chose, nor where the path would be too long for a Unix socket.
        """
        path = str(self._runtime_directory)
        is_ours = "VLLM_RPC_BASE_PATH" not in os.environ
        return {"VLLM_RPC_BASE_PATH": path} if is_ours and len(path) < LONGEST_SOCKET_PATH else {}

    async def _engine(
        self, llm: Any, spec: WorkspaceSpec, family: frozenset[psutil.Process]
    ) -> AsyncEngine:
        # On the loop at once, or vLLM misses a death before the first request.
        llm._run_output_handler()  # noqa: SLF001 - started by the constructor only on a loop
        async with asyncio.timeout(RPC_DEADLINE_SECONDS):
            tasks = frozenset(map(str, await llm.get_supported_tasks()))
            await llm.reset_mm_cache()
        self._renderer = llm.renderer
        ranks = read_all(Path(spec.stats_directory))
        _require_every_rank(world(self._config), ranks, spec)
        facts = engine_facts(
            llm,
            tasks,
            fingerprint=self._fingerprint,
            has_template=self._has_template,
            is_unified=any(rank.is_unified_memory for rank in ranks),
        )
        return AsyncEngine(llm, facts, spec, family, self.queues)


@asynccontextmanager
async def _answered() -> AsyncIterator[None]:
    """A call to the engine that must answer in time; TimeoutError or EngineLostError if not."""
    with compat.death_errors():
        async with asyncio.timeout(RPC_DEADLINE_SECONDS):
            yield


def _prepare(directory: Path, spec: WorkspaceSpec) -> None:
    directory.mkdir(mode=0o700, parents=True)
    spec.write(directory / "spec.json")


def _require_every_rank(
    wanted: tuple[tuple[int, int], ...], ranks: tuple[RankStats, ...], spec: WorkspaceSpec
) -> None:
    fresh = {
        (rank.engine, rank.rank)
        for rank in ranks
        if rank.generation == spec.generation and rank.is_locked
    }
    silent = [place for place in wanted if place not in fresh]
    if silent:
        places = ", ".join(f"rank {rank} of engine {engine}" for engine, rank in silent)
        raise PluginMissingError(
            f"the workspace plugin did not report from {places}",
            remedy="install holdfast in the environment of every worker, and name `holdfast` in "
            "VLLM_PLUGINS if that is set.",
        )


async def _abandon(construct: asyncio.Task[Any], before: frozenset[psutil.Process]) -> None:
    """End what the constructor's thread waits for until it returns: it cannot be cancelled."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ABANDON_DEADLINE_SECONDS
    while not construct.done() and loop.time() < deadline:
        await asyncio.to_thread(lambda: processes.kill(processes.children() - before))
        await asyncio.wait({construct}, timeout=DEATH_POLL_SECONDS)
    if construct.done() and construct.exception() is None:
        await asyncio.to_thread(construct.result().shutdown, timeout=0)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
