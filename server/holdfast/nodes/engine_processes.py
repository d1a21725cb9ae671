"""The engine's processes on a follower: started, watched and ended, one generation after another.

A generation is one process of ours, which starts a worker for each rank of this node, as vLLM's
`--headless` does. When it or a worker ends, that is told in milliseconds; when one is stopped,
after `SILENCE_SECONDS`. The end of the generation is reported when no process of it is left,
however long that takes: the follower is free only then.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from holdfast.errors import ExitCode
from holdfast.nodes.channel import SILENCE_SECONDS
from holdfast.nodes.memory import NodeMemory
from holdfast.nodes.messages import Start
from holdfast.processes import cleanup, forkserver, tree
from holdfast.processes.deaths import CoreProcess, DeathWatch
from holdfast.processes.exits import DIRECTORY_VARIABLE
from holdfast.processes.stacks import is_compiling
from holdfast.records import Death, RankStats
from holdfast.worker.crash_records import refusal
from holdfast.workspace.stats import read_all

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""How often the statistics are read; no more of them are sent either."""
SETTLE_SECONDS = 1.0
"""Longer than a `DeathWatch` takes to see that a rank has raised."""
LATE_STEP_SECONDS = 1.0
"""A step that runs for longer may wait for a compiler."""
RETRY_SECONDS = 1.0
"""The pause before the next attempt to clean up."""
SLOW_SECONDS = 30.0
"""A longer attempt to clean up hangs: it has deadlines, except within a call of the kernel."""

CommandOfStart = Callable[[Start, Path], Sequence[str]]
"""Returns the command of the process for a generation, which keeps its files in that directory."""


class Reports(Protocol):
    """What the processes of a generation do, as `Dialer` passes it on."""

    def engine_lost(self, generation: int, death: Death) -> None:
        """Report that the engine cannot go on."""

    def engine_refused(self, generation: int, line: str, *, is_final: bool) -> None:
        """Report that this node cannot run what it was handed out, for the reason in `line`."""

    def engine_ended(self, generation: int) -> None:
        """Report that no process of the engine is left."""

    def ranks_changed(
        self, generation: int, ranks: Sequence[RankStats], *, is_compiling: bool
    ) -> None:
        """Report the statistics of all ranks here, and whether one waits for a compiler."""


@dataclass(slots=True)
class _Running:
    order: Start
    has_to_end: asyncio.Event
    task: asyncio.Task[None]


class EngineProcesses:
    """Runs the ranks of this node. It belongs to one event loop, and is a `dialer.NodeEngine`."""

    def __init__(self, directory: Path, command: CommandOfStart, memory: NodeMemory) -> None:
        """Keep the files of each generation in a directory of its own below `directory`.

        Enter `processes.tree.owned` first: it makes orphans of the engine children of this process.
        """
        self._directory = directory
        self._command = command
        self._memory = memory
        # Not at each start: what survives one generation must not survive the next.
        self._before = tree.children()
        self._running: _Running | None = None
        self.reports: Reports | None = None
        """Set before the first start."""

    def start(self, order: Start) -> None:
        """Start the processes of a generation."""
        has_to_end = asyncio.Event()
        name = f"generation {order.generation}"
        task = asyncio.create_task(self._run(order, has_to_end), name=name)
        self._running = _Running(order, has_to_end, task)

    def stop(self, generation: int, reason: str) -> None:
        """Kill every process of the generation, and report that once none is left."""
        running = self._running
        if running is not None and running.order.generation == generation:
            logger.info("killing the processes of generation %d: %s", generation, reason)
            running.has_to_end.set()

    async def ended(self) -> None:
        """Return once no process of the last generation is left."""
        if self._running is not None:
            await self._running.task

    async def _run(self, order: Start, has_to_end: asyncio.Event) -> None:
        """Run one generation to its end, however it ends."""
        directory = self._directory / str(order.generation)
        reports = self._reports()
        process = None
        try:
            directory.mkdir(mode=0o700, parents=True)
            # In this thread, since a child may end with the thread that started it.
            process = subprocess.Popen(  # noqa: ASYNC220, S603 - a moment; our own command
                self._command(self._with_own_memory(order), directory),
                stdin=subprocess.DEVNULL,
                env={**os.environ, DIRECTORY_VARIABLE: str(forkserver.exit_codes_directory())},
            )
            death = await self._until_death(order, process, directory, has_to_end)
            if death is not None:
                # First, since the head learns from what a rank was refused at its end.
                await self._report_ranks(order, directory)
                if process.poll() == ExitCode.USAGE:
                    line = refusal(directory) or death.reason
                    reports.engine_refused(order.generation, line, is_final=True)
                else:
                    reports.engine_lost(order.generation, death)
        except (OSError, psutil.Error) as error:
            if process is None:
                # Not the death of an engine: what this node is short of, another one may have.
                line = f"cannot start the engine's process: {error}"
                reports.engine_refused(order.generation, line, is_final=False)
            else:
                death = Death("unknown", f"cannot watch the engine's process: {error}")
                reports.engine_lost(order.generation, death)
        finally:
            try:
                await self._clean_up(order, directory, process)
            finally:
                reports.engine_ended(order.generation)

    def _with_own_memory(self, order: Start) -> Start:
        """Return the order with what ranks must leave to this host, not to that of the head."""
        spec = replace(order.spec, kept_host_bytes=self._memory.kept_bytes())
        return replace(order, spec=spec)

    async def _clean_up(
        self, order: Start, directory: Path, process: subprocess.Popen[bytes] | None
    ) -> None:
        """Return once nothing is left of the generation, and no sooner."""
        await _until_done(lambda: _kill(self._before, process, directory))
        try:
            await self._report_ranks(order, directory)
        finally:
            await _until_done(lambda: _remove(directory, self._before))

    async def _until_death(
        self,
        order: Start,
        process: subprocess.Popen[bytes],
        directory: Path,
        has_to_end: asyncio.Event,
    ) -> Death | None:
        """Report the ranks until the engine is dead, or return None once it has to end."""
        asked = asyncio.create_task(has_to_end.wait())
        stopped = asyncio.create_task(_until_stopped(self._before))
        watch: asyncio.Task[Death] | None = None
        watched: set[int] = set()
        with self._memory.guarding() as starved:
            try:
                while True:
                    ranks = await self._report_ranks(order, directory)
                    pids = {process.pid, *(rank.pid for rank in ranks)}
                    self._memory.protect_from(
                        pids, is_unified_memory=any(rank.is_unified_memory for rank in ranks)
                    )
                    if watch is None or pids - watched:
                        await _ended(watch)
                        watched = pids
                        watch = asyncio.create_task(_watch(directory, process, ranks).death())
                    # In this order: the watch sees the guard's kill too, but not the reason.
                    deaths = (starved, watch, stopped)
                    waited: set[asyncio.Future[Any]] = {asked, *deaths}
                    done, _ = await asyncio.wait(
                        waited, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                    )
                    for death in deaths:
                        if death in done:
                            return death.result()
                    if asked in done:
                        return await self._last_death(order, directory, watch)
            finally:
                asked.cancel()
                await _ended(stopped)
                await _ended(watch)

    async def _last_death(
        self, order: Start, directory: Path, watch: asyncio.Task[Death]
    ) -> Death | None:
        """Return the death of a rank that has raised before it has to end, or None.

        The head may end the generation because of what only follows from it.
        """
        ranks = await self._report_ranks(order, directory)
        if not any(rank.fatal_error for rank in ranks):
            return None
        await asyncio.wait({watch}, timeout=SETTLE_SECONDS)
        return watch.result() if watch.done() else None

    async def _report_ranks(self, order: Start, directory: Path) -> tuple[RankStats, ...]:
        """Read the statistics of all ranks here, report them if there are any, and return them."""
        ranks, compiles = await asyncio.to_thread(self._look, directory)
        self._reports().ranks_changed(order.generation, ranks, is_compiling=compiles)
        return ranks

    def _look(self, directory: Path) -> tuple[tuple[RankStats, ...], bool]:
        """Read the statistics of all ranks here, and look whether one waits for a compiler."""
        ranks = read_all(directory, reads_steps=False)
        since = (rank.running_step_started_seconds for rank in ranks)
        started_seconds = min((one for one in since if one is not None), default=math.inf)
        # Only while a step is late, because it costs a walk over /proc.
        is_late = time.monotonic() - started_seconds > LATE_STEP_SECONDS
        return ranks, is_late and is_compiling(tree.children() - self._before)

    def _reports(self) -> Reports:
        if self.reports is None:
            raise RuntimeError("no receiver is set for reports of the engine's processes")
        return self.reports


def _watch(
    directory: Path, process: subprocess.Popen[bytes], ranks: tuple[RankStats, ...]
) -> DeathWatch:
    """Watch the processes that the generation cannot live without."""
    cores = {process.pid: CoreProcess("the executor of the node", process.poll)}
    pids = {*cores, *(rank.pid for rank in ranks)}
    family = list[psutil.Process]()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            family.append(psutil.Process(pid))
    # A worker that ended before it could be watched leaves nothing else to see.
    is_one_gone = len(family) < len(pids)
    return DeathWatch(directory, family, cores, has_errored=lambda: is_one_gone)


async def _until_stopped(before: frozenset[psutil.Process]) -> Death:
    """Return once a process started since has been stopped for as long as a node may be silent.

    It answers nobody, and vLLM would wait for it as long as for a compiler.
    """
    reason = await tree.until_stopped(lambda: tree.children() - before, SILENCE_SECONDS)
    return Death("stall", reason)


async def _ended(task: asyncio.Task[Death] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


async def _until_done(step: Callable[[], str]) -> None:
    """Take a step in a thread, again and again until it returns no problem."""
    told = ""
    while problem := await _problem_of(step):
        if problem != told:
            told = problem
            logger.error("%s; trying again", problem)
        await asyncio.sleep(RETRY_SECONDS)


async def _problem_of(step: Callable[[], str]) -> str:
    """Take a step of the clean-up in a thread, and say so if it hangs."""
    task = asyncio.create_task(asyncio.to_thread(step))
    if not (await asyncio.wait({task}, timeout=SLOW_SECONDS))[0]:
        logger.error("the processes of the engine cannot be ended: the kernel does not answer")
        await asyncio.wait({task})
    try:
        return task.result()
    except Exception as error:  # noqa: BLE001 - whatever it is, the processes may still be there
        return f"cannot clean up after the engine: {error!r}"


def _kill(
    before: frozenset[psutil.Process], process: subprocess.Popen[bytes] | None, directory: Path
) -> str:
    """Kill what was started since, and record the shared memory that it had; its files stay."""
    processes = tree.children() - before
    cleanup.record_shared_memory(directory, processes)
    if remaining := tree.kill(processes):
        return f"process {', '.join(map(str, remaining))} of the engine cannot be killed"
    if process is not None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(tree.KILL_DEADLINE_SECONDS)
    return ""


def _remove(directory: Path, before: frozenset[psutil.Process]) -> str:
    """Remove the files and the shared memory that the killed processes left."""
    cleanup.remove(directory)
    tree.reap(before)
    return ""
