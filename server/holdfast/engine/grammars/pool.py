"""Starts the processes that try grammars when first needed, replaces them, and talks to them.

Replies are not trusted: they are JSON of bounded length.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil

from holdfast.engine.grammars.reaper import DYING_SECONDS, Reaper
from holdfast.engine.grammars.workers import READY, Compile, serve
from holdfast.errors import NotReadyError
from holdfast.processes import family, forkserver
from holdfast.processes.exits import is_alive

START_DEADLINE_SECONDS = 120.0
MARGIN_SECONDS = 5.0
"""Added for a worker that has to be forked first, or that does not end at its deadline."""
MAX_REPLY_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 16
_MESSAGE_BYTES = 64
_POLL_SECONDS = 0.01
_GONE_POLL_SECONDS = 0.1
_START_ERRORS = (TimeoutError, OSError, EOFError, RuntimeError, psutil.NoSuchProcess)
"""How a start may fail; a RuntimeError says that this process can have no other thread."""

logger = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class TrialReply:
    """How a trial ended."""

    reply: Mapping[str, Any] | None
    """What the worker replied; None if it died."""
    signal: int
    """The signal that ended the worker; 0 if none did."""
    seconds: float
    cpu_seconds: float = 0.0
    """What the grammar took of the CPU, if the worker died of it."""
    pid: int = 0
    """The worker."""


@dataclass(frozen=True, slots=True)
class _Exchanged:
    """What a worker sent."""

    pid: int = 0
    """0 if no worker took the grammar."""
    cpu_seconds: float = 0.0
    """What the worker had taken of the CPU before."""
    reply: bytes = b""


@dataclass(frozen=True, slots=True)
class _End:
    exit_code: int
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class _Processes:
    process: Any
    first: psutil.Process
    """The same one: `multiprocessing` does not see the end of one that others have reaped."""
    control: socket.socket
    ends: dict[int, _End] = field(default_factory=dict)
    """How workers have died, by pid."""


class Pool:
    """A number of workers, started for the first grammar. Belongs to one event loop."""

    def __init__(self, make: Callable[[], Compile], *, workers: int, memory_bytes: int) -> None:
        self._serve = partial(serve, make)
        self._workers = workers
        self.memory_bytes = memory_bytes
        self._starting: asyncio.Task[_Processes] | None = None
        self._process: Any | None = None
        self._reaper = Reaper()

    async def compile(
        self,
        grammar: bytes,
        limit_seconds: float,
        *,
        limit_cpu_seconds: float = 0.0,
        is_slow: bool = False,
    ) -> TrialReply:
        """Have a worker compile a grammar. The kernel ends the worker after `limit_seconds`.

        And once it has taken `limit_cpu_seconds` both on the clock and of CPU time, unless that is
        0. A slow grammar runs only where nothing else wants to, so that it delays no engine.

        Raises:
            NotReadyError: no process can check the grammar now.
        """
        started = await self._ensure_started()
        began = time.monotonic()
        how = b"%f %f %d" % (limit_seconds, limit_cpu_seconds, is_slow)
        margin_seconds = DYING_SECONDS if is_slow else MARGIN_SECONDS
        said = await self._send(started, grammar, how, limit_seconds + margin_seconds)
        seconds = time.monotonic() - began
        with suppress(ValueError):
            return TrialReply(json.loads(said.reply), 0, seconds, pid=said.pid)
        end = await _end(started, said.pid)
        if end is None:
            self._give_up(started)
            ended = (
                "the process that checks grammars" if said.pid else "a worker that took a grammar"
            )
            raise _unavailable(f"{ended} has ended")
        if end.exit_code == -signal.SIGKILL:
            raise _unavailable("a process that checked a grammar was killed from outside")
        cpu_seconds = end.cpu_seconds - said.cpu_seconds
        return TrialReply(None, max(0, -end.exit_code), seconds, cpu_seconds, said.pid)

    async def until_gone(self, pid: int) -> None:
        """Wait until a worker has ended, or for a minute; another takes its place.

        One that runs only on idle cores ends only there too, after it has replied.
        """
        deadline = time.monotonic() + DYING_SECONDS
        while pid and psutil.pid_exists(pid) and time.monotonic() < deadline:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(_GONE_POLL_SECONDS)

    async def _send(
        self, started: _Processes, grammar: bytes, how: bytes, deadline_seconds: float
    ) -> _Exchanged:
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise _unavailable(f"cannot hand over a grammar: {error}") from error
        with ours, theirs:
            ours.setblocking(False)
            try:
                async with asyncio.timeout(deadline_seconds):
                    socket.send_fds(started.control, [how], [theirs.fileno()])
                    theirs.close()
                    return await _exchange(ours, grammar)
            except (TimeoutError, OSError) as error:
                # No worker took it, or the one that did is stopped: restart all of them.
                self._give_up(started)
                raise _unavailable(
                    f"the process that checks grammars does not answer: {error!r}"
                ) from error

    async def _ensure_started(self) -> _Processes:
        if self._starting is not None and self._starting.done():
            if self._starting.cancelled() or self._starting.exception() is not None:
                self._starting = None
            elif not is_alive(self._starting.result().first):
                self._give_up(self._starting.result())
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="grammars")
        return await asyncio.shield(self._starting)

    async def _start(self) -> _Processes:
        forkserver.ensure_running()
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _unavailable(f"cannot start a process that checks grammars: {error}") from error
        with theirs:
            process = forkserver.ForkedProcess(
                target=self._serve,
                args=(theirs, self._workers, self.memory_bytes),
                name="grammars",
                daemon=True,  # or the front end would wait for it at its own exit
            )
            self._process = process
            try:
                async with asyncio.timeout(START_DEADLINE_SECONDS):
                    await asyncio.to_thread(process.start)
                    forkserver.exempt(process)
                    first = psutil.Process(process.pid)
                    theirs.close()
                    ours.setblocking(False)
                    reply = await asyncio.get_running_loop().sock_recv(ours, len(READY))
            except _START_ERRORS as error:
                ours.close()
                self._reaper.kill(process)
                raise _unavailable(
                    f"could not start a process that checks grammars: {error!r}"
                ) from error
        if reply != READY:
            ours.close()
            self._reaper.kill(process)
            raise _unavailable("the process that checks grammars ended while it started")
        return _Processes(process, first, ours)

    def _give_up(self, started: _Processes) -> None:
        """End the processes; the next grammar starts others."""
        if started.control.fileno() < 0:  # another grammar has given them up
            return
        if self._starting is not None and self._starting.done():
            if self._starting.result() is not started:
                return
            self._starting = None
        started.control.close()
        self._reaper.kill(started.process)

    def stop(self) -> None:
        """End the processes that have been started."""
        if self._starting is not None and self._starting.done() and not self._starting.exception():
            self._give_up(self._starting.result())

    def processes(self) -> frozenset[psutil.Process]:
        """Return the processes that are alive, which belong to no engine."""
        return self._reaper.dying() | self._latest()

    def _latest(self) -> frozenset[psutil.Process]:
        process = self._process
        # It may not have been started yet, or have ended and been closed.
        with suppress(ValueError, psutil.NoSuchProcess):
            pid = None if process is None else process.pid
            if pid is not None:
                first = psutil.Process(pid)
                return frozenset((first, *family.children(pid)))
        return frozenset()


async def _exchange(ours: socket.socket, grammar: bytes) -> _Exchanged:
    """Send a grammar, and return what came back until the worker replied or died."""
    loop = asyncio.get_running_loop()
    received = bytearray()
    with suppress(ConnectionError):  # it died before it had read everything
        await loop.sock_sendall(ours, grammar)
        ours.shutdown(socket.SHUT_WR)
    with suppress(ConnectionError):
        while len(received) <= MAX_REPLY_BYTES:
            if not (part := await loop.sock_recv(ours, _CHUNK_BYTES)):
                break
            received += part
    head, _, reply = bytes(received).partition(b"\n")
    try:
        pid, cpu_seconds = head.split()
        return _Exchanged(int(pid), float(cpu_seconds), reply)
    except ValueError:
        return _Exchanged()


async def _end(started: _Processes, pid: int) -> _End | None:
    """Return how a worker ended; None if it is not reported in time.

    One that has closed its socket, but still exists, runs only on idle cores, and ends only there:
    nothing but its deadline ends such a worker.
    """
    deadline = time.monotonic() + MARGIN_SECONDS
    while pid not in started.ends:
        try:
            message = started.control.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            if time.monotonic() > deadline:
                spent = _cpu_seconds(pid)
                return None if spent is None else _End(-signal.SIGALRM, spent)
            await asyncio.sleep(_POLL_SECONDS)
            continue
        except OSError:
            return None
        if not message:
            return None
        ended, code, cpu_seconds = message.split()
        started.ends[int(ended)] = _End(int(code), float(cpu_seconds))
    return started.ends.pop(pid)


def _cpu_seconds(pid: int) -> float | None:
    """Return what a process has taken of the CPU; None if it is gone."""
    try:
        times = psutil.Process(pid).cpu_times() if pid else None
    except psutil.Error:
        return None
    return None if times is None else float(times.user + times.system)


def _unavailable(cause: str) -> NotReadyError:
    logger.warning("%s; a new one is started for the next grammar", cause)
    return NotReadyError("The grammar of the request cannot be checked now.")
