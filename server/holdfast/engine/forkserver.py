"""Starts EngineCores from a process that has imported vLLM: the fork server of `multiprocessing`.

An EngineCore that is spawned imports for seconds, at every restart. The server is started before
the front end's own imports, so that the first start gains too, and never initialises a device.
What it forks takes over the environment that the front end has at that moment, as if spawned.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from multiprocessing import context, forkserver, popen_forkserver, popen_spawn_posix
from pathlib import Path
from typing import Any

from holdfast.engine import environment
from holdfast.workspace import leash

PRELOADED: tuple[str, ...] = ("holdfast.engine.preloaded",)
"""What the server imports before it forks."""

logger = logging.getLogger("holdfast.engine")


def ensure_running(directory: Path | None = None) -> None:
    """Have a fork server run, with its socket in `directory`; a new one if the last has ended.

    Call it in the main thread: the server ends with the thread that starts it, see `leash`. Where
    there can be none, as in a directory whose path is too long for a socket, that is a warning, and
    engines are spawned.
    """
    try:
        _ensure_running(directory)
    except OSError as error:
        logger.warning("no process to fork engines from, they start slower: %s", error)


def _ensure_running(directory: Path | None) -> None:
    if directory is not None:
        # A server that is killed leaves its socket behind.
        current: Any = multiprocessing.current_process()
        current._config["tempdir"] = str(directory)  # noqa: SLF001 - no argument for it
    server = _server()
    pid_before = server_pid()
    forkserver.set_forkserver_preload(list(PRELOADED))
    with environment.changed({leash.PARENT_VARIABLE: str(os.getpid())}):
        try:
            forkserver.ensure_running()
        except ChildProcessError:  # somebody else waited for its end
            os.close(server._forkserver_alive_fd)  # noqa: SLF001 - as below
            server._forkserver_pid = None  # noqa: SLF001 - as below
            forkserver.ensure_running()
    if pid_before not in {None, server_pid()}:
        logger.warning("the process that starts engines had ended; there is another one now")


def server_pid() -> int | None:
    """The process of the server that was started last."""
    pid: int | None = _server()._forkserver_pid  # noqa: SLF001 - as below
    return pid


def _server() -> Any:
    return forkserver._forkserver  # noqa: SLF001 - its state has no public name


class Process(context.ForkServerProcess):
    """A process that the server forks; spawned instead if there is no server that answers."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        _adopt(self._environment)
        super().run()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        try:
            return popen_forkserver.Popen(process_obj)
        except (OSError, EOFError) as error:
            logger.warning("no process that starts engines answers (%r): spawning one", error)
            return popen_spawn_posix.Popen(process_obj)


class Context(context.ForkServerContext):
    """For vLLM, where it asks for a context to start its EngineCores in."""

    Process = Process


def _adopt(environment: Mapping[str, str]) -> None:
    """Take over what the front end has changed since the server was started."""
    threads_before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # read again from the environment
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads and threads != threads_before:
        import torch  # noqa: PLC0415 - the front end starts a server before it has imported it

        # Who is spawned reads the variable when it imports torch.
        torch.set_num_threads(int(threads))
