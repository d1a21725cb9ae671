"""Tells which processes have ended, in what order, and how.

The kernel gives an exit code only to the parent, and only once. The engine's processes are children
of the fork server, which therefore records their exit codes in a directory.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing.process
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from holdfast.processes.cgroups import memory_groups

DIRECTORY_VARIABLE = "HOLDFAST_EXIT_CODES"
OUT_OF_MEMORY = " (probably for lack of memory)"
_EXEMPT = "exempt-"
_EXIT_CODE_FIELD = 49
"""The position of `exit_code` in /proc/PID/stat, counted from the first field after the name."""
_warned_causes: set[str | None] = set()

logger = logging.getLogger("holdfast.engine")


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; a zombie has ended. A process that cannot be inspected has not ended.

    A killed process is reported as a zombie once its first thread has ended. It holds its memory,
    and cannot be reaped, until its last thread has ended.
    """
    try:
        if not process.is_running():
            return False
        return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
    except psutil.NoSuchProcess:
        return False
    except OSError:  # too many open files
        return True


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The end of one process."""

    pid: int
    exit_code: int | None
    """As `subprocess` gives it: negative for a signal; None if it is unknown."""

    def __str__(self) -> str:
        if self.exit_code is None:
            return "ended"
        if self.exit_code < 0:
            return f"was killed by {signal_name(-self.exit_code)}"
        return f"ended with exit code {self.exit_code}"


class ExitWatcher:
    """Watches processes while entered, by pidfds; without those, only when `exits` is called."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._processes = tuple(processes)
        self._descriptors: dict[int, psutil.Process] = {}
        self._unwatched: list[psutil.Process] = []
        self._exits: list[ProcessExit] = []
        self._changed = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for process in self._processes:
            descriptor = pidfd(process.pid)
            if descriptor is None or not is_alive(process):  # its pid may be another's by now
                self._unwatched.append(process)
                if descriptor is not None:
                    os.close(descriptor)
                continue
            self._descriptors[descriptor] = process
            loop.add_reader(descriptor, self._on_exit, descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in tuple(self._descriptors):
            self._forget(descriptor)

    def exits(self) -> tuple[ProcessExit, ...]:
        """Return the exits so far, oldest first."""
        for process in [p for p in self._unwatched if not is_alive(p)]:
            self._unwatched.remove(process)
            self._add(process)
        return tuple(self._exits)

    async def wait(self, timeout_seconds: float) -> None:
        """Return when another process has ended, on `wake`, or after `timeout_seconds`."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    def wake(self) -> None:
        """Make `wait` return."""
        self._changed.set()

    def _on_exit(self, descriptor: int) -> None:
        process = self._descriptors[descriptor]
        self._forget(descriptor)
        self._add(process)

    def _forget(self, descriptor: int) -> None:
        del self._descriptors[descriptor]
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)

    def _add(self, process: psutil.Process) -> None:
        self._exits.append(ProcessExit(process.pid, _exit_code(process.pid)))
        self._changed.set()


def pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if unsupported."""
    try:
        return os.pidfd_open(pid)
    except OSError:  # the process is gone, or the kernel or a seccomp filter refuses the call
        return None


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a zombie; None if its parent has reaped it already."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] != "Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE_FIELD]))


def record_exit_codes(directory: Path) -> None:
    """Record in `directory` the exit code of every child that this process waits for.

    Each is recorded before the child is reaped, so a child is there or recorded at any time.

    Processes forked from this one record only what they start by `multiprocessing`, as a core may
    its workers. Other programs that they run, such as compilers, may be killed and nothing is lost.
    """
    wait, server_pid = os.waitpid, os.getpid()

    def waitpid(pid: int, options: int, /) -> tuple[int, int]:
        ended = os.waitid(*_meant(pid), os.WEXITED | os.WNOWAIT | options)
        if ended is None:
            return 0, 0
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        has_ended = ended.si_code in {os.CLD_EXITED, os.CLD_KILLED, os.CLD_DUMPED}
        if has_ended and (os.getpid() == server_pid or _is_of_multiprocessing(ended.si_pid)):
            with suppress(OSError):  # the front end has ended and taken the directory with it
                directory.mkdir(exist_ok=True)
                (directory / str(ended.si_pid)).write_text(str(code))
        return wait(ended.si_pid, options)

    os.waitpid = waitpid


def _is_of_multiprocessing(pid: int) -> bool:
    # `active_children` would wait for all of them.
    started: Any = multiprocessing.process._children  # type: ignore[attr-defined]  # noqa: SLF001
    return any(child.pid == pid for child in tuple(started))


def _meant(pid: int) -> tuple[int, int]:
    """Return what `waitid` calls the children that `waitpid` means by a number."""
    if pid == -1:
        return os.P_ALL, 0
    return (os.P_PID, pid) if pid > 0 else (os.P_PGID, -pid)


def recorded_pids(directory: Path) -> frozenset[int]:
    """Return the pids of all processes whose exit codes are recorded now."""
    return frozenset(int(path.name) for path in directory.glob("*") if path.name.isdecimal())


def exempt(directory: Path, pid: int) -> None:
    """Have `first_killed` pass over a child of the fork server, which belongs to no engine.

    If that cannot be recorded, for example on a full disk, a warning is logged once: the process
    works without it.
    """
    try:
        directory.mkdir(exist_ok=True)
        (directory / f"{_EXEMPT}{pid}").touch()
    except OSError as error:
        if error.strerror not in _warned_causes:
            _warned_causes.add(error.strerror)
            logger.warning("cannot record which processes belong to no engine: %s", error.strerror)


def recorded_exit_code(directory: Path, pid: int) -> int | None:
    """Return an exit code as `subprocess` gives it; None if it is unknown."""
    try:
        return int((directory / str(pid)).read_text())
    except (OSError, ValueError):
        return None


def first_killed(directory: Path, before: frozenset[int]) -> str:
    """Describe the first process that a signal other than SIGTERM killed, except those `before`."""
    new = [directory / str(pid) for pid in recorded_pids(directory) - before]
    for path in sorted(new, key=lambda path: path.stat().st_mtime_ns):
        code = recorded_exit_code(directory, int(path.name))
        is_exempt = (directory / f"{_EXEMPT}{path.name}").exists()
        if code is not None and code < 0 and code != -signal.SIGTERM and not is_exempt:
            return f"its process {path.name} {killed_by(code)}"
    return ""


def killed_by(code: int) -> str:
    """Describe a process's end by a signal, from its negative exit code."""
    memory = OUT_OF_MEMORY if code == -signal.SIGKILL else ""
    return f"was killed by {signal_name(-code)}{memory}"


def signal_name(number: int) -> str:
    """Return a signal's name, or its number: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def oom_kills(root: Path = Path("/")) -> int:
    """Count the kills in this process's memory cgroup; without one, those of the machine.

    A container's own count excludes its neighbours' kills (cgroup v2 and v1).
    """
    for path in (*_kill_counts(root), root / "proc/vmstat"):
        count = _count(path)
        if count is not None:
            return count
    return 0


def _kill_counts(root: Path) -> Iterator[Path]:
    for group in memory_groups(root):
        yield group.path / ("memory.events" if group.is_v2 else "memory.oom_control")


def _count(path: Path) -> int | None:
    """Read the line `oom_kill N`, which all these files have."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(word[1]) for word in words if word[:1] == ["oom_kill"]), None)
