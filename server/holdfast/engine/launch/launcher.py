"""Starts vLLM's AsyncLLM, one generation after another, in this process.

Each rule comes from a failed restart (vLLM 0.32). A VllmConfig is never reused, since a start adds
to it. The constructor blocks, so it runs in a thread. The output handler must be started on the
event loop at once, or an early death is missed. The renderer outlives the engine.
"""

from __future__ import annotations

import asyncio
import copy
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from vllm.usage.usage_lib import UsageContext

from holdfast.engine.async_engine import RPC_DEADLINE_SECONDS, AsyncEngine
from holdfast.engine.checked_llm import CheckedLLM, UnsentError
from holdfast.engine.grammars.checker import GrammarChecker, grammar_checker
from holdfast.engine.interface import UntilOutOfMemory
from holdfast.engine.launch import construction, startup
from holdfast.engine.launch.device_memory import device_memory
from holdfast.engine.launch.head_node import run_over_nodes
from holdfast.engine.launch.hung_start import StartTimer
from holdfast.engine.launch.startup import FindProcesses
from holdfast.engine.loras import Loras
from holdfast.engine.model import identity
from holdfast.engine.model.facts import engine_facts, world
from holdfast.engine.proxy import EngineProxy
from holdfast.engine.replay import ReplayManager
from holdfast.engine.requests import continuation
from holdfast.engine.requests.sequence_queue import Capacity, SequenceQueue
from holdfast.engine.suspects.suspicion_files import suspicion_files
from holdfast.engine.suspects.suspicions import Suspicions
from holdfast.engine.vllm_errors import start_errors
from holdfast.errors import RequestLostError
from holdfast.nodes.channel import SILENCE_SECONDS
from holdfast.nodes.generations import NodeGenerations
from holdfast.nodes.remote_ranks import RemoteRanks, unless_lost
from holdfast.patches import front_end
from holdfast.patches.stat_logger import Queues, prometheus_logger
from holdfast.processes import cleanup, environment, forkserver, tree
from holdfast.processes.environment import NativeVariables
from holdfast.records import RankStats
from holdfast.telemetry.load import Load, SchedulerReport, with_running
from holdfast.worker.crash_records import root_cause
from holdfast.workspace.plan import WorkspaceSpec

COMPILE_TIME_FACTOR = 2.0
"""How much longer EngineCore may take for a grammar: it may have to compile another one first."""


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
        continues_streams: bool,
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
        self._files = identity.ModelFiles(config)
        self._sequences = SequenceQueue()
        self._logger_class = prometheus_logger(self._is_without_traffic, self.queues)
        self._renderer: Any | None = None
        self._memory = device_memory(config.parallel_config)
        self._is_unified_memory = False
        self._start_timer = StartTimer()
        self._grammars: GrammarChecker = grammar_checker(config, grammar_timeout_seconds)
        self.suspicions = Suspicions(suspicion_files(learned_directory, fingerprint))
        """What ended engines, here and at the other servers with the same state directory."""
        self.proxy = EngineProxy(
            self._grammars,
            self.suspicions,
            continues_streams=continues_streams and continuation.fits_vllm(),
        )
        self.count_keys: Callable[[], int] = lambda: 0
        """Counts the API keys that share the engine."""
        self.until_out_of_memory: UntilOutOfMemory = _for_ever
        """Returns how much was left when a start was ended because the host ran out of memory."""
        self.loras = Loras(self.proxy, is_enabled=config.lora_config is not None)
        self.nodes: NodeGenerations | None = None
        """Runs each generation on the other nodes too, if there are any."""

    @property
    def fingerprint(self) -> str:
        """A digest of everything that a learned reservation depends on."""
        return self._fingerprint

    @property
    def requests(self) -> ReplayManager:
        """The clients' requests, whichever generation runs them."""
        return self.proxy.requests

    def host_memory_bytes(self) -> int | None:
        """Measure the host memory of the engine in use; None without one. Any thread may ask."""
        engine = self._engine_in_use
        return None if engine is None else engine.host_memory_bytes()

    def request_load(self) -> Load:
        """Count what waits here and what the engine has, without the probe and a lone canary.

        Any thread may ask.
        """
        held, engines = self.requests.held, self._config.parallel_config.data_parallel_size
        if self._engine_in_use is None or self._is_without_traffic():
            return Load(held, schedulers=engines * (SchedulerReport(),))
        sequences, is_silent = self._sequences, self._arguments.disable_log_stats
        reports = self.queues.reports(engines)
        if is_silent:
            reports = engines * (SchedulerReport(kv_usage=None),)
        if is_silent or self._config.model_config.runner_type == "pooling":
            reports = with_running(reports, sequences.sent, sequences.capacity.running)
        return Load(held + sequences.waiting, sequences.sent, reports)

    def directory_of(self, generation: int) -> Path:
        return self._runtime_directory / str(generation)

    async def until_startable(self, on_wait: Callable[[str], None]) -> None:
        """Return once every node is free for a generation; see `interface.EngineLauncher`."""
        if self.nodes is not None:
            await self.nodes.until_complete(on_wait)

    @asynccontextmanager
    async def running(self, spec: WorkspaceSpec) -> AsyncIterator[AsyncEngine]:
        """Run an engine behind the proxy; see `interface.EngineLauncher`."""
        grammar_seconds = COMPILE_TIME_FACTOR * self._grammars.timeout_seconds
        spec = replace(spec, grammar_seconds=grammar_seconds)
        await self._memory.until_returned()
        # The last engine's zmq context is part of a reference cycle, and holds a dozen descriptors
        # and four threads. Closing it is not safe: its sockets belong to tasks that have just
        # ended. vLLM has frozen what a start leaves, so collecting takes a millisecond.
        gc.collect()
        forkserver.ensure_running(native_variables=self._native_variables.known)
        directory = Path(spec.stats_directory)
        before = tree.children()
        try:
            async with (
                self._on_other_nodes(spec) as remote,
                self._start_engine(spec, partial(self._engine_processes, before), remote) as engine,
            ):
                if await self._files.have_changed():
                    error = RequestLostError("The model has changed since this answer began.")
                    self.requests.refuse(lambda request: request.has_yielded, error)
                with self._in_use(engine), front_end.variables_read_once():
                    await unless_lost(engine.restore_adapters(), remote)
                    yield engine
        finally:
            tree.reap(before)
            cleanup.remove(directory)

    def _on_other_nodes(
        self, spec: WorkspaceSpec
    ) -> AbstractAsyncContextManager[RemoteRanks | None]:
        return nullcontext() if self.nodes is None else self.nodes.generation(spec)

    def _engine_processes(self, before: frozenset[psutil.Process]) -> frozenset[psutil.Process]:
        """Return the processes started since, except those that try grammars for every engine."""
        return tree.children() - before - self._grammars.processes()

    def _is_without_traffic(self) -> bool:
        """Whether all that the engine does now was asked for by Holdfast itself."""
        engine = self._engine_in_use
        is_canary_alone = (
            engine is not None and engine.is_trying_canary and not self.requests.in_engine
        )
        return self._is_probing() or is_canary_alone

    @contextmanager
    def _in_use(self, engine: AsyncEngine) -> Iterator[None]:
        """Let the proxy and the clients' requests use this engine while entered."""
        self._engine_in_use = engine
        self._sequences = sequences = SequenceQueue(Capacity.of(engine.facts), self.count_keys)
        engine.llm.queue_sequences(sequences, self.requests.aborts.came)
        self.proxy.use(engine.llm)
        self.requests.aborts.on_unexpected = engine.report_unexplained_abort
        self.requests.in_step = engine.requests_in_step
        self.requests.progress.reached_tokens = engine.reached_tokens
        self.requests.presence.unsent = sequences.unsent
        self.requests.long_prompts.engine_started(engine.facts, sequences.prefilling)
        self.requests.engine_started(engine.llm, engine.generation)
        try:
            yield
        finally:
            self.requests.engine_ended()
            engine.declare_dead()
            sequences.end(UnsentError)
            engine.llm.stop_queueing()
            self.proxy.use(None)
            self._engine_in_use = None
            self._logger_class.generation_ended()
            self.requests.forget_engine()

    @asynccontextmanager
    async def _start_engine(
        self, spec: WorkspaceSpec, processes: FindProcesses, remote: RemoteRanks | None
    ) -> AsyncIterator[AsyncEngine]:
        """Run an engine while entered; none of its processes survives the exit, however it ends."""
        directory = Path(spec.stats_directory)
        with start_errors(lambda: ""):
            startup.prepare(directory, spec)
        recorded = partial(startup.recorded, processes, directory)
        try:
            async with construction.explained(remote, is_unified_memory=self._is_unified_memory):
                llm = await self._construct(directory, recorded, remote)
                engine = await unless_lost(self._connect(llm, spec, processes, remote), remote)
            try:
                await asyncio.to_thread(recorded)
                yield engine
            finally:
                if remote is not None:
                    remote.end()
                await asyncio.shield(engine.stop())
        finally:
            await asyncio.shield(asyncio.to_thread(lambda: tree.kill(recorded())))

    async def _construct(
        self, directory: Path, processes: FindProcesses, remote: RemoteRanks | None
    ) -> Any:
        config = self._generation_config(remote)
        failures = [
            construction.out_of_memory(self.until_out_of_memory, directory),
            self._start_timer.until_hung(processes, directory, is_alone=remote is None),
        ]
        if remote is not None:
            failures.append(construction.node_lost(remote))
        with self._start_timer.timed():
            return await construction.constructed(
                lambda: self._construct_in_thread(directory, config),
                *failures,
                directory=directory,
                processes=processes,
                # The nodes that wait for a stopped process can do nothing else.
                stopped_seconds=self._stall_timeout_seconds if remote is None else SILENCE_SECONDS,
                is_unified_memory=self._is_unified_memory,
            )

    def _generation_config(self, remote: RemoteRanks | None) -> Any:
        """Return a copy of the configuration, since a start adds to its own."""
        config = copy.deepcopy(self._config)
        if remote is not None:
            run_over_nodes(config, remote)
        return config

    def _construct_in_thread(self, directory: Path, config: Any) -> Any:
        is_silent = self._arguments.disable_log_stats
        with (
            environment.overridden(startup.variables(directory)),
            front_end.kept_renderer(self._renderer),
            self._core_start_method(),
        ):
            return CheckedLLM.from_vllm_config(
                vllm_config=config,
                usage_context=UsageContext.OPENAI_API_SERVER,
                enable_log_requests=self._arguments.enable_log_requests,
                aggregate_engine_logging=self._arguments.aggregate_engine_logging,
                disable_log_stats=is_silent,
                stat_loggers=None if is_silent else [self._logger_class],
            )

    def _core_start_method(self) -> AbstractContextManager[None]:
        """Have vLLM start its EngineCores from the fork server while entered, if it is in use."""
        forkserver.stop_forking_if_unsafe()
        if not forkserver.is_enabled():
            return nullcontext()
        return front_end.forked_cores(self._config, forkserver.CoreContext())

    async def _connect(
        self, llm: Any, spec: WorkspaceSpec, processes: FindProcesses, remote: RemoteRanks | None
    ) -> AsyncEngine:
        """Call `_engine` on a vLLM that may die at any moment, and shut it down if that fails."""
        try:
            with start_errors(lambda: root_cause(Path(spec.stats_directory))):
                return await self._engine(llm, spec, processes, remote)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(llm.shutdown, timeout=0))
            raise

    async def _engine(
        self, llm: Any, spec: WorkspaceSpec, processes: FindProcesses, remote: RemoteRanks | None
    ) -> AsyncEngine:
        llm.skip_grammar_checks(self._grammars.refuse)
        # Started on the loop at once, or vLLM misses a death before the first request.
        llm._run_output_handler()  # noqa: SLF001 - started by the constructor only on a loop
        async with asyncio.timeout(RPC_DEADLINE_SECONDS):
            tasks = frozenset(map(str, await llm.get_supported_tasks()))
            await llm.reset_mm_cache()
        self._renderer = front_end.lasting(llm.renderer)
        ranks = await startup.reported_ranks(world(self._config), spec, remote)
        if not forkserver.has_forked(ranks[0].pid):  # otherwise the variables are known already
            self._native_variables.remember(ranks[0].pid)
        self._is_unified_memory = any(rank.is_unified_memory for rank in ranks)
        facts = engine_facts(
            llm,
            tasks,
            fingerprint=self._fingerprint,
            has_template=self._has_template,
            is_unified=self._is_unified_memory,
        )
        return AsyncEngine(
            llm,
            facts,
            spec,
            processes,
            self.queues,
            self.loras,
            remote=remote,
            limit_context=self.proxy.limit_context,
        )


async def _for_ever(_: Callable[[], tuple[RankStats, ...]]) -> str:
    """Wait without end: nobody watches the memory."""
    return str(await asyncio.get_running_loop().create_future())
