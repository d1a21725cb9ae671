"""Finds the children and descendants of a process, even where others may not be looked at.

With `hidepid=1`, which is systemd's `ProtectProc=noaccess`, /proc lists processes that psutil
cannot read, and it then finds none at all.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from holdfast.processes.exits import DIRECTORY_VARIABLE
from holdfast.workspace.plan import SPEC_VARIABLE

_PROC = Path("/proc")
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_OURS = tuple(f"{name}=".encode() for name in (DIRECTORY_VARIABLE, SPEC_VARIABLE))
"""How the variables begin that Holdfast itself gives to the processes of engines."""


def children(pid: int) -> list[psutil.Process]:
    """Return the children of a process, also those that have ended and are not reaped yet."""
    return list(_processes(_by_parent().get(pid, ())))


def descendants(
    pid: int, is_counted: Callable[[int], bool] = lambda _: True
) -> list[psutil.Process]:
    """Return the descendants of a process, by way of those children that `is_counted` accepts."""
    by_parent = _by_parent()
    found = [child for child in by_parent.get(pid, ()) if is_counted(child)]
    for one in found:
        found += by_parent.get(one, ())
    return list(_processes(found))


def is_stranger(pid: int) -> bool:
    """Whether a child of this process is not the engine's, but was adopted from outside.

    As PID 1 of a container, Holdfast adopts what is left of `docker exec`, such as a tmux server.
    That is in a session of its own. So may be what the engine runs, but that has our variables.
    """
    if not is_in_another_session(pid):
        return False
    try:
        environment = (_PROC / str(pid) / "environ").read_bytes()
    except PermissionError:  # it is another user's, or has capabilities that no engine can have
        return True
    except OSError:
        return False
    return not any(variable.startswith(_OURS) for variable in environment.split(b"\0"))


def is_in_another_session(pid: int) -> bool:
    """Whether a process, which may have ended, is in another session than this one."""
    try:
        return os.getsid(pid) != os.getsid(0)
    except OSError:  # it is reaped, or a security module forbids the question
        return False


def _by_parent() -> dict[int, list[int]]:
    """Return the pids of all processes that can be looked at, by the pid of their parent.

    Raises:
        OSError: no descriptor is free, so some processes would be missing.
    """
    found: dict[int, list[int]] = {}
    for process in [path for path in _PROC.iterdir() if path.name.isdecimal()]:
        try:
            stat = (process / "stat").read_bytes()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                raise
            continue  # it has ended, or belongs to another user
        found.setdefault(int(stat.rpartition(b")")[2].split()[1]), []).append(int(process.name))
    return found


def _processes(pids: Iterable[int]) -> Iterator[psutil.Process]:
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)
