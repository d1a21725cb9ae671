"""Ends what the kit has started: every process below this one, and those that lost their parent.

Only the standard library, because a machine may have nothing but torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
_END_SECONDS = 10.0
_POLL_SECONDS = 0.05
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - the kernel's, not chosen


def end_with_parent() -> None:
    """Have SIGTERM sent to this process when its parent ends, however that ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def nothing_left() -> Iterator[None]:
    """When left, nothing is below this process that was not when it was entered.

    What loses its parent meanwhile comes to this process, and is ended too.
    """
    before = set(descendants(os.getpid()))
    was_reaper = ctypes.c_int()
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(was_reaper))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _end(before)
        _prctl(_PR_SET_CHILD_SUBREAPER, was_reaper.value)


def _end(spared: set[int]) -> None:
    deadline_seconds = time.monotonic() + _END_SECONDS
    while below := set(descendants(os.getpid())) - spared:
        if time.monotonic() > deadline_seconds:
            return
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_SECONDS)


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, zombies among them."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = children.get(pid, [])[:]
    for child in found:
        found.extend(children.get(child, ()))
    return found


def shared_memory(pid: int) -> set[Path]:
    """The files of shared memory that `pid` or a process below it has mapped now."""
    return {path for one in (pid, *descendants(pid)) for path in _mapped(one)}


def _mapped(pid: int) -> Iterator[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended meanwhile
        return
    for line in lines:
        _, found, name = line.partition(_SHARED_MEMORY)
        if found and not name.endswith(" (deleted)"):
            yield Path(_SHARED_MEMORY + name)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
