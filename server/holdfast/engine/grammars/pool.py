"""The front end's side of the processes that try grammars: started when first needed, and replaced.

None of what comes from them is trusted with more than a result: it is JSON, and bounded.
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

from holdfast.engine.grammars import processes
from holdfast.errors import NotReadyError
from holdfast.processes import forkserver

START_DEADLINE_SECONDS = 120.0
MARGIN_SECONDS = 5.0
"""For a worker that has to be forked first, or does not end at its deadline."""
LONGEST_ANSWER_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 16
_MESSAGE_BYTES = 64
_POLL_SECONDS = 0.01

logger = logging.getLogger("holdfast.engine")


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a grammar in a worker."""

    said: Mapping[str, Any] | None
    """None if the worker died of it."""
    signal: int
    """The signal that ended it; 0 if none did."""
    seconds: float


@dataclass(frozen=True, slots=True)
class _Started:
    process: Any
    control: socket.socket
    exit_codes: dict[int, int] = field(default_factory=dict)
    """The exit codes of workers that have died, by pid."""


class Pool:
    """Runs a number of workers, started with the first grammar. Belongs to one event loop."""

    def __init__(
        self, make: Callable[[], processes.Compile], *, workers: int, memory_bytes: int
    ) -> None:
        self._serve = partial(processes.serve, make)
        self._workers = workers
        self._memory_bytes = memory_bytes
        self._starting: asyncio.Task[_Started] | None = None
        self._process: Any | None = None

    async def ask(self, grammar: bytes, limit_seconds: float) -> Answer:
        """Have a worker compile a grammar, which ends it after `limit_seconds`.

        Raises:
            NotReadyError: no process is available to judge the grammar.
        """
        started = await self._running()
        began = time.monotonic()
        pid, answer = await self._asked(started, grammar, limit_seconds)
        seconds = time.monotonic() - began
        with suppress(ValueError):
            return Answer(json.loads(answer), 0, seconds)
        code = await _exit_code(started, pid)
        if code is None:
            self._give_up(started)
            raise _nobody("the process that checks grammars has ended")
        if code == -signal.SIGKILL:
            raise _nobody("a process that checked a grammar was killed from outside")
        return Answer(None, max(0, -code), seconds)

    async def _asked(
        self, started: _Started, grammar: bytes, limit_seconds: float
    ) -> tuple[int, bytes]:
        """The pid of the worker that took the grammar, 0 if none did, and what it answered."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise _nobody(f"cannot hand over a grammar: {error}") from error
        with ours, theirs:
            ours.setblocking(False)
            try:
                async with asyncio.timeout(limit_seconds + MARGIN_SECONDS):
                    socket.send_fds(started.control, [b"%f" % limit_seconds], [theirs.fileno()])
                    theirs.close()
                    return await _exchange(ours, grammar)
            except (TimeoutError, OSError) as error:
                # No worker took it, or the one that did is stopped: all of them are restarted.
                self._give_up(started)
                raise _nobody(
                    f"the process that checks grammars does not answer: {error!r}"
                ) from error

    async def _running(self) -> _Started:
        if self._starting is not None and self._starting.done():
            if self._starting.cancelled() or self._starting.exception() is not None:
                self._starting = None
            elif not _is_alive(self._starting.result().process):
                self._give_up(self._starting.result())
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="grammars")
        return await asyncio.shield(self._starting)

    async def _start(self) -> _Started:
        forkserver.ensure_running()
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _nobody(f"cannot start a process that checks grammars: {error}") from error
        with theirs:
            process = forkserver.Process(
                target=self._serve,
                args=(theirs, self._workers, self._memory_bytes),
                name="grammars",
                daemon=True,  # or a front end that ends by itself waits for it
            )
            self._process = process
            try:
                async with asyncio.timeout(START_DEADLINE_SECONDS):
                    await asyncio.to_thread(process.start)
                    theirs.close()
                    ours.setblocking(False)
                    said = await asyncio.get_running_loop().sock_recv(ours, len(processes.READY))
            except (TimeoutError, OSError, EOFError) as error:
                ours.close()
                _kill(process)
                raise _nobody(
                    f"could not start a process that checks grammars: {error!r}"
                ) from error
        if said != processes.READY:
            ours.close()
            _kill(process)
            raise _nobody("the process that checks grammars ended while it started")
        return _Started(process, ours)

    def _give_up(self, started: _Started) -> None:
        """End the processes; the next grammar starts others."""
        if self._starting is not None and self._starting.done():
            if self._starting.result() is not started:
                return
            self._starting = None
        started.control.close()
        _kill(started.process)

    def stop(self) -> None:
        """End the processes that have been started."""
        if self._starting is not None and self._starting.done() and not self._starting.exception():
            self._give_up(self._starting.result())

    def family(self) -> frozenset[psutil.Process]:
        """The processes that live now, for which no engine answers."""
        pid = self._process.pid if self._process is not None else None
        if pid is None:
            return frozenset()
        try:
            first = psutil.Process(pid)
            return frozenset((first, *first.children()))
        except psutil.NoSuchProcess:
            return frozenset()


async def _exchange(ours: socket.socket, grammar: bytes) -> tuple[int, bytes]:
    """Hand a grammar over; return the pid of its worker, 0 if none took it, and any answer."""
    loop = asyncio.get_running_loop()
    said = bytearray()
    with suppress(ConnectionError):
        await loop.sock_sendall(ours, grammar)
        ours.shutdown(socket.SHUT_WR)
        while len(said) <= LONGEST_ANSWER_BYTES and (
            part := await loop.sock_recv(ours, _CHUNK_BYTES)
        ):
            said += part
    pid, _, answer = bytes(said).partition(b"\n")
    return int(pid) if pid.isdigit() else 0, answer


async def _exit_code(started: _Started, pid: int) -> int | None:
    """How a worker ended; None if nobody says so."""
    deadline = time.monotonic() + MARGIN_SECONDS
    while pid not in started.exit_codes and time.monotonic() < deadline:
        try:
            message = started.control.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            await asyncio.sleep(_POLL_SECONDS)
            continue
        except OSError:
            return None
        if not message:
            return None
        ended, code = map(int, message.split())
        started.exit_codes[ended] = code
    return started.exit_codes.pop(pid, None)


def _nobody(cause: str) -> NotReadyError:
    logger.warning("%s; a new one is started for the next grammar", cause)
    return NotReadyError("The grammar of the request cannot be checked now.")


def _is_alive(process: Any) -> bool:
    return bool(process.is_alive())


def _kill(process: Any) -> None:
    with suppress(AttributeError, ValueError, OSError):  # it was never started, or is gone
        process.kill()
