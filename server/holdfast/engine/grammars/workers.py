"""Runs in the processes that may die of a grammar: one that has the tokenizer, and its workers.

Workers are forked from the first process. One that dies loses one grammar, and is replaced in
milliseconds, because nothing is read or imported again. All of them end with the front end, see
`worker.lifetime`. They have no socket except the one that delivers grammars, and only the
environment variables that vLLM reads.

A grammar comes with a socket of its own, on which the worker sends its pid and then its reply. If a
worker ends without a reply, the first process reports its exit code and the CPU time of its life.
The kernel ends a worker at its deadline, whatever it is doing: with SIGALRM when the time is over,
and with SIGPROF when a shorter time is, if its threads have had that much CPU time, too.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from holdfast.patches.grammar_memory import private_bytes
from holdfast.worker import lifetime

Compile = Callable[[Mapping[str, Any]], Mapping[str, Any]]

READY = b"ready"
OUT_OF_MEMORY = "memory"
_CLOSED = 3
"""Exit code of a worker when the front end has closed the socket."""
_RENEWED = 4
"""Exit code of a worker that is to be replaced, because it has grown."""
_RENEW_ABOVE_BYTES = 16 << 20
"""A worker is replaced once it has grown by more: the allocator keeps what a grammar leaves."""
_STACKS_BYTES = 72 << 20
"""Eight threads compile a grammar (vLLM 0.32), and another one waits to bound their time; the
kernel counts their whole stacks."""
_MESSAGE_BYTES = 64
_MAX_GRAMMARS = 100
"""One worker compiles at most this many, so that what they leave behind does not add up."""
_KEPT_VARIABLES = frozenset({"HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "XDG_CACHE_HOME"})
_CHUNK_BYTES = 1 << 16
_NICENESS = 5
_PAUSE_SECONDS = 0.02
_LEAST_TIMER_SECONDS = 0.001
_ENDING_SECONDS = 0.05


def serve(
    make: Callable[[], Compile], control: socket.socket, workers: int, memory_bytes: int
) -> None:
    """Keep this many workers waiting for grammars at `control`, until that is closed.

    Each may grow by `memory_bytes`. `make` runs once, and the workers inherit its result.
    """
    lifetime.die_with_parent()
    os.setpgid(0, 0)  # see `reaper`
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal, meant for the front end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    compile_grammar = make()
    _forget_environment()
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        os.nice(_NICENESS)
        # If memory runs out, the kernel ends a grammar first.
        Path("/proc/self/oom_score_adj").write_text("1000")
    gc.collect()
    gc.freeze()
    with suppress(ImportError):  # as in `processes.preloaded`
        importlib.import_module("setproctitle").setproctitle("holdfast::grammars")
    control.send(READY)
    alive: set[int] = set()
    while True:
        with suppress(OSError):  # too many processes: those that live go on
            while len(alive) < workers:
                alive.add(_forked(compile_grammar, control, memory_bytes))
        if (ended := _next_ended(waits=len(alive) == workers)) is None:
            time.sleep(_PAUSE_SECONDS)
            continue
        pid, status, usage = ended
        alive.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == _CLOSED:
            return
        if code != _RENEWED:
            with suppress(OSError):  # the front end has ended, or is ending
                seconds = usage.ru_utime + usage.ru_stime
                control.send(b"%d %d %f" % (pid, code, seconds), socket.MSG_DONTWAIT)
            time.sleep(_PAUSE_SECONDS)  # so that workers that end at once cause no fork storm


def _next_ended(*, waits: bool) -> tuple[int, int, resource.struct_rusage] | None:
    """Return what `wait4` tells of a worker; None if none has ended, unless it `waits` for one."""
    try:
        ended = os.wait4(-1, 0 if waits else os.WNOHANG)
    except ChildProcessError:  # none could be forked yet
        return None
    return ended if ended[0] else None


def _forked(compile_grammar: Compile, control: socket.socket, memory_bytes: int) -> int:
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        lifetime.die_with_parent(parent_pid)
        _bound_memory(memory_bytes)
        os._exit(_work(compile_grammar, control))
    except BaseException:  # noqa: BLE001 - the outermost edge of a process
        os._exit(1)


def _work(compile_grammar: Compile, control: socket.socket) -> int:
    """Compile grammars until the worker is to be replaced; return its exit code."""
    before_bytes = private_bytes()
    for _ in range(_MAX_GRAMMARS):
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 1)
        if not message or not descriptors:
            return _CLOSED
        limit_seconds, limit_cpu_seconds, is_slow = map(float, message.split())
        with socket.socket(fileno=descriptors[0]) as asked:
            asked.setblocking(True)
            asked.sendall(b"%d %f\n" % (os.getpid(), time.process_time()))
            if is_slow:
                _run_only_on_idle_cores()
            signal.setitimer(signal.ITIMER_REAL, limit_seconds)
            with _cpu_bounded(limit_cpu_seconds):
                answer = _answer(compile_grammar, json.loads(_read(asked)))
            signal.setitimer(signal.ITIMER_REAL, 0)
            with suppress(OSError):  # the front end no longer waits for it
                asked.sendall(json.dumps(answer).encode())
        has_grown = private_bytes() > before_bytes + _RENEW_ABOVE_BYTES
        is_spoilt = has_grown or _has_left_thread() or answer.get("error") == OUT_OF_MEMORY
        if is_slow or is_spoilt:
            break
    return _RENEWED


@contextmanager
def _cpu_bounded(seconds: float) -> Iterator[None]:
    """End this process once it has taken `seconds` both on the clock and of CPU time.

    The CPU time is that of all threads. Eight of them may take seconds of it for a grammar that
    they compile in a moment, so the timer of CPU time starts only after `seconds` on the clock.
    If `seconds` is 0, nothing ends it.
    """
    if not seconds:
        yield
        return
    until_seconds = time.process_time() + seconds

    def begin() -> None:
        left_seconds = until_seconds - time.process_time()
        signal.setitimer(signal.ITIMER_PROF, max(left_seconds, _LEAST_TIMER_SECONDS))

    timer = threading.Timer(seconds, begin)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _has_left_thread() -> bool:
    """Whether another thread is at work, as that of a regex that vLLM gave up.

    An idle one of a pool ends in a moment (`compile_regex_with_timeout`, 0.32).
    """
    others = [one for one in threading.enumerate() if one is not threading.current_thread()]
    for one in others:
        one.join(_ENDING_SECONDS)
    return any(one.is_alive() for one in others)


def _run_only_on_idle_cores() -> None:
    """Give way at once to whatever else wants to run, for good.

    A niced thread keeps its core for some milliseconds when an engine's process wakes up, and an
    engine step wakes several. A thread under this policy loses it at that moment.
    https://man7.org/linux/man-pages/man7/sched.7.html
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _answer(compile_grammar: Compile, grammar: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return compile_grammar(grammar)
    except MemoryError:
        return {"error": OUT_OF_MEMORY}


def _read(asked: socket.socket) -> bytes:
    parts = []
    while part := asked.recv(_CHUNK_BYTES):
        parts.append(part)
    return b"".join(parts)


def _bound_memory(memory_bytes: int) -> None:
    """Let this process grow by this much private memory, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + memory_bytes + _STACKS_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _forget_environment() -> None:
    """Keep only variables that vLLM may still read, and no key."""
    for name in list(os.environ):
        is_of_vllm = name.startswith("VLLM_") and not name.endswith("_KEY")
        if not is_of_vllm and name not in _KEPT_VARIABLES:
            del os.environ[name]
