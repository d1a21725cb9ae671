"""Head and followers under random losses, delays, ends and stops, with an attacker between them."""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.nodes.actions import GenerationLost, GenerationOver
from holdfast.nodes.channel import SILENCE_SECONDS
from holdfast.nodes.frames import framed
from holdfast.nodes.head import END_SECONDS, Head
from holdfast.nodes.messages import NodeHeartbeat, encoded
from holdfast.records import Death
from node_pairs import FACTS, KEY, Network, Node, a_nonce

TICK_SECONDS = 0.25
BOUND_SECONDS = SILENCE_SECONDS + 2 * TICK_SECONDS
END_BOUND_SECONDS = END_SECONDS + SILENCE_SECONDS + 2 * TICK_SECONDS
"""The head may be late when the time is over."""
NAMES = ("a", "b", "c")
STALLED = 1_000_000
OTHER_KEY = b"another-key-another-key-another-key"


class Cluster(RuleBasedStateMachine):
    """Two followers are needed, and there are three, and one with another key."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network(nodes=3)
        self.members = [self.network.add(name) for name in NAMES]
        self.stranger = self.network.add("d", key=OTHER_KEY)
        self.generation = 0
        self.frozen: dict[int, float] = {}
        """Since when followers are stopped, by index, as by SIGSTOP."""
        self.wedged: set[int] = set()
        """At most one follower, by index, whose processes cannot be ended."""
        self.busy_seconds: dict[str, float] = {}
        """How long each side was busy since everybody found together."""
        self.late: dict[tuple[int, bool], int] = {}
        """How many writes are always under way, by connection and by whether they go to the head;
        at `STALLED` nothing comes through any more."""
        self.recorded: list[bytes] = []
        self.ended_at_head: dict[tuple[int, int], float] = {}
        """When this head began to end a generation."""
        self.not_running_since: dict[str, float] = {}
        """Since when a follower does not run what the head believes that it runs."""
        self.life = 0
        """Counts the heads: each begins with generations of its own."""
        self.origins: dict[int, tuple[int, int]] = {}
        """The head and the generation of each port."""

    @property
    def now(self) -> float:
        return self.network.now

    def is_frozen(self, node: Node) -> bool:
        return node in self.members and self.members.index(node) in self.frozen

    @initialize()
    def begin(self) -> None:
        """What comes first is a generation that runs."""
        self.recover()

    @rule()
    def recover(self) -> None:
        """The network works until everybody who is needed is in one generation."""
        self.frozen.clear()
        for number in {number for number, _ in self.late}:
            self.network.close(number)
        self.late.clear()
        for _ in range(400):
            self.pass_good_time(1)
            for node in [*self.members, self.stranger]:
                if node.is_stop_asked and not self.is_wedged(node):
                    self.network.stop_engine(node)
                if node.machine.wants_connection(self.now):
                    self.network.connect(node)
            if self.network.head.is_complete:
                self.start()
            if self.ranks_running() == {1, 2}:
                self.busy_seconds.clear()
                return
        raise AssertionError("the followers do not find together")

    def is_wedged(self, node: Node) -> bool:
        return node in self.members and self.members.index(node) in self.wedged

    def ranks_running(self) -> set[int]:
        """The ranks that run in the generation of the head."""
        orders = [node.machine.engine for node in self.members if node.machine.state == "running"]
        current = (self.life, self.network.head.generation)
        return {
            order.node_rank
            for order in orders
            if order is not None and self.origins[order.master_port] == current
        }

    @rule(index=st.integers(0, 3))
    def connect(self, index: int) -> None:
        """A follower connects when it wants to."""
        node = [*self.members, self.stranger][index]
        if not self.is_frozen(node) and node.machine.wants_connection(self.now):
            self.network.connect(node)

    @precondition(lambda self: self.network.wires)
    @rule(data=st.data(), to_head=st.booleans())
    def deliver(self, data: st.DataObject, *, to_head: bool) -> None:
        """One write arrives, whole or in two parts."""
        number = data.draw(st.sampled_from(sorted(self.network.wires)))
        if not self._can_arrive(number, to_head=to_head):
            return
        wire = self.network.wires[number]
        queue = wire.to_head if to_head else wire.to_follower
        cut = data.draw(st.integers(0, len(queue[0])))
        whole = queue.popleft()
        queue.extendleft(part for part in (whole[cut:], whole[:cut]) if part)
        self._deliver(number, to_head=to_head)

    @rule()
    def deliver_everything(self) -> None:
        """Everything arrives that is not late; so does the end of a connection."""
        for number in sorted(self.network.wires):
            for _ in range(10):
                self._deliver(number, to_head=True)
                self._deliver(number, to_head=False)
        for number, wire in list(self.network.wires.items()):
            if wire.is_closed_by_follower and (number, True) not in self.late:
                self.network.see_end(number, at_head=True)
            if (
                wire.is_closed_by_head
                and (number, False) not in self.late
                and not self._is_reader_frozen(number)
            ):
                self.network.see_end(number, at_head=False)

    def _deliver(self, number: int, *, to_head: bool) -> None:
        if self._can_arrive(number, to_head=to_head):
            wire = self.network.wires[number]
            queue = wire.to_head if to_head else wire.to_follower
            self.recorded = [*self.recorded[-50:], queue[0]]
            self.network.deliver(number, to_head=to_head)

    def _can_arrive(self, number: int, *, to_head: bool) -> bool:
        if number not in self.network.wires or (not to_head and self._is_reader_frozen(number)):
            return False
        wire = self.network.wires[number]
        queue = wire.to_head if to_head else wire.to_follower
        return len(queue) > self.late.get((number, to_head), 0)

    @rule(quarters=st.integers(1, 24))
    def pass_time(self, quarters: int) -> None:
        """Every process that runs looks at its clock."""
        for _ in range(quarters):
            self.network.now += TICK_SECONDS
            self.network.tick_head()
            for node in [*self.members, self.stranger]:
                if not self.is_frozen(node):
                    self.network.tick_node(node)
            self.note_ends()

    @rule(index=st.integers(0, 3), quarters=st.integers(5, 20))
    def be_busy(self, index: int, quarters: int) -> None:
        """One side does not look at its clock for up to the silence, and then it does."""
        side = self.members[index] if index < len(self.members) else None
        if side is not None and self.is_frozen(side):
            return
        for quarter in range(1, quarters + 1):
            self.network.now += TICK_SECONDS
            if side is not None or quarter == quarters:
                self.network.tick_head()
            for node in [*self.members, self.stranger]:
                if not self.is_frozen(node) and (node is not side or quarter == quarters):
                    self.network.tick_node(node)
            self.note_ends()
        self.note_busy("head" if side is None else side.name, quarters * TICK_SECONDS)

    def note_busy(self, name: str, seconds: float) -> None:
        """Note a time for which a side may forgive the other."""
        self.busy_seconds[name] = min(SILENCE_SECONDS, self.busy_seconds.get(name, 0.0) + seconds)

    @rule(index=st.integers(0, 2))
    def wedge(self, index: int) -> None:
        """The processes of one follower cannot be ended, or can be again."""
        self.wedged = set() if self.wedged else {index}

    @rule(quarters=st.integers(1, 24))
    def pass_good_time(self, quarters: int) -> None:
        """The same while the network works."""
        for _ in range(quarters):
            self.pass_time(1)
            self.deliver_everything()

    @precondition(lambda self: self.network.wires)
    @rule(
        data=st.data(),
        how=st.sampled_from(["head", "follower", "both", "late", "late", "stalled", "stalled"]),
        to_head=st.booleans(),
    )
    def harm(self, data: st.DataObject, how: str, *, to_head: bool) -> None:
        """A connection ends, and one or both sides see it, or it becomes late or stalls."""
        number = data.draw(st.sampled_from(sorted(self.network.wires)))
        if how == "stalled":
            self.late[number, to_head] = STALLED
        if how == "late":
            lateness = self.late.get((number, to_head), 0)
            self.late[number, to_head] = lateness + data.draw(st.integers(1, 6))
        if how in {"both", "head"}:
            self.network.see_end(number, at_head=True)
        if how in {"both", "follower"} and not self._is_reader_frozen(number):
            self.network.see_end(number, at_head=False)

    @precondition(lambda self: self.network.head.is_complete)
    @rule()
    def start(self) -> None:
        """The head starts the next generation."""
        self.generation += 1
        port = 20001 + len(self.origins)
        self.origins[port] = (self.life, self.generation)
        self.network.start(self.generation, port)

    @rule()
    def end(self) -> None:
        """The head ends the generation."""
        self.network.head_does(self.network.head.end("a restart"))

    @rule()
    def replace_head(self) -> None:
        """The head dies, and another one starts, whose generations begin at 1."""
        self.note_ends()
        for number in list(self.network.wires):
            self.network.wires[number].is_closed_by_head = True
        running = self.network.head._generation
        if running is not None:
            self.ended_at_head.setdefault((self.life, running.number), self.now)
        self.network.head = Head(key=KEY, name="head", model="m", facts=FACTS, nodes=3)
        self.life += 1
        self.generation = 0

    @rule(index=st.integers(0, 2), is_death=st.booleans())
    def engine_ends(self, index: int, *, is_death: bool) -> None:
        """Processes of a follower end, because they were told to or not."""
        node = self.members[index]
        order = node.machine.engine
        if order is None or self.is_frozen(node):
            return
        if is_death:
            death = Death("worker_exit", "killed")
            actions = node.machine.engine_lost(order.generation, death, self.now)
            self.network.node_does(node, actions)
        if (not is_death or node.is_stop_asked) and not self.is_wedged(node):
            self.network.stop_engine(node)

    @rule(index=st.integers(0, 2))
    def freeze(self, index: int) -> None:
        """A follower is stopped, or continues, and then it looks at its clock."""
        if index in self.frozen:
            self.note_busy(self.members[index].name, self.now - self.frozen.pop(index))
            self.network.tick_node(self.members[index])
        else:
            self.frozen[index] = self.now

    @precondition(lambda self: self.network.wires)
    @rule(data=st.data())
    def attack(self, data: st.DataObject) -> None:
        """Someone writes into a connection what was on the wire before, or what is made up."""
        number = data.draw(st.sampled_from(sorted(self.network.wires)))
        forged = framed(encoded(NodeHeartbeat(1)) + b"\0" * 32)
        content = data.draw(st.sampled_from([*self.recorded, forged, b"\0\0\0\0"]))
        wire = self.network.wires[number]
        data.draw(st.sampled_from([wire.to_head, wire.to_follower])).appendleft(content)

    @rule()
    def attack_afresh(self) -> None:
        """Someone connects and sends again what was sent before."""
        number = 1_000_000 + self.network._next_wire
        self.network._next_wire += 1
        self.network.head.connected(number, "10.0.0.66", a_nonce(), self.now)
        for part in self.recorded:
            self.network.head.received(number, part, self.now)
        assert not self.network.head._peers.get(number, None) or not (
            self.network.head._peers[number].channel.is_open
        )
        self.network.head_does(
            [one for one in self.network.head.disconnected(number) if not _is_about(one, number)]
        )

    def note_ends(self) -> None:
        """Note when each side ended a generation."""
        running = self.network.head._generation
        if running is not None and running.is_ending:
            self.ended_at_head.setdefault((self.life, running.number), self.now)
        for one in self.network.seen:
            if isinstance(one, GenerationLost | GenerationOver):
                self.ended_at_head.setdefault((self.life, one.generation), self.now)
        self.network.seen.clear()

    def _is_reader_frozen(self, number: int) -> bool:
        node = self.network.node_of(number)
        return node is not None and self.is_frozen(node)

    @invariant()
    def followers_end_what_the_head_ended(self) -> None:
        """Within the silence that the heartbeat allows, whatever the network does."""
        for node in self.members:
            order = node.machine.engine
            if order is None or node.machine.state == "ending" or self.is_frozen(node):
                continue
            ended = self.ended_at_head.get(self.origins[order.master_port])
            assert ended is None or self.now - ended <= self.bound_seconds(node.name)

    def bound_seconds(self, name: str) -> float:
        """By when that side notices that the other is gone."""
        return BOUND_SECONDS + self.busy_seconds.get(name, 0.0)

    @invariant()
    def the_head_ends_what_a_follower_does_not_run(self) -> None:
        """Within the same time: it has ended there, or it never started."""
        current = self.network.head._generation
        if current is None or current.is_ending:
            self.not_running_since.clear()
            return
        for peer in current.running:
            name = self.network.head._peers[peer].name
            (node,) = (one for one in self.members if one.name == name)
            order = node.machine.engine
            is_running = (
                order is not None
                and node.machine.state == "running"
                and self.origins[order.master_port] == (self.life, current.number)
            )
            if is_running and not self.is_frozen(node):
                self.not_running_since.pop(name, None)
            else:
                since = self.not_running_since.setdefault(name, self.now)
                assert self.now - since <= self.bound_seconds("head")

    @invariant()
    def the_head_waits_for_an_end_within_bounds(self) -> None:
        """So that a spare gets the place of a follower that cannot end its processes."""
        current = self.network.head._generation
        if current is not None and current.is_ending:
            since = self.ended_at_head.get((self.life, current.number), self.now)
            assert self.now - since <= END_BOUND_SECONDS

    @invariant()
    def a_rank_belongs_to_one_follower(self) -> None:
        """In each generation of each head."""
        started = [
            (port, generation, rank)
            for node in self.members
            for generation, rank, port in node.started
        ]
        assert len(started) == len(set(started))

    @invariant()
    def nobody_joins_without_the_key(self) -> None:
        """Nor with what others have sent."""
        assert set(self.network.head.followers) <= set(NAMES)
        assert self.stranger.machine.state in {"away", "authenticating"}
        assert self.stranger.started == []

    def teardown(self) -> None:
        """Whatever has happened, everybody finds together once the network works."""
        self.recover()


def _is_about(action: object, number: int) -> bool:
    return getattr(action, "peer", None) == number


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    # Shrinking a failure takes longer than a test may.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
