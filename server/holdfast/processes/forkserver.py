"""Starts the engine's processes from one that has imported vLLM: `multiprocessing`'s fork server.

A spawned EngineCore or worker spends seconds on imports at every restart. The server is started
before the front end's own imports, so that the first start gains too, and never initialises a
device. Its children adopt the environment of the process that asked for them, as if spawned, except
what native libraries have read already, see `environment`: a worker that needs other values is
spawned.

No server runs if the user has asked vLLM to spawn its processes. The server ends itself if its
imports have initialised CUDA's driver, which no forked process could then use.
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
    reduction,
    resource_tracker,
    util,
)
from pathlib import Path
from typing import Any

import psutil

from holdfast.patches.engine import fork_workers
from holdfast.processes import environment, exits, family, imports
from holdfast.worker import lifetime

PRELOADED: tuple[str, ...] = ("holdfast.processes.preloaded",)
"""What the server imports before it forks."""

START_METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's own variable. The user's `spawn` means that nothing may be forked: profilers, sanitizers
and some drivers break on it. vLLM sets it too, so it is read before vLLM is imported."""
_UNSAFE = "unsafe-"

FORK_DEADLINE_SECONDS = 60.0
"""Enough for the server to fork. It imports while the process that will ask it does."""
CHILD_DEADLINE_SECONDS = 20.0
"""Enough for the first forked process, which imports nothing, to say whether CUDA works."""

logger = logging.getLogger("holdfast.engine")


def ensure_running(
    directory: Path | None = None, native_variables: Mapping[str, str] | None = None
) -> None:
    """Ensure that a fork server runs, with its socket in `directory`; replace one that has ended.

    The exit codes of processes are left there too, whether these are forked or not. The server is
    started with `native_variables`, and so is each replacement. Give them when no engine runs: then
    a server whose socket is gone is replaced too, and its children end with it.

    Call it in the main thread: the server ends with the thread that starts it, see `lifetime`. If
    it cannot run, for example because the directory's path is too long for a socket, a warning is
    logged, and engines are spawned. Nothing is started if `is_enabled` is false.
    """
    if directory is not None:
        # A server that is killed leaves its socket behind.
        current: Any = multiprocessing.current_process()
        current._config["tempdir"] = str(directory)  # noqa: SLF001 - no argument for it
    stop_forking_if_unsafe()
    if not is_enabled():
        return
    if native_variables is not None:
        _server().native_variables = dict(native_variables)
        _end_if_unreachable()
    try:
        _ensure_running()
    except OSError as error:
        logger.warning(
            "cannot keep a process to fork engines from, so they start more slowly: %s", error
        )


def enable(*, is_allowed: bool) -> None:
    """Choose whether processes are forked from now on; otherwise they are spawned."""
    _server().is_disabled = not is_allowed
    _server().is_over = False


def start_nothing_more() -> None:
    """Spawn nothing from now on: this process ends the others, and would miss a new one."""
    _server().is_over = True


def is_over() -> bool:
    """Whether `start_nothing_more` was called."""
    return bool(getattr(_server(), "is_over", False))


def is_allowed_by(environment: Mapping[str, str]) -> bool:
    """Whether the user's environment leaves it to Holdfast how processes are started."""
    return environment.get(START_METHOD_VARIABLE) != "spawn"


def is_enabled() -> bool:
    """Whether processes are forked at all, where that is safe."""
    return not getattr(_server(), "is_disabled", False)


def stop_forking_if_unsafe() -> None:
    """Stop forking, and warn, if the server has ended because of CUDA's driver."""
    pid = server_pid()
    if is_enabled() and pid is not None and (exit_codes_directory() / f"{_UNSAFE}{pid}").exists():
        enable(is_allowed=False)
        with suppress(ChildProcessError):  # its exit code was read elsewhere
            _server()._stop()  # noqa: SLF001 - nothing public ends it
        _server()._forkserver_pid = None  # noqa: SLF001 - as above
        logger.warning(
            "engines are spawned, not forked, and start more slowly: importing vLLM "
            "initialises CUDA's driver here, as with MIG by UUID or without NVML, or a forked "
            "process hangs"
        )


def record_unsafe_forks(directory: Path) -> None:
    """Record, in the server, that it ends because its children could not use CUDA."""
    directory.mkdir(exist_ok=True)
    (directory / f"{_UNSAFE}{os.getpid()}").touch()


def _ensure_running() -> None:
    server = _server()
    pid_before = server_pid()
    forkserver.set_forkserver_preload(list(PRELOADED))
    variables = {
        **getattr(server, "native_variables", {}),
        lifetime.PARENT_VARIABLE: str(os.getpid()),
        exits.DIRECTORY_VARIABLE: str(exit_codes_directory()),
    }
    with environment.overridden(variables):
        try:
            forkserver.ensure_running()
        except ChildProcessError:  # its exit code was read elsewhere
            os.close(server._forkserver_alive_fd)  # noqa: SLF001 - as below
            server._forkserver_pid = None  # noqa: SLF001 - as below
            forkserver.ensure_running()
    if pid_before not in {None, server_pid()}:
        logger.warning("the process that starts engines had ended and was replaced")


def exit_codes_directory() -> Path:
    """The directory where the server, or a follower's executor, leaves exit codes of children."""
    current: Any = multiprocessing.current_process()
    return Path(current._config.get("tempdir") or tempfile.gettempdir()) / "exit-codes"  # noqa: SLF001 - as in `ensure_running`


def server_pid() -> int | None:
    """The pid of the server that was started last."""
    pid: int | None = _server()._forkserver_pid  # noqa: SLF001 - as below
    return pid


def server() -> frozenset[psutil.Process]:
    """The running server, or nothing if none runs."""
    pid = server_pid()
    with suppress(psutil.Error):
        return frozenset() if pid is None else frozenset({psutil.Process(pid)})
    return frozenset()


def ended_and_running() -> frozenset[int]:
    """Return the pids of all children that the server has had so far."""
    # In this order, since a child is recorded before it is reaped.
    running = {child.pid for process in server() for child in family.children(process.pid)}
    return exits.recorded_pids(exit_codes_directory()) | running


def exempt(process: ForkedProcess) -> None:
    """Have no start of an engine end because this process, which belongs to none, was killed."""
    if process.pid is not None and server_pid() is not None:
        exits.exempt(exit_codes_directory(), process.pid)


def end_if_stopped() -> None:
    """Kill a server that a signal has stopped, so that what waits for it fails, and replace it."""
    for process in server():
        with suppress(psutil.Error):
            if process.status() in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}:
                process.kill()


def _end_if_unreachable() -> None:
    """Kill a server whose socket was removed, for example with old temporary files."""
    address = _server()._forkserver_address  # noqa: SLF001 - its state has no public name
    if address is None or util.is_abstract_socket_namespace(address) or Path(address).exists():
        return
    for process in server():
        with suppress(psutil.Error):
            process.kill()
            process.wait(FORK_DEADLINE_SECONDS)


def has_forked(pid: int) -> bool:
    """Whether the server forked a process; False if the process is gone."""
    try:
        return psutil.Process(pid).ppid() == server_pid()
    except psutil.Error:
        return False


def _server() -> Any:
    return forkserver._forkserver  # noqa: SLF001 - its state has no public name


class ForkedProcess(context.ForkServerProcess):
    """A process that the server forks; it is spawned instead if no server answers."""

    def __reduce__(self) -> tuple[Any, ...]:
        return imports.unpickled, (type(self), bytes(reduction.ForkingPickler.dumps(self.__dict__)))

    def start(self) -> None:
        self._environment = dict(os.environ)
        self._allowed_cpus = os.sched_getaffinity(0)
        super().start()

    def run(self) -> None:
        if _is_forked():
            # Not if spawned: an environment that has moved hides where the title is stored.
            environment.adopt(self._environment, self._allowed_cpus)
        super().run()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        stop_forking_if_unsafe()
        if is_enabled():
            try:
                with _killing_silent_server():
                    return popen_forkserver.Popen(process_obj)
            except (OSError, EOFError) as error:
                stop_forking_if_unsafe()
                if is_enabled() and not is_over():
                    logger.warning(
                        "the process that starts engines does not answer (%r), so this one is "
                        "spawned",
                        error,
                    )
        if is_over():
            raise ProcessLookupError(f"process {os.getpid()} starts no others any more")
        return popen_spawn_posix.Popen(process_obj)


class ForkedCore(ForkedProcess):
    """An EngineCore; its workers are forked too, where that is safe."""

    def run(self) -> None:
        if _preloaded() is not None:
            # Otherwise it would start its own server (CPython 3.11, `ForkServer.ensure_running`).
            _server().ensure_running = resource_tracker.ensure_running
            fork_workers(WorkerContext())
        super().run()


class ForkedWorker(ForkedProcess):
    """A worker; spawned if native libraries must read other values than in the server."""

    def run(self) -> None:
        # OpenMP has bound the server to the CPUs that it would bind this process to.
        self._allowed_cpus = os.sched_getaffinity(0)
        _enable_amx()
        super().run()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - multiprocessing's name
        wanted = process_obj._environment  # noqa: SLF001 - our own
        if environment.can_adopt(wanted, _preloaded().STARTED_WITH):
            return ForkedProcess._Popen(process_obj)  # noqa: SLF001 - our own
        return popen_spawn_posix.Popen(process_obj)


class Context(context.ForkServerContext):
    """A `multiprocessing` context whose processes the server forks."""

    Process = ForkedProcess


class CoreContext(Context):
    """The context that vLLM gets for starting its EngineCores."""

    Process = ForkedCore


class WorkerContext(Context):
    """The context that an EngineCore gets for starting its workers."""

    Process = ForkedWorker


@contextmanager
def _killing_silent_server() -> Iterator[None]:
    """While entered, kill a server that does not answer by the deadline.

    It may be stopped, or hang in an import. What waits for it then learns that it has ended.
    """
    timer = threading.Timer(FORK_DEADLINE_SECONDS, _kill_silent_server)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill_silent_server() -> None:
    # Its children end with it, see `lifetime`, so until then it is the parent of a forked process.
    pid = os.getppid() if _is_forked() else server_pid()
    logger.warning(
        "no process was forked within %.0f s, so the fork server is killed", FORK_DEADLINE_SECONDS
    )
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_forked() -> bool:
    """Whether this process was forked by the server, not spawned instead."""
    return forkserver.get_inherited_fds() is not None


def _preloaded() -> Any:
    """The module `preloaded` in the server's children; None elsewhere."""
    return sys.modules.get("holdfast.processes.preloaded")


def _enable_amx() -> None:
    """Ask Linux for the tiles of Intel's AMX, whether this worker was forked or spawned.

    vLLM's CPU attention uses them without asking (`cpu_attn.py`, 0.32), which raises SIGILL:
    https://docs.kernel.org/arch/x86/xstate.html. Torch asks only while it compiles, so a worker
    whose model comes from a cache, or that runs eagerly, would die. On other processors this has no
    effect.
    """
    import torch  # noqa: PLC0415 - as above

    torch.cpu._init_amx()  # noqa: SLF001 - inductor asks in this way, too
