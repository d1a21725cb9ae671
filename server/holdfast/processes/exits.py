"""Reports at once which processes have ended, in what order, and how."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from holdfast.processes.exit_codes import signal_name
from holdfast.processes.tree import is_alive

_EXIT_CODE_FIELD = 49
"""Where `exit_code` stands in /proc/PID/stat, counted from the first field behind the name."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one process."""

    pid: int
    exit_code: int | None
    """As `subprocess` has it: the negative number of the signal; None if nobody could say."""

    def __str__(self) -> str:
        if self.exit_code is None:
            return "ended"
        if self.exit_code < 0:
            return f"was killed by {signal_name(-self.exit_code)}"
        return f"ended with exit code {self.exit_code}"


class Endings:
    """Watches processes while entered, by pidfds; where there are none, `look` has to be called."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._processes = tuple(processes)
        self._descriptors: dict[int, psutil.Process] = {}
        self._unwatched: list[psutil.Process] = []
        self._ended: list[Ending] = []
        self._changed = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for process in self._processes:
            descriptor = _pidfd(process.pid)
            if descriptor is None or not is_alive(process):  # or its number is another's by now
                self._unwatched.append(process)
                if descriptor is not None:
                    os.close(descriptor)
                continue
            self._descriptors[descriptor] = process
            loop.add_reader(descriptor, self._ends, descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in tuple(self._descriptors):
            self._forget(descriptor)

    def look(self) -> tuple[Ending, ...]:
        """Return the processes that have ended until now, oldest first."""
        for process in [p for p in self._unwatched if not is_alive(p)]:
            self._unwatched.remove(process)
            self._add(process)
        return tuple(self._ended)

    async def wait(self, timeout_seconds: float) -> None:
        """Return when another process has ended, `wake` was called or the time is over."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    def wake(self) -> None:
        """Have `wait` return."""
        self._changed.set()

    def _ends(self, descriptor: int) -> None:
        process = self._descriptors[descriptor]
        self._forget(descriptor)
        self._add(process)

    def _forget(self, descriptor: int) -> None:
        del self._descriptors[descriptor]
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)

    def _add(self, process: psutil.Process) -> None:
        self._ended.append(Ending(process.pid, _exit_code(process.pid)))
        self._changed.set()


def _pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None where that is not possible."""
    try:
        return os.pidfd_open(pid)
    except OSError:  # it is gone, or the kernel or a seccomp filter does not know the call
        return None


def _exit_code(pid: int) -> int | None:
    """How a process ended, while its parent has not asked for it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] != "Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE_FIELD]))
