"""A head and its followers over a network that a test rules, with a clock that it sets."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field, replace

from holdfast.nodes import actions
from holdfast.nodes.follower import Follower
from holdfast.nodes.head import Head
from holdfast.nodes.messages import NodeFacts
from holdfast.workspace.plan import WorkspaceSpec

KEY = b"0123456789abcdef0123456789abcdef"
FACTS = NodeFacts(
    holdfast_version="0.1.0",
    holdfast_digest="11",
    vllm_version="0.32.0",
    torch_version="2.13.0",
    driver_version="",
    nccl_version="",
    plugins="all",
    model_digest="00",
)
SPEC = WorkspaceSpec(
    stats_directory="",
    generation=1,
    floor_bytes=0,
    headroom=0.1,
    growth="alongside",
    growth_limit_bytes=None,
    learned=((0, 0, 4096),),
)
_numbers = itertools.count(1)


def a_nonce() -> bytes:
    """Another one each time."""
    return next(_numbers).to_bytes(32, "big")


@dataclass
class Wire:
    """One connection: what is under way in each direction, and which ends know of its end."""

    to_head: deque[bytes] = field(default_factory=deque)
    to_follower: deque[bytes] = field(default_factory=deque)
    is_closed_by_head: bool = False
    is_closed_by_follower: bool = False


@dataclass
class Node:
    """A follower, with an engine that does as it is told, at once or when the test lets it."""

    machine: Follower
    facts: NodeFacts = FACTS
    finds_facts: bool = True
    address: str = "10.0.0.2"
    wire: int | None = None
    started: list[tuple[int, int, int]] = field(default_factory=list)
    """(generation, rank, port) of every engine that was started."""
    given_up: str = ""
    is_stop_asked: bool = False

    @property
    def name(self) -> str:
        return self.machine._name


class Network:
    """Carries bytes when it is told to."""

    def __init__(self, nodes: int = 2, head: Head | None = None) -> None:
        self.now = 1000.0
        self.head = head or Head(key=KEY, name="head", model="m", facts=FACTS, nodes=nodes)
        self.nodes: list[Node] = []
        self.wires: dict[int, Wire] = {}
        self.seen: list[actions.HeadAction] = []
        """What the head reported, without what it wrote."""
        self._next_wire = 0

    def add(self, name: str, *, key: bytes = KEY, facts: NodeFacts = FACTS) -> Node:
        """A follower that has not connected yet."""
        machine = Follower(key=key, name=name, instance=a_nonce().hex())
        node = Node(machine, facts)
        self.nodes.append(node)
        return node

    def connect(self, node: Node) -> None:
        """Connect it to the head."""
        self._next_wire += 1
        node.wire = number = self._next_wire
        self.wires[number] = Wire()
        self.head_does(self.head.connected(number, node.address, a_nonce(), self.now))
        self.node_does(node, node.machine.connected(a_nonce(), self.now))

    def deliver(self, number: int, *, to_head: bool) -> None:
        """Deliver one write of a connection."""
        wire = self.wires[number]
        queue = wire.to_head if to_head else wire.to_follower
        if not queue:
            return
        data = queue.popleft()
        if to_head and not wire.is_closed_by_head:
            self.head_does(self.head.received(number, data, self.now))
        node = self.node_of(number)
        if not to_head and node is not None:
            self.node_does(node, node.machine.received(data, self.now))

    def settle(self) -> None:
        """Deliver everything, and let each end see that the other closed."""
        while any(wire.to_head or wire.to_follower for wire in self.wires.values()):
            for number in list(self.wires):
                self.deliver(number, to_head=True)
                self.deliver(number, to_head=False)
        for number, wire in list(self.wires.items()):
            if wire.is_closed_by_head or wire.is_closed_by_follower:
                self.close(number)

    def close(self, number: int) -> None:
        """Let both ends see that the connection is closed; what was under way is lost."""
        self.see_end(number, at_head=True)
        self.see_end(number, at_head=False)
        self.wires.pop(number, None)

    def see_end(self, number: int, *, at_head: bool) -> None:
        """Let one end see that the connection is closed."""
        if number not in self.wires:
            return
        if at_head and not self.wires[number].is_closed_by_head:
            self.wires[number].is_closed_by_head = True
            self.head_does(self.head.disconnected(number))
        if not at_head and (node := self.node_of(number)) is not None:
            node.wire = None
            self.node_does(node, node.machine.disconnected(self.now))

    def node_of(self, number: int) -> Node | None:
        """The follower that still holds this connection."""
        return next((node for node in self.nodes if node.wire == number), None)

    def tick_head(self) -> None:
        self.head_does(self.head.tick(self.now))

    def tick_node(self, node: Node) -> None:
        self.node_does(node, node.machine.tick(self.now))

    def pass_time(self, seconds: float) -> None:
        """Let time pass in small steps, with a network that works."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            self.tick_head()
            for node in self.nodes:
                self.tick_node(node)
            self.settle()

    def join(self, *nodes: Node) -> None:
        """Connect these, and let them join."""
        for node in nodes:
            self.connect(node)
            self.settle()

    def start(self, generation: int, port: int = 0) -> None:
        """Hand out a generation, with a port of its own."""
        self.head_does(
            self.head.start(
                generation=generation,
                master_address="10.0.0.1",
                master_port=port or 20000 + generation,
                arguments=("--tensor-parallel-size", "2"),
                fingerprint="f",
                spec=replace(SPEC, generation=generation),
            )
        )

    def stop_engine(self, node: Node) -> None:
        """Let the processes of its engine be gone."""
        order = node.machine.engine
        if order is not None:
            node.is_stop_asked = False
            self.node_does(node, node.machine.engine_ended(order.generation, self.now))

    def head_does(self, todo: list[actions.HeadAction]) -> None:
        """Carry out what the head asks for."""
        for action in todo:
            match action:
                case actions.SendTo(peer, data):
                    if not self.wires[peer].is_closed_by_head:
                        self.wires[peer].to_follower.append(data)
                case actions.Drop(peer):
                    if peer in self.wires:
                        self.wires[peer].is_closed_by_head = True
                case other:
                    self.seen.append(other)

    def node_does(self, node: Node, todo: list[actions.FollowerAction]) -> None:
        """Carry out what a follower asks for."""
        wire = self.wires.get(node.wire) if node.wire is not None else None
        for action in todo:
            match action:
                case actions.Send(data):
                    if wire is not None:
                        wire.to_head.append(data)
                case actions.Disconnect():
                    node.wire = None
                    if wire is not None:
                        wire.is_closed_by_follower = True
                case actions.FindFacts() if node.finds_facts:
                    self.node_does(node, node.machine.facts_found(node.facts, self.now))
                case actions.StartEngine(order):
                    node.started.append((order.generation, order.node_rank, order.master_port))
                case actions.StopEngine():
                    node.is_stop_asked = True
                case actions.GiveUp(line):
                    node.given_up = line
