"""Makes processes end with their parent, crash at once, and write their stacks when asked to.

For the first, vLLM has a pipe that a worker in a collective never reads, and nothing at all for
its EngineCore. The kernel has `PR_SET_PDEATHSIG`, prctl(2): sent when the thread that started a
process ends, kept by an exec and not inherited. So every process asks for it itself, first of all.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import spawn
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MARK = "death_signal"
_LASTING_THREADS = ("asyncio_", "uvloop_")
"""How the names of an executor's threads begin, by the event loop that it belongs to."""
_STANDARD_ERROR = 2
PARENT_VARIABLE = "HOLDFAST_PARENT_PID"
"""Tells a process whose command line is not ours the pid of the process that started it."""


def die_with_parent(parent_pid: int | None = None) -> None:
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


def ignore_hangup() -> None:
    """Ignore a closed terminal, which the kernel reports to every process: the front end decides.

    Children inherit this.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def leave_group() -> None:
    """Leave the group of the front end, to which Ctrl-C, `timeout` and supervisors send signals.

    They are meant for the front end alone: vLLM's workers end at the first one, however much the
    front end still has to drain. Children inherit the new group.
    """
    with suppress(PermissionError):  # it leads a session, and so a group already
        os.setpgid(0, 0)
    if threading.current_thread() is threading.main_thread():
        # A terminal with `stty tostop` would stop a process that logs from another group.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)


@contextmanager
def ignoring_hangup() -> Iterator[None]:
    """Shield the children started while entered from a closed terminal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def make_spawned_die_with_parent() -> None:
    """Have every process that this one spawns die with it, from before its first import.

    Imports take seconds, during which nothing else would end it. Processes that a short-lived
    thread spawns are left alone: they would be killed with that thread. vLLM 0.32 starts its
    workers in the main thread, and we start its EngineCores in the executor of the event loop;
    these threads last.
    """
    original = spawn.get_command_line
    if sys.platform == "linux" and _MARK not in original.__name__:
        spawn.get_command_line = _with_death_signal(original)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent ends, so that none is lost."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _with_death_signal(get_command_line: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def with_death_signal(**arguments: object) -> list[str]:
        command = get_command_line(**arguments)
        thread = threading.current_thread()
        if thread is not threading.main_thread() and not thread.name.startswith(_LASTING_THREADS):
            return command
        program = command.index("-c") + 1
        command[program] = (
            f"import ctypes, os; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGKILL:d});"
            f" os.getppid() == {os.getpid()} or os._exit(1); {command[program]}"
        )
        return command

    return with_death_signal


logger = logging.getLogger(__name__)

STACKS_SIGNAL = signal.SIGUSR2
"""Used by neither vLLM nor torch (0.32, 2.13)."""


def stacks_path(directory: Path, pid: int) -> Path:
    """Return where the process writes its stacks; without that file, it ignores the signal."""
    return directory / f"{pid}.stacks"


def write_stacks_on_signal(directory: Path, pid: int) -> None:
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


def end_at_once_on_crashes() -> None:
    """Have a crash in native code end this process, after it has written its Python stacks.

    tvm-ffi, which xgrammar and FlashInfer load, handles SIGSEGV itself. It reads debug information
    to name C functions, for half a second or more, in which nobody knows that the process is dead.
    It also allocates memory, which may never return if the allocator has crashed.
    https://github.com/apache/tvm-ffi/blob/main/src/ffi/backtrace.cc

    Only the main thread may set a handler; in others tvm-ffi's stays. Forked children inherit ours.
    """
    with suppress(ImportError, OSError):  # its handler replaces earlier ones when it is loaded
        importlib.import_module("tvm_ffi")
    faulthandler.disable()  # a forked child has it enabled, and would not set its handlers again
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    faulthandler.enable(_STANDARD_ERROR)
