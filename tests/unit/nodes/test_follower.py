"""What a follower does: when it connects, starts and stops the engine, and gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.nodes.actions import GenerationLost, GenerationOver, NodeLeft, RanksChanged, Send
from holdfast.nodes.channel import SILENCE_SECONDS
from holdfast.nodes.follower import RETRY_SECONDS, SHORT_OF_MEMORY, SPARE_RETRY_SECONDS
from holdfast.nodes.frames import MAX_FRAME_BYTES, framed
from holdfast.nodes.messages import (
    MAX_REASON_CHARACTERS,
    PROTOCOL,
    Challenge,
    Rejected,
    Start,
    Welcome,
    encoded,
)
from holdfast.records import Death, Suspect
from node_pairs import FACTS, KEY, SPEC, Network, Node, a_nonce
from sample_status import a_rank

KILLED = Death("worker_exit", "rank 1 was killed")
STARVED = Death("host_memory", "512 MiB were available")


def a_running_node() -> tuple[Network, Node]:
    network = Network()
    node = network.add("b")
    network.join(node)
    network.start(1)
    network.settle()
    return network, node


def updates(network: Network) -> list[RanksChanged]:
    return [one for one in network.seen if isinstance(one, RanksChanged)]


def test_its_states_follow_what_happens() -> None:
    """From the first attempt to the end of an engine, and back."""
    network = Network()
    node = network.add("b")
    seen = [node.machine.state]
    network.connect(node)
    seen.append(node.machine.state)
    network.settle()
    seen.append(node.machine.state)
    network.start(1)
    network.settle()
    seen.append(node.machine.state)
    network.head_does(network.head.end("a restart"))
    network.settle()
    seen.append(node.machine.state)
    network.stop_engine(node)
    seen.append(node.machine.state)
    assert seen == ["away", "authenticating", "waiting", "running", "ending", "waiting"]


def test_what_a_rank_wrote_last_comes_before_its_death() -> None:
    """However soon after the update before."""
    network, node = a_running_node()
    for steps in (1, 2):
        network.node_does(node, node.machine.ranks_changed(1, [a_rank(steps=steps)], network.now))
    network.node_does(node, node.machine.engine_lost(1, KILLED, network.now))
    network.settle()
    assert [update.ranks[0].steps for update in updates(network)] == [1, 2]
    assert isinstance(network.seen[-1], GenerationLost)


def test_a_compiler_is_told_when_it_starts_and_when_it_ends() -> None:
    """Though nothing else has changed: the rank waits for it."""
    network, node = a_running_node()
    for is_compiling in (False, True, True, False):
        network.now += 1.0
        changed = node.machine.ranks_changed(1, [a_rank()], network.now, is_compiling=is_compiling)
        network.node_does(node, changed)
        network.settle()
    assert [update.is_compiling for update in updates(network)] == [False, True, False]


def test_a_lost_connection_ends_the_engine_at_once() -> None:
    """The head has given it up, or will."""
    network, node = a_running_node()
    network.close(node.wire or 0)
    assert node.is_stop_asked
    assert node.machine.state == "ending"


def test_silence_ends_the_engine_in_time() -> None:
    """The connection says nothing of its end when a cable is out."""
    network, node = a_running_node()
    lost_since = network.now
    while not node.is_stop_asked:
        network.now += 0.25
        network.tick_node(node)
    assert network.now - lost_since <= SILENCE_SECONDS + 0.5


def test_it_does_not_connect_while_processes_are_left() -> None:
    """That it joins says that its node is free."""
    network, node = a_running_node()
    network.close(node.wire or 0)
    assert not node.machine.wants_connection(network.now + 60)
    network.stop_engine(node)
    assert node.machine.wants_connection(network.now + 60)


def test_it_does_not_try_at_once_again() -> None:
    """After a lost connection, or an attempt that failed."""
    network = Network()
    node = network.add("b")
    assert node.machine.wants_connection(network.now)
    network.node_does(node, node.machine.not_connected("refused", network.now))
    assert not node.machine.wants_connection(network.now)
    assert node.machine.wants_connection(network.now + RETRY_SECONDS)
    assert node.machine.last_problem == "refused"
    network.join(node)
    network.close(node.wire or 0)
    assert not node.machine.wants_connection(network.now)


def test_one_that_is_not_needed_waits_longer() -> None:
    """It does not fill the head's log."""
    network = Network()
    network.join(network.add("a"), spare := network.add("b"))
    assert not spare.machine.wants_connection(network.now + RETRY_SECONDS)
    assert spare.machine.wants_connection(network.now + SPARE_RETRY_SECONDS)


def test_a_stranger_at_the_address_of_the_head_stops_no_follower_that_has_joined() -> None:
    """What it says is not proven; a follower that never joined gives up with a line."""
    network = Network()
    node = network.add("b")
    network.join(node)
    network.close(node.wire or 0)
    node.machine.connected(a_nonce(), network.now)
    rejection = framed(encoded(Rejected("wrong_key")))
    network.node_does(node, node.machine.received(rejection, network.now))
    assert (node.given_up, node.machine.state) == ("", "away")
    new = network.add("c")
    new.machine.connected(a_nonce(), network.now)
    network.node_does(new, new.machine.received(rejection, network.now))
    assert "--node-key-file" in new.given_up


def test_a_follower_that_has_joined_before_waits_until_it_may_join_again() -> None:
    """Half of an update, or of a copy of the model, passes; a new follower gives up."""
    network = Network()
    node = network.add("b")
    network.join(node)
    network.close(node.wire or 0)
    node.facts = replace(FACTS, vllm_version="0.33.0")
    network.join(node)
    assert (node.given_up, node.machine.state) == ("", "away")
    assert "vLLM is 0.32.0 on the head" in node.machine.last_problem
    assert not node.machine.wants_connection(network.now + RETRY_SECONDS)
    assert node.machine.wants_connection(network.now + SPARE_RETRY_SECONDS)
    network.join(new := network.add("c", facts=node.facts))
    assert "vLLM is 0.32.0 on the head" in new.given_up
    node.facts = FACTS
    network.join(node)
    assert network.head.followers == ("b",)


def test_a_model_that_cannot_be_read_keeps_only_a_new_follower_away_for_good() -> None:
    """A share may be mounted later."""
    network = Network()
    node, new = network.add("b"), network.add("c")
    network.join(node)
    network.close(node.wire or 0)
    for one in (node, new):
        one.finds_facts = False
        network.join(one)
        network.node_does(one, one.machine.facts_missing("it cannot be read", network.now))
        network.settle()
    assert (node.given_up, new.given_up) == ("", "it cannot be read")
    assert node.machine.last_problem == "it cannot be read"
    assert node.machine.wants_connection(network.now + SPARE_RETRY_SECONDS)


def test_a_head_without_the_key_learns_nothing_and_starts_nothing() -> None:
    """The follower sends a proof, and nothing more."""
    network = Network()
    node = network.add("b")
    node.machine.connected(a_nonce(), network.now)
    node.machine.received(framed(encoded(Challenge(PROTOCOL, "ab" * 32))), network.now)
    for message in (Welcome(), Start(1, 1, 2, "a", 1, (), "f", SPEC)):
        actions = node.machine.received(framed(encoded(message)), network.now)
        assert not any(isinstance(action, Send) for action in actions)
    assert node.machine.engine is None
    assert node.machine.state == "away"


def test_a_death_here_ends_the_engine_here() -> None:
    """The head is told, but not waited for."""
    network, node = a_running_node()
    network.node_does(node, node.machine.engine_lost(1, KILLED, network.now))
    assert node.is_stop_asked
    network.settle()
    assert [type(one) for one in network.seen][-1] is GenerationLost


@pytest.mark.parametrize("how", ["ended", "gone"])
def test_one_that_was_asked_to_end_keeps_its_ranks_until_the_head_does(how: str) -> None:
    """The head drains; the next one, at the same address, gets no engine that ends at once."""
    network, node = a_running_node()
    network.node_does(node, node.machine.leave_after_engine("asked to end", network.now))
    network.pass_time(2 * SILENCE_SECONDS)
    assert (node.machine.state, node.is_stop_asked) == ("running", False)
    if how == "ended":
        network.head_does(network.head.end("the server stops"))
        network.settle()
    else:
        network.close(node.wire or 0)
    network.stop_engine(node)
    network.settle()
    assert node.machine.state == "left"
    assert network.head.followers == ()
    assert not node.machine.wants_connection(network.now + 60)


def test_one_without_an_engine_leaves_at_once() -> None:
    """No head needs it."""
    network = Network()
    node = network.add("b")
    network.join(node)
    network.node_does(node, node.machine.leave_after_engine("asked to end", network.now))
    network.settle()
    assert node.machine.state == "left"
    assert network.seen[-1] == NodeLeft("b", "it leaves: asked to end")


def test_a_node_whose_host_ran_out_of_memory_stays_away_until_it_has_enough() -> None:
    """Else the next engine would end there, one after another."""
    network, node = a_running_node()
    network.node_does(node, node.machine.engine_lost(1, STARVED, network.now))
    network.settle()
    network.stop_engine(node)
    network.settle()
    assert network.seen[-3:] == [
        GenerationLost(1, "b", str(STARVED), STARVED),
        GenerationOver(1),
        NodeLeft("b", f"it leaves: {SHORT_OF_MEMORY}"),
    ]
    assert (node.machine.state, node.machine.last_problem) == ("away", SHORT_OF_MEMORY)
    assert not node.machine.wants_connection(network.now + 60)
    node.machine.memory_is_ample()
    assert node.machine.wants_connection(network.now + 60)


def test_a_node_that_has_memory_again_when_its_engine_has_ended_stays() -> None:
    """The engine itself had taken it."""
    network, node = a_running_node()
    network.node_does(node, node.machine.engine_lost(1, STARVED, network.now))
    node.machine.memory_is_ample()
    network.stop_engine(node)
    network.settle()
    assert network.head.is_complete


def test_a_node_that_cannot_run_what_it_gets_gives_up_and_costs_the_head_a_node() -> None:
    """The head waits for one that can, and does not end because of this one."""
    network, node = a_running_node()
    refused = node.machine.engine_refused(1, "other GPUs", network.now, is_final=True)
    network.node_does(node, refused)
    assert (node.given_up, node.is_stop_asked) == ("other GPUs", True)
    network.settle()
    (lost,) = (one for one in network.seen if isinstance(one, GenerationLost))
    assert (lost.death, lost.reason) == (None, "it leaves: other GPUs")
    assert network.head.followers == ()


def test_a_node_that_has_run_ranks_before_tries_again_when_it_cannot() -> None:
    """The next head may hand out what fits again."""
    network, node = a_running_node()
    network.node_does(node, node.machine.ranks_changed(1, [a_rank(rank=1)], network.now))
    refused = node.machine.engine_refused(1, "other GPUs", network.now, is_final=True)
    network.node_does(node, refused)
    network.settle()
    network.stop_engine(node)
    assert (node.given_up, node.machine.state) == ("", "away")
    assert not node.machine.wants_connection(network.now + RETRY_SECONDS)
    assert node.machine.wants_connection(network.now + SPARE_RETRY_SECONDS)


def test_a_node_that_cannot_start_its_process_lets_a_spare_go_first() -> None:
    """It tries again itself, since a disk that is full now may have space later."""
    network, node = a_running_node()
    network.join(spare := network.add("c"))
    line = "cannot start the engine's process: No space left on device"
    network.node_does(node, node.machine.engine_refused(1, line, network.now, is_final=False))
    network.settle()
    network.stop_engine(node)
    (lost,) = (one for one in network.seen if isinstance(one, GenerationLost))
    assert (lost.death, lost.reason) == (None, f"it leaves: {line}")
    network.join(spare)
    assert network.head.followers == ("c",)
    assert (node.given_up, node.machine.state) == ("", "away")
    assert not node.machine.wants_connection(network.now + RETRY_SECONDS)
    assert node.machine.wants_connection(network.now + SPARE_RETRY_SECONDS)


@pytest.mark.parametrize(
    ("reason", "suspects", "are_known"),
    [
        ("short", 3, True),
        ("\N{GRINNING FACE}" * MAX_FRAME_BYTES, 3, True),
        ("short", 5000, False),
        ("\0" * MAX_FRAME_BYTES, 5000, False),
    ],
)
def test_a_death_that_is_long_to_tell_keeps_its_cause_and_its_blame(
    reason: str, suspects: int, *, are_known: bool
) -> None:
    """The longest texts give way first: without the message the node would count as lost."""
    accused = tuple(Suspect(f"cmpl-{'a' * 64}-{number}", 100, True) for number in range(suspects))
    death = Death("worker_exception", reason, blames_requests=True, suspects=accused)
    network, node = a_running_node()
    network.node_does(node, node.machine.engine_lost(1, death, network.now))
    network.settle()
    (lost,) = (one for one in network.seen if isinstance(one, GenerationLost))
    assert lost.death is not None
    assert (lost.death.cause, lost.death.blames_requests) == (death.cause, True)
    assert lost.death.reason == reason[:MAX_REASON_CHARACTERS]
    assert lost.death.suspects == (accused if are_known else None)


def test_what_is_said_of_another_generation_is_ignored() -> None:
    """It may be late."""
    network, node = a_running_node()
    network.node_does(node, node.machine.engine_lost(2, KILLED, network.now))
    refused = node.machine.engine_refused(2, "other GPUs", network.now, is_final=True)
    network.node_does(node, refused)
    network.node_does(node, node.machine.engine_ended(2, network.now))
    network.node_does(node, node.machine.ranks_changed(2, [a_rank(rank=1)], network.now))
    network.settle()
    assert node.machine.state == "running"
    assert updates(network) == []


def test_another_head_does_not_hear_of_the_last_engine() -> None:
    """Its generations have the same numbers."""
    network, node = a_running_node()
    network.close(node.wire or 0)
    network.stop_engine(node)
    before = list(network.seen)
    network.join(node)
    network.start(2)
    network.settle()
    assert [type(one).__name__ for one in network.seen[len(before) :]] == ["NodeJoined"]
    assert node.started == [(1, 1, 20001), (2, 1, 20002)]


def test_statistics_are_sent_when_they_change_and_five_times_a_second() -> None:
    """The newest ones, at last."""
    network, node = a_running_node()
    for steps in range(10):
        network.now += 0.01
        network.node_does(
            node, node.machine.ranks_changed(1, [a_rank(rank=1, steps=steps)], network.now)
        )
    network.settle()
    assert [one.ranks[0].steps for one in updates(network)] == [0]
    network.now += 0.2
    network.tick_node(node)
    network.settle()
    assert [one.ranks[0].steps for one in updates(network)] == [0, 9]
    for _ in range(10):
        network.now += 0.25
        network.node_does(
            node, node.machine.ranks_changed(1, [a_rank(rank=1, steps=9)], network.now)
        )
        network.tick_node(node)
        network.settle()
    assert len(updates(network)) == 2


def test_a_follower_that_has_left_connects_no_more() -> None:
    """Its engine ends first."""
    network, node = a_running_node()
    network.node_does(node, node.machine.leave("stopped", network.now))
    assert (node.is_stop_asked, node.machine.state) == (True, "ending")
    network.stop_engine(node)
    assert node.machine.state == "left"
    assert not node.machine.wants_connection(network.now + 60)


@pytest.mark.parametrize("generation", [1, 2])
def test_a_second_start_ends_the_connection(generation: int) -> None:
    """A head that lost count must not have two engines on one node."""
    network, node = a_running_node()
    peer = network.head._peers[node.wire or 0]
    peer.channel.send(Start(generation, 1, 2, "a", 1, (), "f", SPEC))
    network.tick_head()
    network.settle()
    assert node.is_stop_asked
    assert node.machine.state == "ending"
    assert len(node.started) == 1


def test_the_key_is_not_shown() -> None:
    """In what is written before the proof."""
    node = Network().add("b")
    actions = node.machine.connected(a_nonce(), 0.0)
    assert all(KEY not in action.data for action in actions if isinstance(action, Send))
