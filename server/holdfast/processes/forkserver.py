"""Starts the engine's processes from one that has imported vLLM: `multiprocessing`'s fork server.

An EngineCore or a worker that is spawned imports for seconds, at every restart. The server is
started before the front end's own imports, so that the first start gains too, and never initialises
a device. What it forks takes over the environment of whoever asked for it, as if spawned, but for
what native libraries have read already, see `native`: a worker that needs another is spawned.

There is none where the user has asked vLLM to spawn its processes, and it ends itself where its
imports have initialised CUDA's driver, which no forked process could use then.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import (
    context,
    forkserver,
    popen_forkserver,
    popen_spawn_posix,
    resource_tracker,
)
from pathlib import Path
from typing import Any

import psutil

from holdfast.processes import environment, exit_codes, native_env
from holdfast.worker import lifetime

PRELOADED: tuple[str, ...] = ("holdfast.processes.preloaded",)
"""What the server imports before it forks."""

START_METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's own. Set to `spawn` by the user it means that nothing may be forked: profilers, sanitizers
and some drivers do not bear it. vLLM sets it too, so it is looked at before vLLM is imported."""
_SPOILT = "spoilt-"

FORK_DEADLINE_SECONDS = 60.0
"""For the server to fork. It imports while the process does that asks it then."""
CHILD_DEADLINE_SECONDS = 20.0
"""For the first process that is forked to say whether it can use CUDA. It has nothing to import."""

logger = logging.getLogger("holdfast.engine")


def ensure_running(
    directory: Path | None = None, native_variables: Mapping[str, str] | None = None
) -> None:
    """Have a fork server run, with its socket in `directory`; a new one if the last has ended.

    It is started with `native_variables`, and so is each that takes its place.

    Call it in the main thread: the server ends with the thread that starts it, see `leash`. Where
    there can be none, as in a directory whose path is too long for a socket, that is a warning, and
    engines are spawned. Nothing is started where `is_in_use` says no.
    """
    heed_spoilt_forks()
    if not is_in_use():
        return
    if native_variables is not None:
        _server().native_variables = dict(native_variables)
    try:
        _ensure_running(directory)
    except OSError as error:
        logger.warning(
            "cannot keep a process to fork engines from, so they start more slowly: %s", error
        )


def use(*, is_allowed: bool) -> None:
    """Say whether processes may be forked from now on; they are spawned if not."""
    _server().is_ruled_out = not is_allowed


def is_allowed(environment: Mapping[str, str]) -> bool:
    """Whether the user's own environment leaves it to Holdfast how processes are started."""
    return environment.get(START_METHOD_VARIABLE) != "spawn"


def is_in_use() -> bool:
    """Whether processes are forked where that is sound."""
    return not getattr(_server(), "is_ruled_out", False)


def heed_spoilt_forks() -> None:
    """Fork nothing any more, and warn, if the server has ended because of CUDA's driver."""
    pid = server_pid()
    if is_in_use() and pid is not None and (exit_codes_directory() / f"{_SPOILT}{pid}").exists():
        use(is_allowed=False)
        with suppress(ChildProcessError):  # somebody else waited for its end
            _server()._stop()  # noqa: SLF001 - nothing public ends it
        _server()._forkserver_pid = None  # noqa: SLF001 - as above
        logger.warning(
            "importing vLLM initialises CUDA's driver here, as with MIG by UUID or without NVML, "
            "or a forked process hangs: engines cannot be forked, so they are spawned and start "
            "more slowly"
        )


def note_spoilt(directory: Path) -> None:
    """In the server: say that it ends because what it forks could not use CUDA."""
    directory.mkdir(exist_ok=True)
    (directory / f"{_SPOILT}{os.getpid()}").touch()


def _ensure_running(directory: Path | None) -> None:
    if directory is not None:
        # A server that is killed leaves its socket behind.
        current: Any = multiprocessing.current_process()
        current._config["tempdir"] = str(directory)  # noqa: SLF001 - no argument for it
    server = _server()
    pid_before = server_pid()
    forkserver.set_forkserver_preload(list(PRELOADED))
    variables = {
        **getattr(server, "native_variables", {}),
        lifetime.PARENT_VARIABLE: str(os.getpid()),
        exit_codes.DIRECTORY_VARIABLE: str(exit_codes_directory()),
    }
    with environment.changed(variables):
        try:
            forkserver.ensure_running()
        except ChildProcessError:  # somebody else waited for its end
            os.close(server._forkserver_alive_fd)  # noqa: SLF001 - as below
            server._forkserver_pid = None  # noqa: SLF001 - as below
            forkserver.ensure_running()
    if pid_before not in {None, server_pid()}:
        logger.warning("the process that starts engines had ended and was replaced")


def exit_codes_directory() -> Path:
    """Where the server leaves the exit codes of what it has forked."""
    current: Any = multiprocessing.current_process()
    return Path(current._config.get("tempdir") or tempfile.gettempdir()) / "exit-codes"  # noqa: SLF001 - as in `_ensure_running`


def server_pid() -> int | None:
    """The process of the server that was started last."""
    pid: int | None = _server()._forkserver_pid  # noqa: SLF001 - as below
    return pid


def server() -> frozenset[psutil.Process]:
    """The server that runs, if one does."""
    pid = server_pid()
    with suppress(psutil.Error):
        return frozenset() if pid is None else frozenset({psutil.Process(pid)})
    return frozenset()


def end_if_stopped() -> None:
    """End a server that a signal has stopped: what waits for it is told, and it is replaced."""
    for process in server():
        with suppress(psutil.Error):
            if process.status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}:
                process.kill()


def has_forked(pid: int) -> bool:
    """Whether a process comes from the server; one that is gone does not."""
    try:
        return psutil.Process(pid).ppid() == server_pid()
    except psutil.Error:
        return False


def _server() -> Any:
    return forkserver._forkserver  # noqa: SLF001 - its state has no public name


class Process(context.ForkServerProcess):
    """A process that the server forks; spawned instead if there is no server that answers."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        self._allowed_cpus = os.sched_getaffinity(0)
        super().start()

    def run(self) -> None:
        if _is_forked():
            # Not where it was spawned: an environment that has moved hides the place of the title.
            _adopt(self._environment, self._allowed_cpus)
        super().run()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        heed_spoilt_forks()
        if is_in_use():
            try:
                with _answering():
                    return popen_forkserver.Popen(process_obj)
            except (OSError, EOFError) as error:
                heed_spoilt_forks()
                if is_in_use():
                    said = (
                        "the process that starts engines does not answer (%r), so this one is "
                        "spawned"
                    )
                    logger.warning(said, error)
        return popen_spawn_posix.Popen(process_obj)


class Core(Process):
    """An EngineCore; its workers are forked too, where that is sound."""

    def run(self) -> None:
        if _preloaded() is not None:
            from holdfast.patches import engine_core  # noqa: PLC0415 - imports vLLM

            # It would start a server of its own (CPython 3.11, `ForkServer.ensure_running`).
            _server().ensure_running = resource_tracker.ensure_running
            engine_core.fork_workers(WorkerContext())
        super().run()


class Worker(Process):
    """A worker; spawned if native libraries have to read something else than in the server."""

    def run(self) -> None:
        # OpenMP has bound the server as it would bind this process.
        self._allowed_cpus = os.sched_getaffinity(0)
        if _is_forked():
            _ask_for_tiles()
        super().run()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        wanted = process_obj._environment  # noqa: SLF001 - our own
        if native_env.can_take_over(wanted, _preloaded().STARTED_WITH):
            return Process._Popen(process_obj)  # noqa: SLF001 - our own
        return popen_spawn_posix.Popen(process_obj)


class Context(context.ForkServerContext):
    """Where processes are forked by the server."""

    Process = Process


class CoreContext(Context):
    """For vLLM, where it asks for a context to start its EngineCores in."""

    Process = Core


class WorkerContext(Context):
    """For vLLM, where an EngineCore asks for a context to start its workers in."""

    Process = Worker


@contextmanager
def _answering() -> Iterator[None]:
    """While entered, a server that does not answer by the deadline is ended: it may be stopped, or
    hang in an import. What waits for it is then told that it has ended.
    """
    timer = threading.Timer(FORK_DEADLINE_SECONDS, _end_silent)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_silent() -> None:
    # What it has forked ends with it, see `leash`: whose parent it is until then.
    pid = os.getppid() if _is_forked() else server_pid()
    logger.warning(
        "no process was forked within %.0f s, so the fork server is killed", FORK_DEADLINE_SECONDS
    )
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_forked() -> bool:
    """Whether this process comes from the server, and was not spawned in its place."""
    return forkserver.get_inherited_fds() is not None


def _preloaded() -> Any:
    """The module of that name in what the server has forked; None elsewhere."""
    return sys.modules.get("holdfast.processes.preloaded")


def _adopt(environment: Mapping[str, str], allowed_cpus: set[int]) -> None:
    """Take over what whoever asked for this process has changed since the server was started."""
    threads_before = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, allowed_cpus)
    tempfile.tempdir = None  # read again from the environment
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads and threads != threads_before:
        import torch  # noqa: PLC0415 - the front end starts a server before it has imported it

        # Who is spawned reads the variable when it imports torch.
        torch.set_num_threads(int(threads))


def _ask_for_tiles() -> None:
    """Ask Linux for the tiles of Intel's AMX: in a worker that is forked nothing else has.

    vLLM's attention on the CPU uses them without asking (`cpu_attn.py`, 0.32), which is SIGILL:
    https://docs.kernel.org/arch/x86/xstate.html. False, and nothing else, on other processors.
    """
    import torch  # noqa: PLC0415 - as above

    torch.cpu._init_amx()  # noqa: SLF001 - inductor asks in this way, too
