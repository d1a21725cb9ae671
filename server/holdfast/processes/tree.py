"""The engine's processes: known by pid, and ended without exception."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from holdfast.processes import environment, forkserver
from holdfast.worker import lifetime

KILL_DEADLINE_SECONDS = 10.0
POLL_SECONDS = 0.05
TRACKER_LOOK_SECONDS = 5.0
_TRACKER = "multiprocessing.resource_tracker import main"
"""In the command line of one; its name alone may stand in others', after `-W` say."""
_QUIET = "ignore::UserWarning:multiprocessing.resource_tracker"


@contextmanager
def owned(directory: Path, native_variables: Mapping[str, str]) -> Iterator[None]:
    """While entered, every descendant of this process is known to it, and ends with it.

    The fork server starts at once, beside the imports of this process, unless the environment rules
    it out; `directory` takes its socket, and `native_variables` is what it is started with. When
    left, no child runs.
    """
    forkserver.use(is_allowed=forkserver.is_allowed(os.environ))
    lifetime.adopt_orphans()
    lifetime.tie_spawned()
    _start_resource_tracker()
    with lifetime.outliving_terminal():
        forkserver.ensure_running(directory, native_variables)
    try:
        yield
    finally:
        kill(children())
        end_resource_tracker()


def children() -> frozenset[psutil.Process]:
    """Every living descendant but Python's resource tracker, which outlives all engines."""
    found = psutil.Process().children(recursive=True)
    return frozenset(child for child in found if not _is_resource_tracker(child))


def _start_resource_tracker() -> None:
    """Start one that keeps quiet about what `unlink` removed before it; nothing if one runs."""
    before = os.environ.get("PYTHONWARNINGS")
    # Not longer: Python hands it on in the command line of every process that is spawned.
    changed = environment.changed({"PYTHONWARNINGS": f"{before},{_QUIET}" if before else _QUIET})
    with changed, lifetime.outliving_terminal():
        resource_tracker.ensure_running()


@asynccontextmanager
async def resource_tracker_kept() -> AsyncIterator[None]:
    """While entered, a resource tracker that was killed is replaced, and leaves no zombie."""
    keeping = asyncio.create_task(_keep_resource_tracker(), name="resource tracker")
    try:
        yield
    finally:
        keeping.cancel()


async def _keep_resource_tracker() -> None:
    while True:
        _replace_resource_tracker()
        await asyncio.sleep(TRACKER_LOOK_SECONDS)


def _replace_resource_tracker() -> None:
    """Take leave of one that has ended and start another; nothing if it runs."""
    pid = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # noqa: SLF001 - as below
    # Not asked by its pipe, as `multiprocessing` does: one that is stopped would fill it.
    with suppress(ChildProcessError), warnings.catch_warnings():
        if pid is not None and os.waitpid(pid, os.WNOHANG)[0]:
            warnings.simplefilter("ignore", UserWarning)  # that it died
            _start_resource_tracker()


def end_resource_tracker() -> None:
    """End Python's resource tracker, so that what it complains of stands before our last line."""
    with suppress(ChildProcessError):  # somebody has killed it, and we have taken leave of it
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # noqa: SLF001 - nothing public ends it


def kill(processes: Iterable[psutil.Process]) -> tuple[int, ...]:
    """SIGKILL those that still run and wait for their end; the pids that remained are returned.

    A worker in a collective never looks at vLLM's death pipe, so asking is not enough.
    """
    alive = [process for process in processes if is_alive(process)]
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return tuple(process.pid for process in _until_ended(alive, KILL_DEADLINE_SECONDS))


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all below it, whatever of them ends by itself meanwhile."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                one.kill()


def reap(known: Collection[psutil.Process]) -> None:
    """Take leave of the adopted children that have ended, but of those in `known`.

    A child whose own parent would have waited for it stays a zombie with us, see `leash`.
    """
    for child in psutil.Process().children():
        if child not in known and not is_alive(child):
            with suppress(psutil.Error):
                child.wait(0)


def _until_ended(
    processes: Iterable[psutil.Process], deadline_seconds: float
) -> list[psutil.Process]:
    """Wait until none of them runs; those that do at the deadline are returned.

    A zombie has ended: an orphan stays one for ever where the init process reaps nobody.
    """
    deadline = time.monotonic() + deadline_seconds
    remaining = list(processes)
    while remaining and time.monotonic() < deadline:
        _, remaining = psutil.wait_procs(remaining, timeout=POLL_SECONDS)
        remaining = [process for process in remaining if is_alive(process)]
    return remaining


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie has ended. What cannot be seen has not ended.

    A killed process is called a zombie from the end of its first thread on. It holds its memory,
    and nobody can take leave of it, until the last one has ended.
    """
    try:
        if not process.is_running():
            return False
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False
    except OSError:  # too many open files
        return True


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any(_TRACKER in word for word in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return True


def stopped(processes: Iterable[psutil.Process]) -> tuple[int, ...]:
    """The pids of those that a signal or a debugger has stopped."""
    states = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return tuple(process.pid for process in processes if _status(process) in states)


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)
