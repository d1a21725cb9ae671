"""The engine's processes: known by pid, and ended without exception."""

from __future__ import annotations

from collections.abc import Iterable
from multiprocessing import resource_tracker

import psutil

END_DEADLINE_SECONDS = 5.0
KILL_DEADLINE_SECONDS = 10.0


def children() -> frozenset[psutil.Process]:
    """Every living descendant but Python's resource tracker, which outlives all engines."""
    found = psutil.Process().children(recursive=True)
    return frozenset(child for child in found if not _is_resource_tracker(child))


def first_dead(processes: Iterable[psutil.Process]) -> psutil.Process | None:
    """One of `processes` that has ended; None while all run."""
    return next((process for process in processes if not _is_alive(process)), None)


def end_resource_tracker() -> None:
    """End Python's resource tracker, so that what it complains of stands before our last line."""
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # noqa: SLF001 - nothing public ends it


def end(processes: Iterable[psutil.Process]) -> tuple[int, ...]:
    """Let them end by themselves for a while, then kill; the pids that remained are returned."""
    family = tuple(processes)
    psutil.wait_procs(family, timeout=END_DEADLINE_SECONDS)
    return kill(family)


def kill(processes: Iterable[psutil.Process]) -> tuple[int, ...]:
    """SIGKILL those that still run and wait for their end; the pids that remained are returned.

    A worker in a collective never looks at vLLM's death pipe, so asking is not enough.
    """
    alive = [process for process in processes if _is_alive(process)]
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _, remaining = psutil.wait_procs(alive, timeout=KILL_DEADLINE_SECONDS)
    return tuple(process.pid for process in remaining)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return True
