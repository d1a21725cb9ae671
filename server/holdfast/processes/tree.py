"""Keeps track of the engine's processes, and ends every one of them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil

from holdfast.processes import environment, family, forkserver
from holdfast.processes.exits import is_alive
from holdfast.worker import lifetime

KILL_DEADLINE_SECONDS = 10.0
POLL_SECONDS = 0.05
STOPPED_POLL_SECONDS = 1.0
TRACKER_LOOK_SECONDS = 5.0
TRACKER_END_SECONDS = 2.0
_TRACKER = "multiprocessing.resource_tracker import main"
"""Marks a tracker's command line; others may contain its name alone, for example after `-W`."""
_QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"


logger = logging.getLogger("holdfast.engine")


@contextmanager
def owned(
    directory: Path, native_variables: Mapping[str, str], *, has_fork_server: bool = True
) -> Iterator[None]:
    """Keep track of all `children` of this process while entered; each ends with it.

    The fork server starts at once, beside the imports of this process, unless the environment rules
    it out; its socket goes into `directory`, and it gets `native_variables`. None of the children
    runs after leaving.
    """
    forkserver.enable(is_allowed=has_fork_server and forkserver.is_allowed_by(os.environ))
    lifetime.adopt_orphans()
    lifetime.make_spawned_die_with_parent()
    start_resource_tracker()
    with lifetime.ignoring_hangup():
        forkserver.ensure_running(directory, native_variables)
    try:
        yield
    finally:
        forkserver.start_nothing_more()
        if remaining := kill(children()):
            logger.error(
                "processes that cannot be killed are left: %s", ", ".join(map(str, remaining))
            )
        end_resource_tracker()


def children() -> frozenset[psutil.Process]:
    """Return every living descendant except strangers and Python's resource tracker.

    The tracker outlives engines; `family` says what a stranger is. A killed process is one of the
    children until `is_alive` says that it has ended.
    """
    found = family.descendants(os.getpid(), lambda pid: not family.is_stranger(pid))
    return frozenset(
        child for child in found if is_alive(child) and not _is_resource_tracker(child)
    )


def start_resource_tracker() -> None:
    """Start one that does not warn of what `unlink` removed first; do nothing if one runs."""
    before = os.environ.get("PYTHONWARNINGS")
    # Set only briefly: Python repeats it in the command line of every spawned process.
    changed = environment.overridden({"PYTHONWARNINGS": f"{before},{_QUIET}" if before else _QUIET})
    with changed, lifetime.ignoring_hangup():
        resource_tracker.ensure_running()


@asynccontextmanager
async def resource_tracker_kept() -> AsyncIterator[None]:
    """Replace a killed resource tracker while entered, and leave no zombie of it or strangers."""
    keeping = asyncio.create_task(_keep_resource_tracker(), name="resource tracker")
    try:
        yield
    finally:
        keeping.cancel()


async def _keep_resource_tracker() -> None:
    while True:
        with suppress(OSError):  # no descriptor is free; one may be at the next look
            _replace_resource_tracker()
            if _has_zombie():
                await asyncio.to_thread(_reap_strangers)
        await asyncio.sleep(TRACKER_LOOK_SECONDS)


def _replace_resource_tracker() -> None:
    """Reap a tracker that has ended and start another; do nothing if it runs."""
    pid = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # noqa: SLF001 - as below
    # Not checked through its pipe, as `multiprocessing` does: a stopped tracker would fill it.
    with suppress(ChildProcessError), warnings.catch_warnings():
        if pid is not None and os.waitpid(pid, os.WNOHANG)[0]:
            warnings.simplefilter("ignore", UserWarning)  # that it died
            start_resource_tracker()


def end_resource_tracker() -> None:
    """End Python's resource tracker, so that its warnings come before our last line."""
    tracker: Any = resource_tracker._resource_tracker  # noqa: SLF001 - as below
    # It waits for the end of everything that may use it, even of what cannot be killed.
    timer = threading.Timer(TRACKER_END_SECONDS, _kill_now, (tracker._pid,))  # noqa: SLF001 - as below
    timer.daemon = True
    if tracker._pid is not None:  # noqa: SLF001 - as below
        timer.start()
    with suppress(ChildProcessError):  # it was killed, and we have reaped it
        tracker._stop()  # noqa: SLF001 - nothing public ends it
    timer.cancel()


def _kill_now(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill(processes: Iterable[psutil.Process]) -> tuple[int, ...]:
    """SIGKILL those that still run, wait for their end, and return the pids that remain.

    A worker in a collective never reads vLLM's death pipe, so asking is not enough.
    """
    alive = [process for process in processes if is_alive(process)]
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return tuple(process.pid for process in _until_ended(alive, KILL_DEADLINE_SECONDS))


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, even if some end by themselves meanwhile."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (*family.descendants(pid), process):
            with suppress(psutil.NoSuchProcess):
                one.kill()


def reap(known: Collection[psutil.Process]) -> None:
    """Reap the adopted children that have ended, except those in `known`.

    A child whose own parent would have reaped it stays our zombie, see `lifetime`.
    """
    _reap(lambda child: child not in known)


def _reap(is_wanted: Callable[[psutil.Process], bool]) -> None:
    for child in family.children(os.getpid()):
        if not is_alive(child) and is_wanted(child):
            with suppress(psutil.Error):
                child.wait(0)


def _has_zombie() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # there is no child
        return False


def _reap_strangers() -> None:
    # What a process of another session had in its environment is gone with its memory.
    _reap(lambda child: family.is_in_another_session(child.pid))


def _until_ended(
    processes: Iterable[psutil.Process], deadline_seconds: float
) -> list[psutil.Process]:
    """Wait until none of them runs; return those that still do at the deadline.

    A zombie has ended: an orphan stays one forever if the init process reaps nothing.
    """
    deadline = time.monotonic() + deadline_seconds
    remaining = list(processes)
    while remaining and time.monotonic() < deadline:
        _, remaining = psutil.wait_procs(remaining, timeout=POLL_SECONDS)
        remaining = [process for process in remaining if is_alive(process)]
    return remaining


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any(_TRACKER in word for word in process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie, which has no command line any more
        return False


def stopped(processes: Iterable[psutil.Process]) -> tuple[int, ...]:
    """Return the pids of processes that a signal or a debugger has stopped."""
    states = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return tuple(process.pid for process in processes if _status(process) in states)


async def until_stopped(
    processes: Callable[[], Iterable[psutil.Process]], stopped_seconds: float
) -> str:
    """Return the reason once one of the processes has been stopped for `stopped_seconds`.

    It counts looks, since this process may have been stopped with them.
    """
    looks: dict[int, int] = {}
    while True:
        found = await asyncio.to_thread(lambda: stopped(processes()))
        looks = {pid: looks.get(pid, 0) + 1 for pid in found}
        for pid, count in looks.items():
            if count * STOPPED_POLL_SECONDS > stopped_seconds:
                return f"process {pid} was stopped by a signal for {stopped_seconds:g} s"
        await asyncio.sleep(STOPPED_POLL_SECONDS)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)
