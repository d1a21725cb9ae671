"""Hands each generation of the engine to the followers too, and knows the nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from holdfast.errors import NodeLostError, UsageError
from holdfast.labels import NodeRefusalReason
from holdfast.nodes.actions import (
    GenerationLost,
    GenerationOver,
    HeadAction,
    HeadReport,
    NodeJoined,
    NodeLeft,
    PeerRefused,
    RanksChanged,
)
from holdfast.nodes.addresses import free_port
from holdfast.nodes.head import Head
from holdfast.nodes.listener import NodePort, listening_for_nodes
from holdfast.nodes.remote_ranks import RemoteRanks
from holdfast.records import NodeStatus, RankStats, Status
from holdfast.workspace.plan import WorkspaceSpec

logger = logging.getLogger(__name__)

PORT_DRAWS = 100
"""How often a port is drawn until it is not that of the last generation."""
SLOW_FILES_SECONDS = 2.0
"""A longer look at the model's files is told."""
MAX_KNOWN_NODES = 64
"""Nodes that are gone are forgotten from there on, the oldest first."""


@dataclass(frozen=True, slots=True)
class EngineOverNodes:
    """What is the same in every generation of the engine on several nodes."""

    nodes: int
    """The number of nodes, including this one."""
    master_address: str
    """An address of this machine that the others reach."""
    arguments: tuple[str, ...]
    """The flags for the ranks on other nodes; see `handed_flags`."""
    fingerprint: str
    revision: str = ""
    """The commit of a model from the Hub, which all nodes load; empty if it has none."""


class NodeGenerations:
    """Runs generations on the followers of a `Head`. It belongs to one event loop."""

    def __init__(
        self,
        head: Head,
        engine: EngineOverNodes,
        *,
        on_refused: Callable[[NodeRefusalReason], None],
        find_digest: Callable[[], str],
    ) -> None:
        """`find_digest` reads the model's files, in a thread; see `facts.model_digest`."""
        self._head = head
        self._engine = engine
        self._on_refused = on_refused
        self._find_digest = find_digest
        # The end of the loop would wait for its own threads, even on a file system that hangs.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="model files")
        self._may_have_new_files = False
        self._remote: RemoteRanks | None = None
        self._known: dict[str, NodeStatus] = {}
        self._elsewhere: frozenset[tuple[int, int]] = frozenset()
        """(engine, rank) of those that no generation runs here, since this node is the first."""
        self._last_port = 0
        self._moved = asyncio.Event()
        self.do: Callable[[Iterable[HeadAction]], None] = _nobody_listens
        """Carries out what the head wants; set by `node_generations`."""

    @property
    def nodes(self) -> int:
        """How many nodes the engine needs, this one too."""
        return self._engine.nodes

    def statuses(self, here: Iterable[RankStats]) -> tuple[NodeStatus, ...]:
        """Return all nodes, this one first; `here` are the ranks of all nodes.

        Any thread may ask.
        """
        elsewhere = self._elsewhere
        others = tuple(self._known.values())
        places = ((rank.engine, rank.rank) for rank in here)
        local = tuple(place for place in places if place not in elsewhere)
        return (NodeStatus(self._head.name, is_joined=True, ranks=local), *others)

    def added_to(self, status: Status) -> Status:
        """Return the status with all nodes. Any thread may ask."""
        return replace(status, nodes=self.statuses(status.ranks), nodes_wanted=self.nodes)

    def report(self, report: HeadReport) -> None:
        """Take what the head reports; called on the event loop."""
        match report:
            case RanksChanged(generation, node, ranks, is_compiling):
                if self._remote is not None and self._remote.generation == generation:
                    places = tuple((rank.engine, rank.rank) for rank in ranks)
                    # First, since another thread may ask as soon as the ranks are known.
                    self._elsewhere |= frozenset(places)
                    self._remote.changed(node, ranks, is_compiling=is_compiling)
                    self._know(node, places=places)
            case GenerationLost(generation):
                if self._remote is not None and self._remote.generation == generation:
                    self._remote.lost(report)
            case NodeJoined(node):
                logger.info("node %s has joined", node)
                self._know(node, is_joined=True)
            case NodeLeft(node, reason):
                logger.warning("node %s has left: %s", node, reason)
                self._know(node, is_joined=False, problem=reason)
            case PeerRefused(reason):
                self._on_refused(reason)
                self._may_have_new_files |= reason == "different"
            case GenerationOver():
                pass
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def until_complete(self, on_wait: Callable[[str], None]) -> None:
        """Return once enough followers are free; `on_wait` gets each new reason for the wait.

        It may take forever: another machine has to be switched on. Slow files are a reason once.
        After a wait, `on_wait` also gets the reason for what follows.
        """
        self._may_have_new_files = True
        told, is_slow_told = "", False

        def tell(reason: str) -> None:
            nonlocal told
            if reason != told:  # whatever connects to the port moves it, and would fill the log
                told = reason
                on_wait(reason)

        def tell_of_slow_files() -> None:
            nonlocal is_slow_told
            if not is_slow_told:  # each node with other files has the head look again
                is_slow_told = True
                tell("reading the sizes of the model's files")

        while True:
            if self._may_have_new_files:
                self._may_have_new_files = False
                await self._read_model(tell_of_slow_files)
            if self._head.is_complete:
                if told:  # it would stay the reason of the state until the engine has started
                    tell("starting the engine on all nodes")
                return
            tell(self._missing())
            await self._moved.wait()

    async def _read_model(self, on_slow: Callable[[], None]) -> None:
        """Have followers compare the model's files with those that are here now."""
        digest = asyncio.get_running_loop().run_in_executor(self._reader, self._find_digest)
        try:
            if not (await asyncio.wait({digest}, timeout=SLOW_FILES_SECONDS))[0]:
                on_slow()
            # Files that cannot be read now, perhaps since they are copied, may end the start.
            with suppress(UsageError):
                self._head.model_read(await digest)
        finally:
            digest.cancel()

    @asynccontextmanager
    async def generation(self, spec: WorkspaceSpec) -> AsyncIterator[RemoteRanks]:
        """Run a generation on the other nodes while entered; they end it at the exit.

        Raises:
            NodeLostError: not enough followers are free any more, or the address of this node has
                no free port, perhaps since the cable is out.
        """
        if not self._head.is_complete:
            raise NodeLostError(self._missing())
        engine = self._engine
        port = self._new_port()
        remote = RemoteRanks(
            spec.generation,
            (engine.master_address, port),
            self._end,
            others=engine.nodes - 1,
            revision=engine.revision,
        )
        self._remote = remote
        self._known = {name: replace(node, ranks=()) for name, node in self._known.items()}
        self.do(
            self._head.start(
                generation=spec.generation,
                master_address=engine.master_address,
                master_port=port,
                arguments=engine.arguments,
                fingerprint=engine.fingerprint,
                spec=spec,
            )
        )
        try:
            yield remote
        finally:
            self._remote = None
            self._end()

    def _new_port(self) -> int:
        address = self._engine.master_address
        try:
            drawn = (free_port(address) for _ in range(PORT_DRAWS))
            port = next((port for port in drawn if port != self._last_port), 0)
        except OSError as error:
            raise NodeLostError(f"cannot use {address}: {error.strerror or error}") from error
        if not port:
            raise NodeLostError(f"cannot use {address}: it has no other free port")
        self._last_port = port
        return port

    def _end(self) -> None:
        self.do(self._head.end("the engine has ended on the head"))

    def _missing(self) -> str:
        others = self._engine.nodes - 1
        joined = len(self._head.followers)
        if joined < others:
            return f"waiting for other nodes: {joined} of {others} joined"
        return "waiting for other nodes to end the last engine"

    def _know(
        self,
        name: str,
        *,
        is_joined: bool = True,
        places: tuple[tuple[int, int], ...] = (),
        problem: str = "",
    ) -> None:
        known = self._known.pop(name, NodeStatus(name, is_joined))
        self._known[name] = replace(
            known,
            is_joined=is_joined,
            ranks=places or (known.ranks if is_joined else ()),
            problem=problem,
        )
        gone = [node.name for node in self._known.values() if not node.is_joined]
        for forgotten in gone[: max(0, len(self._known) - MAX_KNOWN_NODES)]:
            del self._known[forgotten]


@asynccontextmanager
async def node_generations(
    head: Head,
    engine: EngineOverNodes,
    port: NodePort,
    *,
    on_refused: Callable[[NodeRefusalReason], None],
    find_digest: Callable[[], str],
) -> AsyncIterator[NodeGenerations]:
    """Let followers join at the port while entered, for the engine's generations."""
    generations = NodeGenerations(head, engine, on_refused=on_refused, find_digest=find_digest)
    async with listening_for_nodes(
        head, port.sock, on_report=generations.report, context=port.context
    ) as listener:
        generations.do = listener.do
        yield generations


def _nobody_listens(actions: Iterable[HeadAction]) -> None:
    if tuple(actions):
        raise RuntimeError("the node port is not open")
