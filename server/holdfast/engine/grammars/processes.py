"""The processes that may die of a grammar: one that has the tokenizer, and workers forked from it.

A worker that dies takes one grammar with it, and is replaced in milliseconds: nothing is read or
imported again. All of them end with the front end, see `leash`. They have no socket but the one
that grammars come by, and of the environment what vLLM reads.

A grammar comes with a socket of its own, over which the worker says its pid, and then its answer.
If it ends without one, the first process says of what. The kernel ends a worker at its deadline,
whatever it is doing.
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
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.worker import lifetime

Compile = Callable[[Mapping[str, Any]], Mapping[str, Any]]

READY = b"ready"
OUT_OF_MEMORY = "memory"
_CLOSED = 3
"""Exit code of a worker that no grammar will come to."""
_RENEWED = 4
"""Exit code of a worker that has done its work, and may have grown by it."""
_TIRED_SECONDS = 0.5
_MESSAGE_BYTES = 64
_MOST_GRAMMARS = 100
"""Of one worker, so that what they leave behind does not add up."""
_KEPT_VARIABLES = frozenset({"HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "XDG_CACHE_HOME"})
_CHUNK_BYTES = 1 << 16
_NICENESS = 5
_PAUSE_SECONDS = 0.02


def serve(
    make: Callable[[], Compile], control: socket.socket, workers: int, memory_bytes: int
) -> None:
    """Keep this many workers waiting for grammars at `control`, until that is closed.

    Each may grow by `memory_bytes`. What `make` returns is made once, and forked.
    """
    lifetime.tie()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, meant for the front end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    compile_grammar = make()
    _forget_environment()
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        os.nice(_NICENESS)
        # Where memory runs out, a grammar goes first.
        Path("/proc/self/oom_score_adj").write_text("1000")
    gc.collect()
    gc.freeze()
    with suppress(ImportError):  # as in `preloaded`
        importlib.import_module("setproctitle").setproctitle("holdfast::grammars")
    control.send(READY)
    alive: set[int] = set()
    while True:
        while len(alive) < workers:
            alive.add(_forked(compile_grammar, control, memory_bytes))
        pid, status = os.waitpid(-1, 0)
        alive.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code == _CLOSED:
            return
        if code != _RENEWED:
            with suppress(OSError):  # nobody listens, or not for long
                control.send(b"%d %d" % (pid, code), socket.MSG_DONTWAIT)
            time.sleep(_PAUSE_SECONDS)  # not a storm of forks, whatever ends them


def _forked(compile_grammar: Compile, control: socket.socket, memory_bytes: int) -> int:
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        lifetime.tie(parent_pid)
        _bound_memory(memory_bytes)
        os._exit(_work(compile_grammar, control))
    except BaseException:  # noqa: BLE001 - the outermost edge of a process
        os._exit(1)


def _work(compile_grammar: Compile, control: socket.socket) -> int:
    """Answer grammars until the worker is to be renewed; its exit code."""
    for _ in range(_MOST_GRAMMARS):
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 1)
        if not message or not descriptors:
            return _CLOSED
        started = time.monotonic()
        with socket.socket(fileno=descriptors[0]) as asked:
            asked.setblocking(True)
            asked.sendall(b"%d\n" % os.getpid())
            signal.setitimer(signal.ITIMER_REAL, float(message))
            answer = _answer(compile_grammar, json.loads(_read(asked)))
            signal.setitimer(signal.ITIMER_REAL, 0)
            with suppress(OSError):  # nobody waits for it any more
                asked.sendall(json.dumps(answer).encode())
        is_tired = time.monotonic() - started > _TIRED_SECONDS
        if is_tired or answer.get("error") == OUT_OF_MEMORY:
            break
    return _RENEWED


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
    """Let this process grow by this much private memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _forget_environment() -> None:
    """Keep what vLLM may still read, and no key."""
    for name in list(os.environ):
        is_of_vllm = name.startswith("VLLM_") and not name.endswith("_KEY")
        if not is_of_vllm and name not in _KEPT_VARIABLES:
            del os.environ[name]
