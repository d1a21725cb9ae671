"""Starts vLLM's AsyncLLM, one generation after another, in this process.

Each rule of a restart comes from a failed run (vLLM 0.32): a VllmConfig is never reused, since a
start adds to it; the constructor blocks, so it runs in a thread; its output handler must be started
on the loop at once, or an early death is missed; the renderer outlives the engine.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from vllm.usage.usage_lib import UsageContext

from holdfast.engine.async_engine import RPC_DEADLINE_SECONDS, AsyncEngine
from holdfast.engine.canary import until_stuck
from holdfast.engine.checked_llm import CheckedLLM, UnsentError
from holdfast.engine.device_memory import device_memory
from holdfast.engine.facts import engine_facts, world
from holdfast.engine.grammars.checked import Grammars, grammars_for
from holdfast.engine.grammars.compile_limit import CompileLimit
from holdfast.engine.loras import Loras
from holdfast.engine.proxy import EngineProxy
from holdfast.engine.replay import Calls
from holdfast.engine.suspicions import Suspicions
from holdfast.engine.turns import Capacity, Turns
from holdfast.engine.vllm_errors import start_errors
from holdfast.errors import EngineStartError, PluginMissingError
from holdfast.patches import front_end
from holdfast.patches.stat_logger import Queues, prometheus_logger
from holdfast.processes import cleanup, environment, exit_codes, forkserver, tree
from holdfast.processes.native_env import NativeVariables
from holdfast.records import RankStats
from holdfast.worker import builds
from holdfast.worker.crash_records import read_causes, root_cause, root_of
from holdfast.workspace.plan import SPEC_VARIABLE, WorkspaceSpec
from holdfast.workspace.stats import read_all

ABANDON_DEADLINE_SECONDS = 30.0
ABANDON_POLL_SECONDS = 0.2
ENGINE_SLOWNESS = 2.0
"""How many times longer an engine may take for a grammar: it may have to compile another first."""
LONGEST_SOCKET_PATH = 64
"""Linux takes 107 bytes, and vLLM adds a slash and a UUID."""

Family = Callable[[], frozenset[psutil.Process]]
"""Returns every living process of one engine."""


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
        stall_timeout_seconds: float,
        grammar_timeout_seconds: float,
        native_variables: NativeVariables,
        learned_directory: Path | None,
    ) -> None:
        self._native_variables = native_variables
        self._stall_timeout_seconds = stall_timeout_seconds
        self._config = config
        self._arguments = arguments
        self._fingerprint = fingerprint
        self._has_template = has_template
        self._runtime_directory = runtime_directory
        self.queues = Queues()
        self._is_probing = is_probing
        self._engine_in_use: AsyncEngine | None = None
        self._logger_class = prometheus_logger(self._is_quiet, self.queues)
        self._renderer: Any | None = None
        self._memory = device_memory(config.parallel_config)
        self._grammars: Grammars = grammars_for(config, grammar_timeout_seconds)
        suspicions = Suspicions(_suspicions_path(learned_directory, fingerprint))
        self.proxy = EngineProxy(self._grammars, suspicions)
        self.count_keys: Callable[[], int] = lambda: 0
        """Counts the API keys that share the engine."""
        self.loras = Loras(self.proxy, is_enabled=config.lora_config is not None)

    @property
    def fingerprint(self) -> str:
        """A digest of everything that a learned reservation depends on."""
        return self._fingerprint

    @property
    def calls(self) -> Calls:
        """What clients ask of the engine, whichever generation answers."""
        return self.proxy.calls

    def directory_of(self, generation: int) -> Path:
        return self._runtime_directory / str(generation)

    @asynccontextmanager
    async def running(self, spec: WorkspaceSpec) -> AsyncIterator[AsyncEngine]:
        """Run an engine behind the proxy; see `interface.EngineLauncher`."""
        await self._memory.until_returned()
        # The zmq context of the last engine is part of a reference cycle, and holds a dozen
        # descriptors and four threads. Closing it is not safe: its sockets belong to tasks that
        # have just ended. vLLM has frozen what a start leaves, so collecting takes a millisecond.
        gc.collect()
        forkserver.ensure_running(native_variables=self._native_variables.known)
        directory = Path(spec.stats_directory)
        before = tree.children()
        try:
            async with self._started(spec, partial(self._family, before)) as engine:
                with self._used(engine), front_end.variables_read_once():
                    await self.loras.restore()
                    yield engine
        finally:
            tree.reap(before)
            cleanup.remove(directory)

    def _family(self, before: frozenset[psutil.Process]) -> frozenset[psutil.Process]:
        """The processes started since, except those that try grammars: no engine owns them."""
        return tree.children() - before - self._grammars.family()

    def _is_quiet(self) -> bool:
        """Whether only Holdfast itself has asked for what the engine is doing now."""
        engine = self._engine_in_use
        is_canary_alone = (
            engine is not None and engine.is_trying_canary and not self.calls.in_engine
        )
        return self._is_probing() or is_canary_alone

    @contextmanager
    def _used(self, engine: AsyncEngine) -> Iterator[None]:
        """Give this engine to the proxy and its calls while entered."""
        self._engine_in_use = engine
        turns = Turns(Capacity.of(engine.facts), self.count_keys)
        engine.llm.take_turns(turns)
        self.proxy.use(engine.llm)
        self.calls.gave_up = engine.accuse_termination
        self.calls.in_step = engine.requests_in_step
        self.calls.unsent = turns.unsent
        self.calls.started(engine.llm, engine.generation)
        try:
            yield
        finally:
            self.calls.ended()
            engine.give_up()
            turns.end(UnsentError)
            engine.llm.leave_turns()
            self.proxy.use(None)
            self._engine_in_use = None
            self._logger_class.generation_ended()

    @asynccontextmanager
    async def _started(self, spec: WorkspaceSpec, family: Family) -> AsyncIterator[AsyncEngine]:
        """Run an engine while entered; none of its processes survives an exit of any kind."""
        directory = Path(spec.stats_directory)
        with start_errors(lambda: ""):
            _prepare(directory, spec)
        mapped: frozenset[Path] = frozenset()
        try:
            llm = await self._construct(directory, family)
            engine = await self._met(llm, spec, family)
            try:
                mapped = await asyncio.to_thread(lambda: cleanup.shared_memory(family()))
                yield engine
            finally:
                await asyncio.shield(engine.stop())
        finally:
            await asyncio.shield(asyncio.to_thread(lambda: tree.kill(family())))
            cleanup.unlink(mapped)

    async def _construct(self, directory: Path, family: Family) -> Any:
        ended = exit_codes.noted(forkserver.exit_codes_directory())
        construct = asyncio.create_task(asyncio.to_thread(self._blocking_construct, directory))
        stuck = asyncio.create_task(
            until_stuck(lambda: family() | forkserver.server(), self._stall_timeout_seconds)
        )
        try:
            await asyncio.wait({construct, stuck}, return_when=asyncio.FIRST_COMPLETED)
            if not construct.done():
                cause = _cause(directory, ended) or stuck.result()
                raise EngineStartError(
                    f"the engine could not start: {cause}", remedy="see the engine's log above."
                )
            with start_errors(lambda: _cause(directory, ended)):
                return construct.result()
        finally:
            stuck.cancel()
            if not construct.done():
                await _abandon(construct, family)

    def _blocking_construct(self, directory: Path) -> Any:
        is_silent = self._arguments.disable_log_stats
        with (
            environment.changed(_variables(directory)),
            front_end.kept_renderer(self._renderer),
            self._started_cores(),
        ):
            return CheckedLLM.from_vllm_config(
                # A start adds to its configuration, so each gets its own copy.
                vllm_config=copy.deepcopy(self._config),
                usage_context=UsageContext.OPENAI_API_SERVER,
                enable_log_requests=self._arguments.enable_log_requests,
                aggregate_engine_logging=self._arguments.aggregate_engine_logging,
                disable_log_stats=is_silent,
                stat_loggers=None if is_silent else [self._logger_class],
            )

    def _started_cores(self) -> AbstractContextManager[None]:
        """Choose how vLLM starts its EngineCores while this is entered."""
        forkserver.heed_spoilt_forks()
        if not forkserver.is_in_use():
            return nullcontext()
        return front_end.forked_cores(self._config, forkserver.CoreContext())

    async def _met(self, llm: Any, spec: WorkspaceSpec, family: Family) -> AsyncEngine:
        """Call `_engine` for a vLLM that may die at any moment, and shut it down if it does."""
        try:
            with start_errors(lambda: root_cause(Path(spec.stats_directory))):
                return await self._engine(llm, spec, family)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(llm.shutdown, timeout=0))
            raise

    async def _engine(self, llm: Any, spec: WorkspaceSpec, family: Family) -> AsyncEngine:
        llm.leave_grammars_to(
            CompileLimit(
                ENGINE_SLOWNESS * self._grammars.timeout_seconds, self.queues.deferring_seconds
            )
        )
        # Started on the loop at once, or vLLM misses a death before the first request.
        llm._run_output_handler()  # noqa: SLF001 - started by the constructor only on a loop
        async with asyncio.timeout(RPC_DEADLINE_SECONDS):
            tasks = frozenset(map(str, await llm.get_supported_tasks()))
            await llm.reset_mm_cache()
        self._renderer = front_end.lasting(llm.renderer)
        ranks = read_all(Path(spec.stats_directory))
        _require_every_rank(world(self._config), ranks, spec)
        if not forkserver.has_forked(ranks[0].pid):  # otherwise the variables are known already
            self._native_variables.remember(ranks[0].pid)
        facts = engine_facts(
            llm,
            tasks,
            fingerprint=self._fingerprint,
            has_template=self._has_template,
            is_unified=any(rank.is_unified_memory for rank in ranks),
        )
        return AsyncEngine(
            llm,
            facts,
            spec,
            family,
            self.queues,
            self.loras,
            limit_context=self.proxy.limit_context,
        )


def _prepare(directory: Path, spec: WorkspaceSpec) -> None:
    directory.mkdir(mode=0o700, parents=True)
    spec.write(directory / "spec.json")
    builds.prepare(directory)
    # Inductor precompiles its headers below the temporary directory, wherever its cache is (torch
    # 2.13, `codecache._HEADER_DIR`): without this link every generation spends seconds on it again.
    cache = Path(default_cache_dir())
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / cache.name).symlink_to(cache)


def _cause(directory: Path, ended_before: frozenset[Path]) -> str:
    """Read why a start failed from what its processes left; a killed process leaves no record."""
    cause = root_of(read_causes(directory))
    if cause is not None and not cause.is_consequence:
        return cause.error
    killed = exit_codes.first_killed(forkserver.exit_codes_directory(), ended_before)
    return killed or (cause.error if cause else "")


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
        missing = ", ".join(f"rank {rank} of engine {engine}" for engine, rank in silent)
        raise PluginMissingError(
            f"the workspace plugin did not report from {missing}",
            remedy="install holdfast in the environment of every worker, and add `holdfast` to "
            "VLLM_PLUGINS if that is set.",
        )


async def _abandon(construct: asyncio.Task[Any], family: Family) -> None:
    """Kill what the constructor's thread waits for until it returns: it cannot be cancelled."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ABANDON_DEADLINE_SECONDS
    while not construct.done() and loop.time() < deadline:
        # It may wait for the fork server, which is not part of any engine's family.
        await asyncio.to_thread(forkserver.end_if_stopped)
        await asyncio.to_thread(lambda: tree.kill(family()))
        await asyncio.wait({construct}, timeout=ABANDON_POLL_SECONDS)
    if construct.done() and construct.exception() is None:
        await asyncio.to_thread(construct.result().shutdown, timeout=0)


def _variables(directory: Path) -> dict[str, str]:
    """The variables that the processes of one generation find in their environment.

    Killed processes leave their temporary files and vLLM's sockets behind, so both go into the
    generation's own directory, unless its path is too long for a Unix socket. Caches do not
    belong there.
    """
    variables = {SPEC_VARIABLE: str(directory / "spec.json")}
    if len(str(directory)) >= LONGEST_SOCKET_PATH:
        return variables
    ours = {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{default_cache_dir()}/flash_attention_cute_dsl",
        "TMPDIR": str(directory),
        "TORCHINDUCTOR_CACHE_DIR": default_cache_dir(),
        "VLLM_RPC_BASE_PATH": str(directory),
    }
    # The user's own choices stand, except for the temporary files.
    kept = {name for name in ours if name in os.environ} - {"TMPDIR"}
    return variables | {name: value for name, value in ours.items() if name not in kept}


def _suspicions_path(directory: Path | None, fingerprint: str) -> Path | None:
    """The record of what ended engines like this one; another model or version has its own."""
    return directory / f"suspicions-{fingerprint}.json" if directory is not None else None
