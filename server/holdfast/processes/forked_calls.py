"""Calls a function in a process that the fork server forks for it, and returns what it wrote."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

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
    """
    if not forkserver.is_enabled() or forkserver.server_pid() is None:
        return None
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours:
        process = forkserver.ForkedProcess(target=target, args=(theirs, argument), daemon=True)
        with theirs:
            try:
                process.start()
            except (OSError, EOFError) as error:
                logger.debug("cannot fork a process: %r", error)
                return None
        forkserver.exempt(process)
        try:
            return ours.recv_bytes() if ours.poll(deadline_seconds) else None
        except (OSError, EOFError) as error:
            logger.debug("a forked process gave no answer: %r", error)
            return None
        finally:
            process.join(_ENDING_SECONDS)
            if process.is_alive():
                process.kill()
                process.join(_ENDING_SECONDS)
