"""The ranks on other nodes beside those on the head, and the death that caused the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat

import pytest

from holdfast.errors import EngineStartError, HostFullError, NodeFullError, NodeLostError
from holdfast.labels import DeathCause
from holdfast.nodes.actions import GenerationLost
from holdfast.nodes.remote_ranks import (
    RemoteRanks,
    death_of,
    root_death,
    root_death_of_nodes,
    start_error_of,
    start_explained,
    unless_lost,
)
from holdfast.probe.measure import mark
from holdfast.records import Death, EngineStep
from sample_status import a_rank

STEPS = tuple(EngineStep(index, 8, 1, float(index), 0.5) for index in (1, 2, 3))
FIRST = replace(a_rank(), engine=0, rank=0, steps=3, recent_steps=STEPS)
SECOND = replace(a_rank(), engine=0, rank=1, steps=2, recent_steps=())
NODE_LOST = GenerationLost(1, "b", "it closed the connection", None)
KILLED = Death("worker_exit", "the worker of rank 1 (process 7) was killed by SIGKILL")
RAISED = Death("worker_exception", "rank 0: RuntimeError: closed", blames_requests=True)
REFUSED = Death("workspace_rejection", "rank 1: Workspace is locked", blames_requests=True)
STARVED = Death("host_memory", "node b: 512 MiB were available")
NODE_DEATH = Death("node_lost", "node b: it closed the connection")


async def a_remote(others: int = 1) -> RemoteRanks:
    return RemoteRanks(1, ("127.0.0.1", 20001), lambda: None, others=others)


async def never() -> Death:
    await asyncio.Event().wait()
    raise AssertionError


async def at_once(death: Death) -> Death:
    return death


def test_ranks_of_all_nodes_are_one_list_in_order() -> None:
    """Whichever node spoke first."""

    async def run() -> None:
        remote = await a_remote()
        assert remote.beside([FIRST]) == (FIRST,)
        remote.changed("c", (replace(SECOND, rank=2),))
        remote.changed("b", (SECOND,))
        assert [rank.rank for rank in remote.beside([FIRST])] == [0, 1, 2]

    asyncio.run(run())


def test_a_remote_rank_has_the_steps_of_the_first_as_far_as_it_has_come() -> None:
    """They are not sent: all ranks of an engine run the same."""

    async def run() -> None:
        remote = await a_remote()
        remote.changed("b", (SECOND, replace(SECOND, engine=1)))
        _, second, of_another_engine = remote.beside([FIRST])
        assert second.recent_steps == STEPS[:2]
        assert of_another_engine.recent_steps == ()

    asyncio.run(run())


def test_a_workspace_that_grew_on_another_node_has_grown() -> None:
    """The proof, which then does not count, looks at the ranks of all nodes."""

    async def run() -> list[bool]:
        remote = await a_remote()
        remote.changed("b", (replace(SECOND, growths={"locked": 0}),))
        before = mark(remote.beside([FIRST]))
        grew = [before.grew(remote.beside([FIRST]))]
        remote.changed("b", (replace(SECOND, growths={"locked": 1}),))
        return [*grew, before.grew(remote.beside([FIRST]))]

    assert asyncio.run(run()) == [False, True]


def test_the_first_loss_counts() -> None:
    """What follows is its consequence."""

    async def run() -> Death:
        remote = await a_remote()
        remote.lost(NODE_LOST)
        remote.lost(GenerationLost(1, "c", "its processes ended", None))
        return await remote.until_lost()

    assert asyncio.run(run()) == NODE_DEATH


def test_a_death_on_another_node_names_the_node() -> None:
    """The cause, and whether it accuses requests, stay."""
    death = death_of(GenerationLost(1, "b", str(REFUSED), REFUSED))
    assert death == replace(REFUSED, reason=f"node b: {REFUSED.reason}")


@pytest.mark.parametrize(
    ("here", "there", "root"),
    [
        (KILLED, None, KILLED),
        (None, REFUSED, REFUSED),
        (KILLED, NODE_DEATH, NODE_DEATH),
        (RAISED, NODE_DEATH, NODE_DEATH),
        (KILLED, STARVED, STARVED),
        (STARVED, NODE_DEATH, STARVED),
        (RAISED, STARVED, STARVED),
        (RAISED, KILLED, KILLED),
        (RAISED, REFUSED, REFUSED),
        (KILLED, RAISED, KILLED),
        (REFUSED, RAISED, REFUSED),
        (RAISED, replace(RAISED, reason="rank 1"), RAISED),
        (Death("unknown", "vLLM reports a dead engine"), KILLED, KILLED),
    ],
)
def test_the_root_is_what_no_lost_peer_explains(
    here: Death | None, there: Death | None, root: Death
) -> None:
    """A rank that loses its peer raises; nothing else follows from it."""
    assert root_death(here, there) == root


def test_there_is_no_root_without_a_death() -> None:
    """At least one rank has to have died."""
    with pytest.raises(ValueError, match="nothing"):
        root_death(None, None)


def test_a_death_on_the_head_waits_for_what_caused_it() -> None:
    """The exception on the head comes before the news of the other node."""

    async def run() -> Death:
        remote = await a_remote()
        asyncio.get_running_loop().call_later(0.05, remote.lost, NODE_LOST)
        return await root_death_of_nodes(at_once(RAISED), remote)

    assert asyncio.run(run()) == NODE_DEATH


def test_a_lost_node_is_a_death_at_once() -> None:
    """Nothing on the head may notice for minutes."""

    async def run() -> Death:
        remote = await a_remote()
        remote.lost(NODE_LOST)
        return await root_death_of_nodes(never(), remote)

    assert asyncio.run(run()) == NODE_DEATH


@pytest.mark.parametrize("local", [RAISED, None])
def test_a_third_node_may_tell_later_what_caused_a_death(local: Death | None) -> None:
    """The exception of the second only follows from it."""

    async def run() -> Death:
        remote = await a_remote(others=2)
        remote.lost(GenerationLost(1, "b", str(RAISED), RAISED))
        later = GenerationLost(1, "c", str(KILLED), KILLED)
        asyncio.get_running_loop().call_later(0.05, remote.lost, later)
        return await root_death_of_nodes(never() if local is None else at_once(local), remote)

    assert asyncio.run(run()) == replace(KILLED, reason=f"node c: {KILLED.reason}")


def test_a_death_is_told_at_once_when_no_node_is_left_to_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two exceptions on two nodes: nothing else will come."""
    monkeypatch.setattr("holdfast.nodes.remote_ranks.SETTLE_SECONDS", 3600.0)

    async def run() -> Death:
        remote = await a_remote()
        remote.lost(GenerationLost(1, "b", str(RAISED), RAISED))
        return await root_death_of_nodes(at_once(RAISED), remote)

    assert asyncio.run(run()) == RAISED


def test_a_start_fails_because_of_what_a_third_node_tells_later() -> None:
    """The next one waits for that node."""

    async def run() -> None:
        remote = await a_remote(others=2)
        remote.lost(GenerationLost(1, "b", str(RAISED), RAISED))
        asyncio.get_running_loop().call_later(
            0.05, remote.lost, GenerationLost(1, "c", str(KILLED), KILLED)
        )
        async with start_explained(remote):
            raise EngineStartError("rank 0: connection closed by peer")

    with pytest.raises(NodeLostError, match="node c: the worker of rank 1"):
        asyncio.run(run())


def test_a_start_without_memory_here_stays_one() -> None:
    """The ranks on another node raise when those here are killed, and the next start waits."""

    async def run() -> None:
        remote = await a_remote()
        remote.lost(GenerationLost(1, "b", str(RAISED), RAISED))
        async with start_explained(remote):
            raise HostFullError("the host ran out of memory")

    with pytest.raises(HostFullError, match=r"^the host ran out of memory$"):
        asyncio.run(run())


def test_a_start_without_memory_here_that_lost_a_node_has_lost_it() -> None:
    """No lack of memory here costs a node its connection."""

    async def run() -> None:
        remote = await a_remote()
        remote.lost(NODE_LOST)
        async with start_explained(remote):
            raise HostFullError("the host ran out of memory")

    with pytest.raises(NodeLostError, match="node b: it closed the connection"):
        asyncio.run(run())


def test_a_compiler_on_any_other_node_counts() -> None:
    """Until each has ended."""

    async def run() -> list[bool]:
        remote = await a_remote(others=2)
        seen = []
        for node, is_compiling in (("b", True), ("c", True), ("b", False), ("c", False)):
            remote.changed(node, (SECOND,), is_compiling=is_compiling)
            seen.append(remote.is_compiling)
        return seen

    assert asyncio.run(run()) == [True, True, True, False]


def test_a_start_without_a_loss_fails_with_its_own_error() -> None:
    """On one node there is nothing else to say."""

    async def run(remote: RemoteRanks | None) -> None:
        async with start_explained(remote):
            raise EngineStartError("no memory")

    with pytest.raises(EngineStartError, match="no memory"):
        asyncio.run(run(None))


def test_a_start_that_failed_because_a_node_was_lost_says_so() -> None:
    """The next start waits for the node, and is not the end of the server."""

    async def run() -> None:
        remote = await a_remote()
        remote.lost(NODE_LOST)
        async with start_explained(remote):
            raise EngineStartError("rank 0: connection closed by peer")

    with pytest.raises(NodeLostError, match="node b: it closed the connection"):
        asyncio.run(run())


def test_a_part_of_a_start_ends_when_a_node_is_lost() -> None:
    """It would wait for that node until a deadline of its own, and it is cancelled."""
    ended = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def run() -> None:
        remote = await a_remote()
        asyncio.get_running_loop().call_soon(remote.lost, NODE_LOST)
        await unless_lost(wait(), remote)

    with pytest.raises(NodeLostError, match="node b: it closed the connection"):
        asyncio.run(run())
    assert ended


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_part_of_a_start_without_a_loss_returns_or_fails_as_it_does(is_alone: bool) -> None:
    """On one node, too."""

    async def fail() -> None:
        raise EngineStartError("no memory")

    async def run() -> Death:
        remote = None if is_alone else await a_remote()
        with pytest.raises(EngineStartError, match="no memory"):
            await unless_lost(fail(), remote)
        return await unless_lost(at_once(KILLED), remote)

    assert asyncio.run(run()) == KILLED


def test_a_start_for_which_another_node_has_no_memory_can_wait_for_it() -> None:
    """As it does for the memory of this host."""
    death = Death("host_memory", "node b: 512 MiB were available")
    error = start_error_of(death, "rank 0: closed")
    assert isinstance(error, NodeFullError)
    assert error.cause.endswith("node b: 512 MiB were available")


def test_a_start_that_failed_on_both_nodes_shows_both() -> None:
    """An exception of a rank may follow from the other's."""
    error = start_error_of(replace(RAISED, reason="node b: rank 1: no memory"), "rank 0: closed")
    assert not isinstance(error, NodeLostError)
    assert "node b: rank 1: no memory; rank 0: closed" in error.cause


@pytest.mark.parametrize("cause", ["worker_exit", "core_exit", "terminated", "stall"])
def test_a_start_waits_for_a_node_whose_process_was_killed_or_stopped(cause: DeathCause) -> None:
    """Its exception on the head, which follows from that, is not the end of the server."""
    error = start_error_of(replace(KILLED, cause=cause), "rank 0: closed")
    assert isinstance(error, NodeLostError)
    assert error.cause == KILLED.reason


def test_a_start_in_which_a_process_of_another_node_crashes_has_failed() -> None:
    """It would crash again, as on one node."""
    error = start_error_of(replace(KILLED, blames_requests=True))
    assert not isinstance(error, NodeLostError)
    assert error.cause.endswith(KILLED.reason)


def asked_until_reported(answers: Iterable[bool], deadline_seconds: float) -> int:
    """How often `until_reported` asks whether the reports are enough, if these are the answers."""
    asked = 0
    coming = iter(answers)

    def is_enough() -> bool:
        nonlocal asked
        asked += 1
        return next(coming)

    async def run() -> None:
        remote = await a_remote()
        await remote.until_reported(is_enough, deadline_seconds)

    asyncio.run(run())
    return asked


def test_reports_are_awaited_until_they_are_enough() -> None:
    """It asks again until then, and no longer."""
    assert asked_until_reported([False, False, True], 3600.0) == 3


def test_waiting_for_reports_ends_at_its_deadline() -> None:
    """A rank may never report, however often it is asked."""
    assert asked_until_reported(repeat(False), 0.1) > 1
