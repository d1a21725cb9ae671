"""What the head does with its followers: who joins, which generation runs, when it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.nodes.actions import (
    GenerationLost,
    GenerationOver,
    NodeJoined,
    NodeLeft,
    PeerRefused,
    RanksChanged,
)
from holdfast.nodes.channel import SILENCE_SECONDS
from holdfast.nodes.frames import MAX_PAYLOAD_BYTES
from holdfast.nodes.head import END_SECONDS, JOIN_SECONDS, MAX_STRANGERS
from holdfast.nodes.messages import End, Ended, Start
from holdfast.records import Death
from node_pairs import FACTS, SPEC, Network, Node, a_nonce
from sample_status import a_rank

OTHER_KEY = b"another-key-another-key-another-key"
KILLED = Death("worker_exit", "rank 1 was killed")


def a_running_pair(generation: int = 1) -> tuple[Network, Node]:
    network = Network()
    node = network.add("b")
    network.join(node)
    network.start(generation)
    network.settle()
    return network, node


def test_a_follower_joins() -> None:
    """And the head is complete then."""
    network = Network()
    node = network.add("b")
    was_complete = network.head.is_complete
    network.join(node)
    assert network.seen == [NodeJoined("b")]
    assert (was_complete, network.head.is_complete) == (False, True)
    assert node.machine.state == "waiting"


def test_a_follower_with_another_key_is_refused_and_counted() -> None:
    """It gives up with one line."""
    network = Network()
    node = network.add("b", key=OTHER_KEY)
    network.join(node)
    assert network.seen == [PeerRefused("wrong_key", "it has another key")]
    assert "Remedy: give both nodes the same --node-key-file." in node.given_up


def test_a_follower_with_another_vllm_is_refused_before_anything_starts() -> None:
    """Both sides have the same line."""
    network = Network()
    node = network.add("b", facts=replace(FACTS, vllm_version="0.33.0"))
    network.join(node)
    (refusal,) = network.seen
    assert isinstance(refusal, PeerRefused)
    assert refusal.reason == "different"
    assert refusal.line == node.given_up
    assert node.machine.state == "away"


def test_ranks_are_handed_out_in_the_order_of_joining() -> None:
    """Each rank once, all with the same port."""
    network = Network(nodes=4)
    nodes = [network.add(name) for name in "bcd"]
    network.join(*reversed(nodes))
    network.start(7)
    network.settle()
    assert [node.started for node in nodes] == [[(7, 3, 20007)], [(7, 2, 20007)], [(7, 1, 20007)]]


def test_a_follower_too_many_waits_for_a_place() -> None:
    """It is refused for now, and does not give up."""
    network = Network()
    first, second = network.add("b"), network.add("c")
    network.join(first, second)
    assert network.head.followers == ("b",)
    assert second.given_up == ""
    network.node_does(first, first.machine.leave("stopped", network.now))
    network.settle()
    network.pass_time(10)
    network.join(second)
    assert network.head.followers == ("c",)


def test_two_followers_of_one_name_are_two() -> None:
    """The second one waits until the first is gone."""
    network = Network(nodes=3)
    first, second = network.add("b"), network.add("b")
    network.join(first, second)
    assert network.head.followers == ("b",)
    assert PeerRefused("name_taken", "another follower is called b") in network.seen
    assert (first.machine.state, second.machine.state) == ("waiting", "away")


def test_a_follower_with_the_name_of_the_head_is_refused_for_good() -> None:
    """No metric could tell the two nodes apart, and neither name changes."""
    network = Network()
    network.join(node := network.add("head"))
    assert network.head.followers == ()
    assert "the head is called head too" in node.given_up


def test_a_follower_that_comes_back_replaces_its_old_connection() -> None:
    """Which the network has lost without a word."""
    network, node = a_running_pair()
    network.see_end(node.wire or 0, at_head=False)
    network.stop_engine(node)
    network.connect(node)
    network.settle()
    kinds = [type(one) for one in network.seen]
    assert kinds == [NodeJoined, GenerationLost, GenerationOver, NodeLeft, NodeJoined]
    assert network.head.is_complete


def test_a_death_on_a_follower_ends_the_generation_everywhere() -> None:
    """The head has the death as it was seen there, and the next generation can start."""
    network = Network(nodes=3)
    one, other = network.add("b"), network.add("c")
    network.join(one, other)
    network.start(1)
    network.settle()
    network.node_does(one, one.machine.engine_lost(1, KILLED, network.now))
    network.settle()
    assert GenerationLost(1, "b", str(KILLED), KILLED) in network.seen
    assert (one.is_stop_asked, other.is_stop_asked) == (True, True)
    assert network.head.generation is None
    assert not network.head.is_complete
    for node in (one, other):
        assert GenerationOver(1) not in network.seen
        network.stop_engine(node)
        network.settle()
    assert network.seen[-1] == GenerationOver(1)
    assert network.head.is_complete


RAISED = Death("worker_exception", "connection closed by peer")


def a_trio_that_lost_one() -> tuple[Network, Node, Node]:
    """A head with two followers; the first has just said that its engine died."""
    network = Network(nodes=3)
    one, other = network.add("b"), network.add("c")
    network.join(one, other)
    network.start(1)
    network.settle()
    network.node_does(one, one.machine.engine_lost(1, RAISED, network.now))
    network.settle()
    return network, one, other


def test_a_death_that_is_told_later_is_reported_too() -> None:
    """It may have caused the first: a rank that loses its peer raises, on every node."""
    network, one, other = a_trio_that_lost_one()
    assert other.is_stop_asked
    network.node_does(other, other.machine.engine_lost(1, KILLED, network.now))
    network.settle()
    losses = [seen for seen in network.seen if isinstance(seen, GenerationLost)]
    assert [(loss.node, loss.death) for loss in losses] == [("b", RAISED), ("c", KILLED)]
    for node in (one, other):
        network.stop_engine(node)
    network.settle()
    assert network.seen[-1] == GenerationOver(1)
    assert losses == [seen for seen in network.seen if isinstance(seen, GenerationLost)]


def test_a_node_that_is_lost_after_a_death_is_reported_too() -> None:
    """It may have caused the death, and one that has ended its ranks has not."""
    network, one, other = a_trio_that_lost_one()
    network.close(other.wire or 0)
    network.settle()
    network.stop_engine(one)
    network.settle()
    network.close(one.wire or 0)
    network.settle()
    losses = [seen for seen in network.seen if isinstance(seen, GenerationLost)]
    assert [(loss.node, loss.death) for loss in losses] == [("b", RAISED), ("c", None)]


def test_a_death_after_the_end_that_was_asked_for_is_not_a_loss() -> None:
    """The ranks of other nodes raise when the head ends its own."""
    network, node = a_running_pair()
    network.head_does(network.head.end("a restart"))
    network.settle()
    network.node_does(node, node.machine.engine_lost(1, KILLED, network.now))
    network.stop_engine(node)
    network.settle()
    assert network.seen == [NodeJoined("b"), GenerationOver(1)]


def test_an_order_says_what_the_files_of_the_model_are_at_the_start() -> None:
    """They may have been replaced since the follower joined."""
    network, node = a_running_pair()
    orders = [node.machine.engine]
    network.head.model_read("01")
    network.head_does(network.head.end("a restart"))
    network.settle()
    network.stop_engine(node)
    network.settle()
    network.start(2)
    network.settle()
    orders.append(node.machine.engine)
    told = [(order.model, order.model_digest) for order in orders if order is not None]
    assert told == [("m", "00"), ("m", "01")]


def test_a_follower_is_compared_with_what_the_files_of_the_model_are_now() -> None:
    """Not with those from before they were replaced on both nodes."""
    network = Network()
    network.head.model_read("01")
    network.join(network.add("b"))
    before = network.head.followers
    network.join(network.add("c", facts=replace(FACTS, model_digest="01")))
    assert (before, network.head.followers) == ((), ("c",))


def test_processes_that_end_without_a_death_end_the_generation_too() -> None:
    """They were not asked to."""
    network, node = a_running_pair()
    network.stop_engine(node)
    network.settle()
    assert GenerationLost(1, "b", "its processes ended", None) in network.seen
    assert network.seen[-1] == GenerationOver(1)


def test_a_lost_connection_ends_the_generation_everywhere() -> None:
    """Cause and name of the node are known; the node is not waited for."""
    network = Network(nodes=3)
    one, other = network.add("b"), network.add("c")
    network.join(one, other)
    network.start(1)
    network.settle()
    network.close(one.wire or 0)
    network.settle()
    assert GenerationLost(1, "b", "it closed the connection", None) in network.seen
    assert NodeLeft("b", "it closed the connection") in network.seen
    assert other.is_stop_asked
    network.stop_engine(other)
    network.settle()
    assert network.seen[-1] == GenerationOver(1)
    assert not network.head.is_complete


def test_a_silent_follower_is_lost_in_time() -> None:
    """Its connection says nothing of its end."""
    network, _ = a_running_pair()
    lost_since = network.now
    while network.head.generation is not None:
        network.now += 0.25
        network.tick_head()
    assert network.now - lost_since <= SILENCE_SECONDS + 0.5
    losses = [one for one in network.seen if isinstance(one, GenerationLost)]
    assert [(loss.node, loss.death) for loss in losses] == [("b", None)]
    assert not any(isinstance(one, PeerRefused) for one in network.seen)


def test_a_loss_is_reported_once() -> None:
    """Whatever follows from it."""
    network, node = a_running_pair()
    network.node_does(node, node.machine.engine_lost(1, KILLED, network.now))
    network.stop_engine(node)
    network.settle()
    network.close(node.wire or 0)
    assert sum(isinstance(one, GenerationLost) for one in network.seen) == 1


def test_the_end_that_was_asked_for_is_not_a_loss() -> None:
    """The head waits for the processes, and starts the next one."""
    network, node = a_running_pair()
    network.head_does(network.head.end("a restart"))
    network.settle()
    assert node.is_stop_asked
    network.stop_engine(node)
    network.settle()
    assert network.seen == [NodeJoined("b"), GenerationOver(1)]
    network.start(2)
    network.settle()
    assert node.started == [(1, 1, 20001), (2, 1, 20002)]


def test_a_follower_that_does_not_end_its_processes_is_lost() -> None:
    """Its heartbeats do not help it: the head needs a free node, and a spare is one."""
    network, wedged = a_running_pair()
    network.join(spare := network.add("c"))
    assert network.head.followers == ("b",)
    network.head_does(network.head.end("a restart"))
    network.pass_time(END_SECONDS)
    assert network.head.followers == ("b",)
    network.pass_time(1)
    reason = f"it did not end its processes within {END_SECONDS:g} s"
    assert network.seen[-2:] == [GenerationOver(1), NodeLeft("b", reason)]
    assert (wedged.is_stop_asked, wedged.machine.wants_connection(network.now + 60)) == (
        True,
        False,
    )
    network.join(spare)
    assert network.head.is_complete
    network.start(2)
    network.settle()
    assert spare.started == [(2, 1, 20002)]


def test_a_follower_that_ends_its_processes_in_time_stays() -> None:
    """Each generation has the whole time."""
    network, node = a_running_pair()
    for generation in (2, 3):
        network.head_does(network.head.end("a restart"))
        network.pass_time(END_SECONDS - 1)
        network.stop_engine(node)
        network.settle()
        network.start(generation)
        network.settle()
    assert network.head.followers == ("b",)
    assert not any(isinstance(one, NodeLeft) for one in network.seen)


def test_statistics_arrive_on_the_clock_of_the_head() -> None:
    """The clocks of two machines have nothing to do with each other."""
    network, node = a_running_pair()
    rank = a_rank(rank=1, last_step_ended_seconds=5.0, phases={"load": 2.0})
    changed = node.machine.ranks_changed(1, [rank], 10.0, is_compiling=True)
    network.node_does(node, changed)
    network.settle()
    (update,) = (one for one in network.seen if isinstance(one, RanksChanged))
    moved = network.now - 10.0
    assert update.ranks == (
        replace(rank, last_step_ended_seconds=5.0 + moved, phases={"load": 2.0 + moved}),
    )
    assert (update.generation, update.node, update.is_compiling) == (1, "b", True)


def test_statistics_of_a_generation_that_ends_are_ignored() -> None:
    """They would be read as those of a living rank."""
    network, node = a_running_pair()
    network.node_does(node, node.machine.ranks_changed(1, [a_rank(rank=1)], network.now))
    network.head_does(network.head.end("a restart"))
    network.settle()
    assert not any(isinstance(one, RanksChanged) for one in network.seen)


def test_a_follower_that_leaves_is_gone_at_once() -> None:
    """Without five seconds of silence."""
    network, node = a_running_pair()
    network.node_does(node, node.machine.leave("stopped", network.now))
    network.settle()
    assert GenerationLost(1, "b", "it leaves: stopped", None) in network.seen
    assert network.head.followers == ()


def test_followers_hear_that_the_head_leaves() -> None:
    """They end their engines, and wait for another head."""
    network, node = a_running_pair()
    network.head_does(network.head.leave("stopped"))
    network.settle()
    assert node.is_stop_asked
    network.stop_engine(node)
    assert node.machine.state == "away"
    assert node.given_up == ""


def test_a_generation_needs_enough_followers_and_a_new_number_and_port() -> None:
    """Otherwise two engines could meet."""
    network = Network()
    with pytest.raises(ValueError, match="not enough followers"):
        network.start(1)
    network.join(node := network.add("b"))
    network.start(1)
    with pytest.raises(ValueError, match="not enough followers"):
        network.start(2)
    network.settle()
    network.head_does(network.head.end("again"))
    network.settle()
    network.stop_engine(node)
    network.settle()
    with pytest.raises(ValueError, match="of its own"):
        network.start(1)
    with pytest.raises(ValueError, match="of its own"):
        network.head.start(
            generation=2,
            master_address="a",
            master_port=20001,
            arguments=(),
            fingerprint="f",
            spec=SPEC,
        )


def test_the_oldest_stranger_makes_room_for_the_newest() -> None:
    """So that a follower gets in, however many strangers wait."""
    network = Network()
    for peer in range(1000, 1000 + MAX_STRANGERS + 10):
        network.head.connected(peer, "10.0.0.66", a_nonce(), network.now)
    network.join(network.add("b"))
    assert network.head.followers == ("b",)
    assert len(network.head._peers) <= MAX_STRANGERS + 1


def test_a_crowd_from_one_address_does_not_end_the_handshakes_of_others() -> None:
    """However long these take: a follower may be slow, or the network."""
    network = Network()
    slow = network.add("b")
    network.connect(slow)
    for peer in range(1000, 1000 + 10 * MAX_STRANGERS):
        network.head_does(network.head.connected(peer, "10.0.0.66", a_nonce(), network.now))
    network.settle()
    assert network.head.followers == ("b",)
    assert len(network.head._peers) <= MAX_STRANGERS + 1


def test_a_peer_with_the_key_that_does_not_join_is_dropped() -> None:
    """Its heartbeats do not help it."""
    network = Network()
    node = network.add("b")
    node.finds_facts = False
    network.join(node)
    network.pass_time(JOIN_SECONDS - 1)
    assert network.seen == []
    network.pass_time(2)
    assert [type(one) for one in network.seen] == [PeerRefused]


@pytest.mark.parametrize("message", [End(1, "x"), Start(1, 1, 2, "a", 1, (), "f", SPEC)])
def test_a_follower_cannot_act_as_the_head(message: End | Start) -> None:
    """What only the head may say ends the connection."""
    network = Network()
    network.join(node := network.add("b"))
    assert node.machine._channel is not None
    node.machine._channel.send(message)
    network.tick_node(node)
    network.settle()
    assert any(isinstance(one, PeerRefused) and one.reason == "malformed" for one in network.seen)
    assert network.head.followers == ()


def test_a_follower_must_join_first() -> None:
    """The key alone does not make it a node."""
    network = Network()
    node = network.add("b")
    node.finds_facts = False
    network.join(node)
    assert node.machine._channel is not None
    node.machine._channel.send(Ended(1))
    network.tick_node(node)
    network.settle()
    assert any(isinstance(one, PeerRefused) and one.reason == "malformed" for one in network.seen)


def test_a_heartbeat_is_not_a_message_for_the_head() -> None:
    """The channel answers it."""
    network, node = a_running_pair()
    before = list(network.seen)
    network.pass_time(20)
    assert network.seen == before
    assert node.machine.state == "running"


def test_the_reason_of_a_follower_does_not_fill_the_message_that_ends_the_others() -> None:
    """However long it is, they are told to end."""
    network = Network(nodes=3)
    nodes = [network.add(name) for name in ("b", "c")]
    for node in nodes:
        network.join(node)
    network.start(1)
    network.settle()
    network.head_does(network.head.end("\N{FIRE}" * MAX_PAYLOAD_BYTES))
    network.settle()
    assert [node.is_stop_asked for node in nodes] == [True, True]
