"""The engine's processes on a follower: started, watched and ended, one generation after another.

A generation is one process of ours, which starts a worker for each rank of this node, as vLLM's
`--headless` does. Its death, or that of a worker, is told in milliseconds; nothing of it is left
when its end is reported, since the follower joins again only then.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from holdfast.nodes.messages import Start
from holdfast.processes import cleanup, tree
from holdfast.processes.deaths import CoreProcess, DeathWatch
from holdfast.records import Death, RankStats
from holdfast.workspace.stats import read_all

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""How often the statistics are read; no more of them are sent either."""

Command = Callable[[Start, Path], Sequence[str]]
"""Returns the command of the process for a generation, which keeps its files in that directory."""


class Reports(Protocol):
    """What the processes of a generation do, as `Dialer` passes it on."""

    def engine_lost(self, generation: int, death: Death) -> None:
        """Report that the engine cannot go on."""

    def engine_ended(self, generation: int) -> None:
        """Report that no process of the engine is left."""

    def ranks_changed(self, generation: int, ranks: Sequence[RankStats]) -> None:
        """Report the statistics of all ranks here."""


@dataclass(slots=True)
class _Running:
    order: Start
    has_to_end: asyncio.Event
    task: asyncio.Task[None]


class EngineProcesses:
    """Runs the ranks of this node. It belongs to one event loop, and is a `dialer.NodeEngine`."""

    def __init__(self, directory: Path, command: Command) -> None:
        """Keep the files of each generation in a directory of its own below `directory`.

        Enter `processes.tree.owned` first: it makes orphans of the engine children of this process.
        """
        self._directory = directory
        self._command = command
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
        before = tree.children()
        process = None
        try:
            directory.mkdir(mode=0o700, parents=True)
            # In this thread, since a child may end with the thread that started it.
            process = subprocess.Popen(  # noqa: ASYNC220, S603 - a moment; our own command
                self._command(order, directory), stdin=subprocess.DEVNULL
            )
            death = await self._until_death(order, process, directory, has_to_end)
            if death is not None:
                reports.engine_lost(order.generation, death)
        except OSError as error:
            death = Death("start_failure", f"cannot start the engine's process: {error}")
            reports.engine_lost(order.generation, death)
        finally:
            await asyncio.shield(asyncio.to_thread(_clean_up, before, process, directory))
            reports.engine_ended(order.generation)

    async def _until_death(
        self,
        order: Start,
        process: subprocess.Popen[bytes],
        directory: Path,
        has_to_end: asyncio.Event,
    ) -> Death | None:
        """Report the ranks until the engine is dead, or return None once it has to end."""
        asked = asyncio.create_task(has_to_end.wait())
        watch: asyncio.Task[Death] | None = None
        watched: set[int] = set()
        try:
            while True:
                ranks = await asyncio.to_thread(read_all, directory, with_steps=False)
                self._reports().ranks_changed(order.generation, ranks)
                pids = {process.pid, *(rank.pid for rank in ranks)}
                if watch is None or pids - watched:
                    await _ended(watch)
                    watched = pids
                    watch = asyncio.create_task(_watch(directory, process, ranks).death())
                done, _ = await asyncio.wait(
                    {asked, watch}, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if asked in done:
                    return None
                if watch in done:
                    return watch.result()
        finally:
            asked.cancel()
            await _ended(watch)

    def _reports(self) -> Reports:
        if self.reports is None:
            raise RuntimeError("nobody hears of the engine's processes")
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


async def _ended(task: asyncio.Task[Death] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


def _clean_up(
    before: frozenset[psutil.Process], process: subprocess.Popen[bytes] | None, directory: Path
) -> None:
    """Kill what was started since, and remove the files and the shared memory that it left."""
    processes = tree.children() - before
    mapped = cleanup.shared_memory(processes)
    if remaining := tree.kill(processes):
        logger.error("process %s of the engine cannot be killed", ", ".join(map(str, remaining)))
    if process is not None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(tree.KILL_DEADLINE_SECONDS)
    cleanup.unlink(mapped)
    cleanup.remove(directory)
    tree.reap(before)
