"""Ends processes that try grammars, and leaves nothing of them: no zombie, and no descriptor.

The fork server reaps the first process, which would have reaped its workers. Without it, they
become children of the front end, which otherwise reaps such children only when an engine ends. The
first process leads a process group, so the kernel knows which these are.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from typing import Any

import psutil

from holdfast.processes import family

DYING_SECONDS = 60.0
"""How long a killed worker may take to end: one that runs only on idle cores also ends only there.
"""
_POLL_SECONDS = 0.2


class Reaper:
    """Ends the processes of one pool. Belongs to one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._groups: frozenset[int] = frozenset()

    def kill(self, process: Any) -> None:
        """SIGKILL a process and its workers; they are reaped as soon as they have ended."""
        with suppress(AttributeError, ValueError, OSError):  # it was never started, or is gone
            if process.is_alive():
                process.kill()
        if process.pid is None:
            return
        with suppress(OSError):  # they are gone, or it had no group yet
            os.killpg(process.pid, signal.SIGKILL)
        task = asyncio.create_task(self._reap(process), name="ended grammars")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def dying(self) -> frozenset[psutil.Process]:
        """Return the killed workers that have not ended yet. Any thread may ask."""
        groups = self._groups
        if not groups:
            return frozenset()
        children = family.children(os.getpid())
        return frozenset(child for child in children if _group_of(child) in groups)

    async def _reap(self, process: Any) -> None:
        group: int = process.pid
        self._groups |= {group}
        deadline = time.monotonic() + DYING_SECONDS
        try:
            while process.is_alive() or not _are_reaped(group):
                if time.monotonic() > deadline:
                    return
                await asyncio.sleep(_POLL_SECONDS)
            process.close()
        finally:
            self._groups -= {group}


def _are_reaped(group: int) -> bool:
    """Reap the children in a process group that have ended; return whether there are no others."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _group_of(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return 0
