"""vLLM's constructor, in a thread: what it makes, or why it is not waited for any longer.

It blocks, and waits ten minutes for a process that is stopped or gone (vLLM 0.32). So whatever
shows that it cannot succeed is awaited beside it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.engine.interface import UntilOutOfMemory
from holdfast.engine.launch import startup
from holdfast.engine.launch.startup import FindProcesses, until_stuck
from holdfast.engine.vllm_errors import start_error, start_errors
from holdfast.errors import EngineStartError, HostFullError
from holdfast.nodes import remote_ranks
from holdfast.nodes.remote_ranks import RemoteRanks, start_error_of
from holdfast.processes import forkserver
from holdfast.worker.crash_records import unexpected_traceback
from holdfast.workspace.stats import read_all

logger = logging.getLogger(__name__)

FailureOfStart = Coroutine[Any, Any, EngineStartError]
"""Ends with the reason once a start has failed; it does not end otherwise."""
_TOO_LITTLE = re.compile(r"(?:Available memory on node|Free memory on device) .* is less than ")
"""What vLLM says when others hold the memory that it was told to take (0.32, 0.33)."""


async def constructed(
    construct: Callable[[], Any],
    *failures: FailureOfStart,
    directory: Path,
    processes: FindProcesses,
    stopped_seconds: float,
    is_unified_memory: bool,
) -> Any:
    """Run vLLM's constructor in a thread, and return what it makes.

    If the start has failed, the engine's processes are killed, for which the thread waits.

    Raises:
        EngineStartError: the constructor raised, a process was stopped or gone for too long, or
            one of `failures` ended.
        HostFullError: the device shares the host's memory, and too little of it was free.
    """
    started_before = await asyncio.to_thread(forkserver.ended_and_running)
    stuck = _stuck(directory, started_before, processes, stopped_seconds)
    constructing = asyncio.create_task(asyncio.to_thread(construct))
    failing = [asyncio.create_task(failure) for failure in (*failures, stuck)]
    try:
        await asyncio.wait({constructing, *failing}, return_when=asyncio.FIRST_COMPLETED)
        # First, since a constructor whose processes were killed raises without the reason.
        _raise_first(failing)
        with (
            _shortage_named(is_unified_memory=is_unified_memory),
            start_errors(lambda: _logged_cause(directory, started_before)),
        ):
            return constructing.result()
    except BaseException:
        await startup.abandon(constructing, processes)
        raise
    finally:
        for task in failing:
            task.cancel()


@asynccontextmanager
async def explained(remote: RemoteRanks | None, *, is_unified_memory: bool) -> AsyncIterator[None]:
    """Have a start that failed say what happened here and on the other nodes.

    Raises:
        NodeLostError: a start failed because a node was lost, or a process there ended or stopped.
        HostFullError: it failed because the host of a node had too little memory.
    """
    with _shortage_named(is_unified_memory=is_unified_memory):
        async with remote_ranks.start_explained(remote):
            yield


def _raise_first(failing: Sequence[asyncio.Task[EngineStartError]]) -> None:
    for task in failing:
        if task.done():
            raise task.result()


@contextmanager
def _shortage_named(*, is_unified_memory: bool) -> Iterator[None]:
    """Have a start that found too little of the host's memory end with a HostFullError."""
    try:
        yield
    except EngineStartError as error:
        if not (is_unified_memory and _TOO_LITTLE.search(error.cause)):
            raise
        raise HostFullError(error.cause, remedy=error.remedy) from error


async def node_lost(remote: RemoteRanks) -> EngineStartError:
    """Return the error of a start that loses its ranks on another node."""
    return start_error_of(await remote.until_lost())


async def out_of_memory(until_out_of_memory: UntilOutOfMemory, directory: Path) -> EngineStartError:
    """Return the error of a start that takes the last memory of the host."""
    left = await until_out_of_memory(partial(read_all, directory, reads_steps=False))
    return HostFullError(
        f"the host ran out of memory while the engine started: {left}",
        remedy="end other processes that use the memory, or lower --gpu-memory-utilization.",
    )


async def _stuck(
    directory: Path,
    started_before: frozenset[int],
    processes: FindProcesses,
    stopped_seconds: float,
) -> EngineStartError:
    reason = await until_stuck(
        lambda: processes() | forkserver.server(), stopped_seconds, started_before
    )
    return start_error(_logged_cause(directory, started_before) or reason)


def _logged_cause(directory: Path, started_before: frozenset[int]) -> str:
    """Return why a start failed; log where, if that is needed to understand it."""
    if where := unexpected_traceback(directory):
        logger.error("the engine could not start:\n%s", where.rstrip())
    return startup.cause_of_failure(directory, started_before)
