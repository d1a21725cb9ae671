"""A server whose engine runs on two nodes: a head and a follower on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from network_namespaces import ADDRESSES, Cable
from servers import (
    KV_CACHE_BYTES,
    READY_DEADLINE_SECONDS,
    Server,
    descendants,
    forkable,
    reserved_port,
    running,
    title_of,
)

KEY = "0123456789abcdef" * 4
ENGINE_FLAGS = (
    "--enforce-eager",
    f"--kv-cache-memory-bytes={KV_CACHE_BYTES}",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=1024",
    "--dtype=float32",
    "--tensor-parallel-size=2",
    "--probe=quick",
)
"""For one node or two."""
LOOPBACK = "127.0.0.1"
HOLDFAST = (sys.executable, "-m", "holdfast")
NODE_METRICS = frozenset(
    {
        "holdfast_node_connections_refused_total",
        "holdfast_node_head_connected",
        "holdfast_node_joined",
        "holdfast_nodes_wanted",
        "holdfast_rank_info",
    }
)
"""What only a head or a follower says."""


def processes_of(server: Server) -> dict[str, psutil.Process]:
    """The engine's processes of a node, by a word of their titles."""
    found = {}
    for process in descendants(server.process.pid):
        title = title_of(process)
        for word in ("EngineCore", "Worker", "node_ranks"):
            if word in title:
                found[word] = process
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node runs: what goes before its command, and what it has in its environment."""

    before: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Places:
    """Where both nodes run, by default on this machine, and how the follower reaches the head."""

    head: Place = field(default_factory=Place)
    follower: Place = field(default_factory=Place)
    address: str = LOOPBACK


def places_apart(link: Cable) -> Places:
    """Return where nodes share neither a network nor memory, as on two machines."""
    head, follower = (Place(link.inside(side, shares_memory=False)) for side in range(2))
    return Places(head, follower, address=ADDRESSES[0])


@dataclass
class TwoNodes:
    """A head and a follower, each of which can be started again."""

    directory: Path
    node_port: int
    key_file: Path
    flags: Sequence[str]
    places: Places
    http_port: int = 0
    model: str = "--demo"
    _head: ExitStack = field(default_factory=ExitStack)
    _follower: ExitStack = field(default_factory=ExitStack)

    def start_head(self) -> None:
        """Start a head, in place of one that may still run."""
        self._head.close()
        arguments = (
            self.model,
            *ENGINE_FLAGS,
            "--nnodes=2",
            *self.flags,
            f"--master-addr={self.places.address}",
            f"--node-port={self.node_port}",
            f"--node-key-file={self.key_file}",
        )
        self.head = self._head.enter_context(
            running(
                self.directory / "head",
                *arguments,
                command=(*self.places.head.before, *HOLDFAST, "serve"),
                environment={**forkable(), **self.places.head.environment},
                port=self.http_port,
            )
        )

    def start_follower(self) -> None:
        """Start a follower, in place of one that may still run."""
        self._follower.close()
        place = self.places.follower
        head = f"{self.places.address}:{self.node_port}"
        self.follower = self._follower.enter_context(
            running(
                self.directory / "other",
                f"--node-key-file={self.key_file}",
                "--node-name=other",
                command=(*place.before, *HOLDFAST, "follow", head),
                environment={**forkable(), **place.environment},
            )
        )

    def until_ready(self, *, deadline_seconds: float = READY_DEADLINE_SECONDS) -> None:
        """Wait until the head serves with both nodes."""
        self.head.until_ready(deadline_seconds=deadline_seconds)
        self.head.until(
            lambda: self.head.metric("node_joined", node="other") == 1, "the other node"
        )

    def close(self) -> None:
        """Stop both."""
        with self._follower, self._head:
            pass


@contextmanager
def two_nodes(
    directory: Path,
    *flags: str,
    http_port: int = 0,
    places: Places | None = None,
    model: str = "--demo",
) -> Iterator[TwoNodes]:
    """A head and its follower; no process of either is left at the end."""
    key_file = directory / "node.key"
    directory.mkdir(parents=True, exist_ok=True)
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    with reserved_port() as port:
        nodes = TwoNodes(directory, port, key_file, flags, places or Places(), http_port, model)
        try:
            nodes.start_head()
            nodes.start_follower()
            yield nodes
        finally:
            nodes.close()
