"""The ranks of one generation on other nodes, as the head sees them, and their loss.

One death soon causes others: a rank that loses its peer in a collective raises, on every node. So
the head waits a moment after it sees one, and `root_death` finds the first of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from holdfast.errors import EngineStartError, NodeFullError, NodeLostError
from holdfast.labels import DeathCause
from holdfast.nodes.actions import GenerationLost
from holdfast.races import race
from holdfast.records import Death, RankStats

SETTLE_SECONDS = 1.0
"""Longer than a worker's death, or a closed connection, takes to be told to the head."""
REPORT_POLL_SECONDS = 0.05
_ECHOES: frozenset[DeathCause] = frozenset({"worker_exception", "unknown"})
"""What a rank, or vLLM, says that has only lost its peer."""
_ROOTS: frozenset[DeathCause] = frozenset({"host_memory", "node_lost"})
"""What no other death causes: there is nothing to wait for."""
_FROM_OUTSIDE: frozenset[DeathCause] = frozenset(
    {"node_lost", "worker_exit", "core_exit", "terminated", "stall"}
)
"""What ends a start without an exception: unless it crashed, the next one may succeed."""


Value = TypeVar("Value")


class RemoteRanks:
    """What other nodes say of one generation. It belongs to one event loop."""

    def __init__(self, generation: int, master: tuple[str, int], end: Callable[[], None]) -> None:
        self.generation = generation
        self.master = master
        """The address and port of the head where the ranks of all nodes meet."""
        self.end = end
        """Ends the generation on the other nodes; it may be called again."""
        self._by_node: dict[str, tuple[RankStats, ...]] = {}
        self._lost: asyncio.Future[Death] = asyncio.get_running_loop().create_future()

    def changed(self, node: str, ranks: tuple[RankStats, ...]) -> None:
        """Take the statistics of all ranks of a node."""
        self._by_node[node] = ranks

    def lost(self, report: GenerationLost) -> None:
        """Take the first loss; what follows is its consequence."""
        if not self._lost.done():
            self._lost.set_result(death_of(report))

    def beside(self, local: Iterable[RankStats]) -> tuple[RankStats, ...]:
        """Return the ranks of all nodes, ordered by engine and rank.

        All ranks of an engine run the same steps, so the recent ones of its first rank, which is
        on the head, are those of the remote ones too, as far as these have come.
        """
        here = tuple(local)
        steps = {rank.engine: rank.recent_steps for rank in reversed(here)}
        there = (
            replace(
                rank,
                recent_steps=tuple(
                    step for step in steps.get(rank.engine, ()) if step.index <= rank.steps
                ),
            )
            for ranks in self._by_node.values()
            for rank in ranks
        )
        return tuple(sorted((*here, *there), key=lambda rank: (rank.engine, rank.rank)))

    async def until_lost(self) -> Death:
        """Wait until the generation cannot go on, since another node or a rank there is lost."""
        return await asyncio.shield(self._lost)

    async def death_within(self, deadline_seconds: float) -> Death | None:
        """Return the loss, or None if there is none by the deadline."""
        await asyncio.wait({self._lost}, timeout=deadline_seconds)
        return self._lost.result() if self._lost.done() else None

    async def until_reported(self, is_enough: Callable[[], bool], deadline_seconds: float) -> None:
        """Return once `is_enough` is true of what the nodes have said, or at the deadline."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + deadline_seconds
        while not is_enough() and loop.time() < deadline:  # noqa: ASYNC110 - nothing else tells
            await asyncio.sleep(REPORT_POLL_SECONDS)


def death_of(report: GenerationLost) -> Death:
    """Return the loss of a generation as a death that names the node."""
    if report.death is None:
        return Death("node_lost", f"node {report.node}: {report.reason}")
    return replace(report.death, reason=f"node {report.node}: {report.death.reason}")


async def root_death_of_nodes(local: Coroutine[Any, Any, Death], remote: RemoteRanks) -> Death:
    """Wait for the generation's death on any node, and return the one that caused the others."""
    async with race(local, remote.until_lost()) as (here, there):
        if not (there.done() and there.result().cause in _ROOTS):
            await asyncio.wait({here, there}, timeout=SETTLE_SECONDS)
        return root_death(
            here.result() if here.done() else None, there.result() if there.done() else None
        )


def root_death(here: Death | None, there: Death | None) -> Death:
    """Return which of two deaths, on the head and on another node, caused the other.

    No death of a rank costs a node its connection or its memory, so these come first. Next comes
    what is not an exception, since losing a peer raises one.

    Raises:
        ValueError: there is neither.
    """
    if here is None or there is None:
        if (only := here or there) is None:
            raise ValueError("nothing has died")
        return only
    if there.cause in _ROOTS:
        return there
    return there if here.cause in _ECHOES and there.cause not in _ECHOES else here


@asynccontextmanager
async def start_explained(remote: RemoteRanks | None) -> AsyncIterator[None]:
    """Have a failed start say what happened on the other nodes.

    Raises:
        NodeLostError: a start failed because a node was lost, or a process there ended or stopped.
        NodeFullError: it failed because the host of another node had too little memory.
    """
    try:
        yield
    except EngineStartError as error:
        death = None if remote is None else await remote.death_within(SETTLE_SECONDS)
        if death is None:
            raise
        raise start_error_of(death, error.cause) from error


async def unless_lost(work: Coroutine[Any, Any, Value], remote: RemoteRanks | None) -> Value:
    """Return what this part of a start returns, unless another node is lost meanwhile.

    Raises:
        EngineStartError: a node was lost. `work` may learn that only at a deadline of its own.
    """
    if remote is None:
        return await work
    async with race(work, remote.until_lost()) as (working, loss):
        if not working.done():
            raise start_error_of(loss.result())
        return working.result()


def start_error_of(death: Death, local_cause: str = "") -> EngineStartError:
    """Return the error of a start that a death on another node ended."""
    if death.cause in _FROM_OUTSIDE and not death.blames_requests:
        return NodeLostError(death.reason)
    # Only both together say which rank raised first.
    also = f"; {local_cause}" if local_cause and death.cause in _ECHOES else ""
    error_class = NodeFullError if death.cause == "host_memory" else EngineStartError
    return error_class(
        f"the engine could not start: {death.reason}{also}",
        remedy="see the log of that node.",
    )
