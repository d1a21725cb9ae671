"""What the head does with its followers, decided without socket, clock or process.

Events go in, and each returns the actions that it causes, in their order. Times are seconds of any
clock that does not jump back. A generation ends on all nodes as soon as one of them is lost, and
the next one starts only when enough followers are joined and free.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

from holdfast.labels import NodeRefusalReason
from holdfast.nodes.actions import (
    Drop,
    GenerationLost,
    GenerationOver,
    HeadAction,
    NodeJoined,
    NodeLeft,
    PeerRefused,
    RanksChanged,
    SendTo,
)
from holdfast.nodes.channel import Channel
from holdfast.nodes.facts import difference
from holdfast.nodes.messages import (
    MAX_REASON_CHARACTERS,
    End,
    Ended,
    Goodbye,
    Join,
    Lost,
    NodeFacts,
    NodeMessage,
    RankUpdate,
    Refused,
    Start,
    Terms,
    Welcome,
)
from holdfast.nodes.ranks import on_clock
from holdfast.records import Death
from holdfast.workspace.plan import WorkspaceSpec

MAX_STRANGERS = 64
"""Connections that have not proven the key; one more ends the oldest of the address that has the
most of them."""
JOIN_SECONDS = 60.0
"""The time for a follower to read the configuration of the model, perhaps from a slow disk."""
END_SECONDS = 45.0
"""The time for a follower to end its processes: more than all deadlines of `processes.tree`."""

_NAME_REMEDY = "give one of them another --node-name."


@dataclass(slots=True)
class _Peer:
    channel: Channel
    address: str
    connected_seconds: float
    has_terms: bool = False
    name: str = ""
    """Empty until it has joined."""
    instance: str = ""


@dataclass(slots=True)
class _Generation:
    number: int
    running: set[int] = field(default_factory=set)
    """The peers that may have processes of it."""
    is_ending: bool = False
    losers: set[int] = field(default_factory=set)
    """The peers that were lost, or told of a death. If there is one, it ends because of that."""
    ending_since_seconds: float = math.inf
    """The first tick at which it was ending."""


class Head:
    """Admits followers, and hands out one generation at a time."""

    def __init__(self, *, key: bytes, name: str, model: str, facts: NodeFacts, nodes: int) -> None:
        """`name` is that of this node, and `nodes` counts it too."""
        self._key = key
        self.name = name
        self._terms = Terms(model, facts)
        self._nodes = nodes
        self._peers: dict[int, _Peer] = {}
        self._generation: _Generation | None = None
        self._last_number = 0
        self._last_port = 0
        self._actions: list[HeadAction] = []

    @property
    def followers(self) -> tuple[str, ...]:
        """The names of the followers that have joined."""
        return tuple(peer.name for peer in self._peers.values() if peer.name)

    @property
    def is_complete(self) -> bool:
        """Whether enough followers are free for a generation, and nothing is left of the last."""
        return self._generation is None and len(self._joined()) >= self._nodes - 1

    @property
    def generation(self) -> int | None:
        """The number of the generation that runs; None if it is ending, or there is none."""
        running = self._generation
        return None if running is None or running.is_ending else running.number

    def connected(
        self, peer: int, address: str, nonce: bytes, now_seconds: float
    ) -> list[HeadAction]:
        """Handle a new connection; `peer` is its number, and `nonce` must be random and new."""
        strangers = [known for known in self._peers.values() if not known.channel.is_open]
        if len(strangers) >= MAX_STRANGERS:
            counts = Counter(stranger.address for stranger in strangers)
            most = max(counts, key=counts.__getitem__)
            oldest = next(stranger for stranger in strangers if stranger.address == most)
            oldest.channel.refuse("too_many_peers", "too many connections have not proven the key")
        channel = Channel("head", self._key, nonce, now_seconds)
        self._peers[peer] = _Peer(channel, address, now_seconds)
        return self._flushed()

    def received(self, peer: int, data: bytes, now_seconds: float) -> list[HeadAction]:
        """Handle what was read from a connection."""
        if (known := self._peers.get(peer)) is not None:
            messages = known.channel.received(data, now_seconds)
            self._offer_terms(known)
            for message in messages:
                if peer in self._peers and known.channel.failure is None:
                    self._take(peer, known, message, now_seconds)
        return self._flushed()

    def disconnected(self, peer: int) -> list[HeadAction]:
        """Handle the end of a connection."""
        if peer in self._peers:
            self._lose(peer, "it closed the connection")
        return self._flushed()

    def tick(self, now_seconds: float) -> list[HeadAction]:
        """Handle that time has passed. Call it several times a second."""
        for peer in self._peers.values():
            peer.channel.tick(now_seconds)
            if not peer.name and now_seconds - peer.connected_seconds > JOIN_SECONDS:
                peer.channel.refuse("too_slow", f"it did not join within {JOIN_SECONDS:g} s")
        self._check_end(now_seconds)
        return self._flushed()

    def model_read(self, digest: str) -> None:
        """Have followers compare the model's files with these: they may have been replaced."""
        facts = replace(self._terms.facts, model_digest=digest)
        self._terms = replace(self._terms, facts=facts)

    def start(  # noqa: PLR0913 - what a generation is made of
        self,
        *,
        generation: int,
        master_address: str,
        master_port: int,
        arguments: tuple[str, ...],
        fingerprint: str,
        spec: WorkspaceSpec,
    ) -> list[HeadAction]:
        """Hand out a generation: followers get their ranks in the order in which they connected.

        Raises:
            ValueError: the head is not complete, or the number or the port is not a new one.
        """
        if not self.is_complete:
            raise ValueError("not enough followers are free")
        if generation <= self._last_number or master_port == self._last_port:
            raise ValueError("a generation needs a number and a port of its own")
        self._last_number, self._last_port = generation, master_port
        members = self._joined()[: self._nodes - 1]
        self._generation = _Generation(generation, set(members))
        for node_rank, peer in enumerate(members, start=1):
            self._peers[peer].channel.send(
                Start(
                    generation=generation,
                    node_rank=node_rank,
                    nodes=self._nodes,
                    master_address=master_address,
                    master_port=master_port,
                    arguments=arguments,
                    model=self._terms.model,
                    model_digest=self._terms.facts.model_digest,
                    fingerprint=fingerprint,
                    spec=spec,
                )
            )
        return self._flushed()

    def end(self, reason: str) -> list[HeadAction]:
        """End the generation on all nodes; `GenerationOver` follows."""
        self._end(reason)
        return self._flushed()

    def leave(self, reason: str) -> list[HeadAction]:
        """Tell the followers that this server leaves, and drop every connection."""
        for peer in list(self._peers):
            self._peers[peer].channel.send(Goodbye(reason))
            self._flush(peer)
            self._lose(peer, reason, is_news=False)
        return self._flushed()

    def _take(self, peer: int, known: _Peer, message: NodeMessage, now_seconds: float) -> None:
        match message:
            case Join() if not known.name:
                self._admit(known, message)
            case Lost(generation, death) if known.name:
                self._end_because_of(peer, generation, str(death), death)
            case Ended(generation) if known.name:
                self._end_because_of(peer, generation, "its processes ended", is_news=False)
                self._confirm_end(peer, generation)
            case RankUpdate(generation, sent_seconds, ranks, is_compiling) if known.name:
                if generation == self.generation:
                    moved = on_clock(ranks, now_seconds - sent_seconds)
                    self._actions.append(RanksChanged(generation, known.name, moved, is_compiling))
            case Goodbye(reason):
                self._lose(peer, f"it leaves: {reason}")
            case _:
                known.channel.refuse("malformed", "a message of a follower arrived out of order")

    def _offer_terms(self, peer: _Peer) -> None:
        if peer.channel.is_open and not peer.has_terms:
            peer.has_terms = True
            peer.channel.send(self._terms)

    def _admit(self, peer: _Peer, join: Join) -> None:
        """Let a follower join, or refuse it with one line."""
        if line := difference(self._terms.facts, join.facts, join.name):
            self._refuse(peer, "different", line, is_final=True)
            return
        if join.name == self.name:
            line = f"the head is called {join.name} too. Remedy: {_NAME_REMEDY}"
            self._refuse(peer, "name_taken", line, is_final=True)
            return
        for number, other in list(self._peers.items()):
            if other.name == join.name and other.instance == join.instance:
                self._lose(number, "it connected again")
        if join.name in self.followers:
            line = f"another follower is called {join.name}"
            self._refuse(peer, "name_taken", line, is_final=False)
        elif len(self.followers) >= self._nodes - 1:
            line = f"the head has all of its {self._nodes - 1} followers"
            self._refuse(peer, "not_needed", line, is_final=False)
        else:
            peer.name, peer.instance = join.name, join.instance
            peer.channel.send(Welcome())
            self._actions.append(NodeJoined(join.name))

    def _refuse(self, peer: _Peer, reason: NodeRefusalReason, line: str, *, is_final: bool) -> None:
        peer.channel.send(Refused(reason, line, is_final))
        peer.channel.refuse(reason, line)

    def _end_because_of(
        self,
        peer: int,
        number: int,
        reason: str,
        death: Death | None = None,
        *,
        is_news: bool = True,
    ) -> None:
        """End the generation, unless it is ending anyway or the peer does not take part in it.

        What ended it may follow from another death or lost node, which is news, however late.
        """
        running = self._generation
        if running is None or running.number != number or peer not in running.running:
            return
        if not running.is_ending or (running.losers and is_news):
            node = self._peers[peer].name
            self._actions.append(GenerationLost(number, node, reason, death))
            running.losers.add(peer)
            self._end(f"node {node}: {reason}")

    def _end(self, reason: str) -> None:
        running = self._generation
        if running is not None and not running.is_ending:
            running.is_ending = True
            for peer in running.running:
                # A message is bounded, and the reason of a follower may be as long as one.
                self._peers[peer].channel.send(End(running.number, reason[:MAX_REASON_CHARACTERS]))

    def _check_end(self, now_seconds: float) -> None:
        """Lose the followers that do not end their processes, so that spares can join."""
        running = self._generation
        if running is None or not running.is_ending:
            return
        running.ending_since_seconds = min(running.ending_since_seconds, now_seconds)
        if now_seconds - running.ending_since_seconds > END_SECONDS:
            for peer in tuple(running.running):
                line = f"it did not end its processes within {END_SECONDS:g} s"
                self._lose(peer, line, is_news=False)

    def _confirm_end(self, peer: int, number: int) -> None:
        running = self._generation
        if running is not None and running.number == number:
            running.running.discard(peer)
            if not running.running:
                self._generation = None
                self._actions.append(GenerationOver(number))

    def _lose(self, peer: int, reason: str, *, is_news: bool = True) -> None:
        """Forget a connection, and end the generation in which it takes part."""
        if self._generation is not None:
            number, is_first = self._generation.number, peer not in self._generation.losers
            self._end_because_of(peer, number, reason, is_news=is_news and is_first)
            self._confirm_end(peer, number)
        lost = self._peers.pop(peer)
        self._actions.append(Drop(peer))
        if lost.name:
            self._actions.append(NodeLeft(lost.name, reason))

    def _joined(self) -> list[int]:
        return [number for number, peer in self._peers.items() if peer.name]

    def _flush(self, peer: int) -> None:
        if data := self._peers[peer].channel.outgoing():
            self._actions.append(SendTo(peer, data))

    def _flushed(self) -> list[HeadAction]:
        failed = [number for number, peer in self._peers.items() if peer.channel.failure]
        for number in failed:
            failure = self._peers[number].channel.failure
            self._flush(number)
            if failure is not None:
                if failure.reason != "silent":
                    self._actions.append(PeerRefused(failure.reason, failure.line))
                self._lose(number, failure.line)
        for number in self._peers:
            self._flush(number)
        actions, self._actions = self._actions, []
        return actions
