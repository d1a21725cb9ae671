"""Calls a function in a process that the fork server forks for it, and returns what it wrote."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

from holdfast.errors import EngineStartError
from holdfast.processes import forkserver

logger = logging.getLogger(__name__)

CALL_DEADLINE_SECONDS = 120.0
"""Enough for a call that imports the code of a model from a slow disk."""
_ENDING_SECONDS = 5.0


def call_forked(
    target: Callable[[Connection, bytes], None],
    argument: bytes,
    deadline_seconds: float = CALL_DEADLINE_SECONDS,
) -> bytes | None:
    """Return the message that `target`, a function of a module, sends when given `argument`.

    None if there is no fork server, or if the process fails, dies or misses the deadline. It has
    ended when this returns. Call it in a thread that may wait.

    Raises:
        EngineStartError: this process ends, so nothing may be started instead.
    """
    if not forkserver.is_enabled() or forkserver.server_pid() is None:
        return None
    answer = _exchange(target, argument, deadline_seconds)
    if answer is None and forkserver.is_over():
        raise EngineStartError("the server was told to end during the start")
    return answer


def _exchange(
    target: Callable[[Connection, bytes], None], argument: bytes, deadline_seconds: float
) -> bytes | None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = forkserver.ForkedProcess(target=target, args=(theirs, argument), daemon=True)
    with ours:
        try:
            with theirs:
                process.start()
            forkserver.exempt(process)
            return ours.recv_bytes() if ours.poll(deadline_seconds) else None
        except (OSError, EOFError) as error:
            logger.debug("a forked process gave no answer: %r", error)
            return None
        finally:
            _end(process)


def _end(process: forkserver.ForkedProcess) -> None:
    if process.pid is None:  # it was not started
        return
    process.join(_ENDING_SECONDS)
    if process.is_alive():
        process.kill()
        process.join(_ENDING_SECONDS)
