"""The ranks of one generation on other nodes, as the head sees them, and their loss.

One death soon causes others: a rank that loses its peer in a collective raises, on every node. So
the head waits a moment after it sees one, and `root_death` finds the first of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

from holdfast.errors import EngineStartError, HostFullError, NodeFullError, NodeLostError
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


RemoteResult = TypeVar("RemoteResult")


class RemoteRanks:
    """What other nodes say of one generation. It belongs to one event loop."""

    def __init__(
        self,
        generation: int,
        master: tuple[str, int],
        end: Callable[[], None],
        *,
        others: int = 1,
        revision: str = "",
    ) -> None:
        """`others` is the number of nodes beside the head."""
        self.generation = generation
        self.master = master
        """The address and port of the head where the ranks of all nodes meet."""
        self.end = end
        """Ends the generation on the other nodes; it may be called again."""
        self.revision = revision
        """The commit of a model from the Hub, which all nodes load; empty if it has none."""
        self._others = others
        self._by_node: dict[str, tuple[RankStats, ...]] = {}
        self._compiling: set[str] = set()
        """The nodes on which a rank waits for a compiler."""
        loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[Death] = loop.create_future()
        """The first loss."""
        self._losses: dict[str, Death] = {}
        """The death that each node reported, by node."""
        self._explained: asyncio.Future[None] = loop.create_future()
        """Done once no further loss would say more of what came first."""

    @property
    def is_compiling(self) -> bool:
        """Whether a rank on another node waits for a compiler."""
        return bool(self._compiling)

    def changed(
        self, node: str, ranks: tuple[RankStats, ...], *, is_compiling: bool = False
    ) -> None:
        """Take the statistics of all ranks of a node, and whether one waits for a compiler."""
        self._by_node[node] = ranks
        (self._compiling.add if is_compiling else self._compiling.discard)(node)

    def lost(self, report: GenerationLost) -> None:
        """Take a loss. The first one ends the generation, but may follow from one told later."""
        death = self._losses.setdefault(report.node, death_of(report))
        if not self._lost.done():
            self._lost.set_result(death)
        is_last = len(self._losses) >= self._others
        if not self._explained.done() and (is_last or death.cause not in _ECHOES):
            self._explained.set_result(None)

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

    async def root_within(
        self, deadline_seconds: float, *beside: asyncio.Future[Death]
    ) -> Death | None:
        """Return the loss that caused the others, or None if there is none by the deadline.

        It waits for the deaths `beside` too, unless nothing could have caused the loss.
        """
        if not any(death.cause in _ROOTS for death in self._losses.values()):
            waited: set[asyncio.Future[Any]] = {self._explained, *beside}
            await asyncio.wait(waited, timeout=deadline_seconds)
        return reduce(root_death, self._losses.values()) if self._losses else None

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
    async with race(local, remote.until_lost()) as (here, _):
        there = await remote.root_within(SETTLE_SECONDS, here)
        return root_death(here.result() if here.done() else None, there)


def root_death(first: Death | None, second: Death | None) -> Death:
    """Return which of two deaths, on two nodes, caused the other.

    No death of a rank costs a node its connection or its memory, so these come first. Next comes
    what is not an exception, since losing a peer raises one.

    Raises:
        ValueError: there is neither.
    """
    if first is None or second is None:
        if (only := first or second) is None:
            raise ValueError("nothing has died")
        return only
    if first.cause not in _ROOTS and second.cause in _ROOTS:
        return second
    return second if first.cause in _ECHOES and second.cause not in _ECHOES else first


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
        death = None if remote is None else await remote.root_within(SETTLE_SECONDS)
        is_caused_here = isinstance(error, HostFullError)
        if death is None or (is_caused_here and death.cause not in _ROOTS):
            raise
        raise start_error_of(death, error.cause) from error


async def unless_lost(
    work: Coroutine[Any, Any, RemoteResult], remote: RemoteRanks | None
) -> RemoteResult:
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
