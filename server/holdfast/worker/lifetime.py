"""Makes processes end with their parent, and write their stacks when a signal asks for them.

For the first, vLLM has a pipe that a worker in a collective never reads, and nothing at all for
its EngineCore. The kernel has `PR_SET_PDEATHSIG`, prctl(2): sent when the thread that started a
process ends, kept by an exec and not inherited. So every process asks for it itself, first of all.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MARK = "prctl"
PARENT_VARIABLE = "HOLDFAST_PARENT_PID"
"""Tells a process whose command line is not ours the pid of the process that started it."""


def tie(parent_pid: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    If `parent_pid` is given but is not its parent any more, that has ended, and so does this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid not in {None, os.getppid()}:
        os._exit(1)


def end_if_orphan() -> None:
    """End a process that `multiprocessing` started if its parent is gone already.

    Others, such as Ray's, have a parent that is not ours.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


def outlive_terminal() -> None:
    """Ignore a closed terminal, which the kernel reports to every process: the front end decides.

    Children inherit this.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@contextmanager
def outliving_terminal() -> Iterator[None]:
    """Shield the children started while entered from a closed terminal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def tie_spawned() -> None:
    """Have every process that this one spawns from now on tie itself before it imports anything.

    Imports take seconds, during which nothing would end it. Processes that a short-lived thread
    spawns are left alone: they would be killed with that thread. vLLM 0.32 starts its workers in
    the main thread, and we start its EngineCores in asyncio's executor; these threads last.
    """
    original = spawn.get_command_line
    if sys.platform == "linux" and _MARK not in original.__name__:
        spawn.get_command_line = _tied(original)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent ends, so that none is lost."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _tied(get_command_line: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def with_prctl(**arguments: object) -> list[str]:
        command = get_command_line(**arguments)
        thread = threading.current_thread()
        if thread is not threading.main_thread() and not thread.name.startswith("asyncio_"):
            return command
        program = command.index("-c") + 1
        command[program] = (
            f"import ctypes, os; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGKILL:d});"
            f" os.getppid() == {os.getpid()} or os._exit(1); {command[program]}"
        )
        return command

    return with_prctl


logger = logging.getLogger(__name__)

STACKS_SIGNAL = signal.SIGUSR2
"""Used by neither vLLM nor torch (0.32, 2.13)."""


def stacks_path(directory: Path, pid: int) -> Path:
    """Return where the process writes its stacks; no file means it would not heed the signal."""
    return directory / f"{pid}.stacks"


def offer_stacks(directory: Path, pid: int) -> None:
    """Have this process, whose pid is given, write all its stacks at each `STACKS_SIGNAL`.

    It does so even within C code that holds the interpreter's lock.
    """
    try:
        file = stacks_path(directory, pid).open("w")
    except OSError as error:
        logger.warning("this process cannot report its stacks: %s", error)
        return
    # faulthandler keeps the file.
    faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
