"""Generations that the head hands to followers over real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from holdfast.errors import NodeLostError, UsageError
from holdfast.labels import NodeRefusalReason
from holdfast.nodes.actions import NodeJoined, NodeLeft, PeerRefused
from holdfast.nodes.generations import (
    MAX_KNOWN_NODES,
    EngineOverNodes,
    NodeGenerations,
    node_generations,
)
from holdfast.nodes.head import Head
from holdfast.nodes.listener import NodePort
from holdfast.nodes.remote_ranks import RemoteRanks
from holdfast.records import Death, NodeStatus
from node_pairs import FACTS, KEY, SPEC
from node_scenes import DEADLINE_SECONDS, StandInEngine, following
from sample_status import a_rank, a_status

ENGINE = EngineOverNodes(
    nodes=2, master_address="127.0.0.1", arguments=("model", "--seed", "1"), fingerprint="f00d"
)
HERE = replace(a_rank(), engine=0, rank=0)
THERE = replace(a_rank(), engine=0, rank=1)
MISSING = "waiting for other nodes: 0 of 1 joined"
WRONG_KEY = b"another-key-another-key-another-key"


@dataclass
class Scene:
    """The head's generations, and what happened."""

    generations: NodeGenerations
    port: int
    refused: list[NodeRefusalReason] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)

    async def until_complete(self) -> None:
        await self.generations.until_complete(self.waits.append)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():  # noqa: ASYNC110 - no event tells of every condition
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def started(self, engine: StandInEngine) -> AsyncIterator[RemoteRanks]:
        """Run a generation while entered, which the follower has started."""
        await self.until_complete()
        async with self.generations.generation(SPEC) as remote:
            await self.until(lambda: engine.started)
            yield remote


@asynccontextmanager
async def _scene(engine: EngineOverNodes, find_digest: Callable[[], str]) -> AsyncIterator[Scene]:
    head = Head(key=KEY, name="head", model="m", facts=FACTS, nodes=engine.nodes)
    refused: list[NodeRefusalReason] = []
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = NodePort(sock, "127.0.0.1", KEY, None)
        async with node_generations(
            head, engine, port, on_refused=refused.append, find_digest=find_digest
        ) as generations:
            yield Scene(generations, sock.getsockname()[1], refused)


def play(
    act: Callable[[Scene], Awaitable[None]],
    engine: EngineOverNodes = ENGINE,
    *,
    find_digest: Callable[[], str] = lambda: FACTS.model_digest,
) -> None:
    """Act with a head that waits for followers, within a deadline."""

    async def run() -> None:
        async with asyncio.timeout(2 * DEADLINE_SECONDS), _scene(engine, find_digest) as scene:
            await act(scene)

    asyncio.run(run())


def test_a_generation_waits_for_the_nodes_and_says_so() -> None:
    """It may take as long as a person needs to switch a machine on. Then it waits no more."""

    async def act(scene: Scene) -> None:
        waiting = asyncio.create_task(scene.until_complete())
        await scene.until(lambda: scene.waits)
        async with following(scene.port):
            await waiting
            await scene.until_complete()
        assert scene.waits == [
            MISSING,
            "starting the engine on all nodes",
        ]

    play(act)


def test_a_follower_gets_the_engine_with_the_spec_and_a_port_of_its_own() -> None:
    """Each generation has another port, so that nothing of the last can interfere."""

    async def run(scene: Scene, engine: StandInEngine, generation: int) -> int:
        await scene.until_complete()
        spec = replace(SPEC, generation=generation)
        async with scene.generations.generation(spec) as remote:
            await scene.until(lambda: len(engine.started) == generation)
            order = engine.started[-1]
            assert (order.master_address, order.master_port) == remote.master
            assert order.arguments == ENGINE.arguments
            assert (order.fingerprint, order.spec) == ("f00d", spec)
            assert (order.nodes, order.node_rank) == (2, 1)
        await scene.until(lambda: engine.stopped == list(range(1, generation + 1)))
        return order.master_port

    async def act(scene: Scene) -> None:
        async with following(scene.port) as (engine, _, _):
            assert await run(scene, engine, 1) != await run(scene, engine, 2)

    play(act)


def test_a_port_that_is_drawn_again_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may give the same one twice."""
    drawn = iter([20001, 20001, 20001, 20002])
    monkeypatch.setattr("holdfast.nodes.generations.free_port", lambda _: next(drawn))

    async def act(scene: Scene) -> None:
        async with following(scene.port) as (engine, _, _):
            async with scene.started(engine):
                pass
            await scene.until_complete()
            async with scene.generations.generation(replace(SPEC, generation=2)):
                await scene.until(lambda: len(engine.started) == 2)
            assert [order.master_port for order in engine.started] == [20001, 20002]

    play(act)


def test_a_head_without_another_port_has_lost_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries again, as after any loss."""
    monkeypatch.setattr("holdfast.nodes.generations.free_port", lambda _: 20001)

    async def act(scene: Scene) -> None:
        async with following(scene.port) as (engine, _, _):
            async with scene.started(engine):
                pass
            await scene.until_complete()
            with pytest.raises(NodeLostError, match="no other free port"):
                async with scene.generations.generation(replace(SPEC, generation=2)):
                    pass

    play(act)


def test_a_head_whose_address_is_gone_has_lost_its_nodes() -> None:
    """The interface of a cable that is out may lose its address; it tries again."""

    async def act(scene: Scene) -> None:
        async with following(scene.port):
            await scene.until_complete()
            with pytest.raises(NodeLostError, match=r"cannot use 192\.0\.2\.1: "):
                async with scene.generations.generation(SPEC):
                    pass

    play(act, replace(ENGINE, master_address="192.0.2.1"))


def test_what_the_ranks_of_a_follower_report_is_seen() -> None:
    """With the node in the list of all nodes."""

    async def act(scene: Scene) -> None:
        async with (
            following(scene.port) as (engine, _, dialer),
            scene.started(engine) as remote,
        ):
            dialer.ranks_changed(1, [THERE])
            await scene.until(lambda: len(remote.beside([HERE])) == 2)
            status = scene.generations.added_to(a_status(ranks=remote.beside([HERE])))
            assert status.nodes_wanted == 2
            here, there = status.nodes
            assert (here.is_joined, here.ranks) == (True, ((0, 0),))
            assert there == NodeStatus("b", is_joined=True, ranks=((0, 1),))

    play(act)


def test_a_follower_that_leaves_ends_the_generation() -> None:
    """Its name stays in the list, with what happened."""

    async def act(scene: Scene) -> None:
        async with (
            following(scene.port) as (engine, _, dialer),
            scene.started(engine) as remote,
        ):
            dialer.leave("its operator said so")
            death = await remote.until_lost()
            assert death.cause == "node_lost"
            assert death.reason.startswith("node b: it leaves")
        await scene.until(lambda: not scene.generations.statuses([HERE])[1].is_joined)
        assert "leaves" in scene.generations.statuses([HERE])[1].problem

    play(act)


def test_the_ranks_of_a_node_that_is_lost_are_not_those_of_the_head() -> None:
    """What is known of them stays until the next engine reports, but is on no node."""

    async def act(scene: Scene) -> None:
        async with (
            following(scene.port) as (engine, _, dialer),
            scene.started(engine) as remote,
        ):
            dialer.ranks_changed(1, [THERE])
            await scene.until(lambda: len(remote.beside([HERE])) == 2)
            dialer.leave("its operator said so")
            await remote.until_lost()
        await scene.until(lambda: not scene.generations.statuses([HERE])[1].is_joined)
        here, there = scene.generations.statuses([HERE, THERE])
        assert (here.name, here.ranks) == ("head", ((0, 0),))
        assert (there.name, there.ranks) == ("b", ())

    play(act)


def test_a_death_on_a_follower_is_the_death_of_the_generation() -> None:
    """And the next one can start, since the follower is free again."""

    async def act(scene: Scene) -> None:
        async with following(scene.port) as (engine, _, dialer):
            async with scene.started(engine) as remote:
                dialer.engine_lost(1, Death("worker_exit", "rank 1 was killed by SIGKILL"))
                assert await remote.until_lost() == Death(
                    "worker_exit", "node b: rank 1 was killed by SIGKILL"
                )
            await scene.until_complete()

    play(act)


def test_files_that_were_replaced_on_all_nodes_keep_no_follower_away() -> None:
    """The head looks again when a follower has others, and before each engine."""
    digests = [FACTS.model_digest]
    looks: list[str] = []

    def look() -> str:
        looks.append(digests[0])
        return digests[0]

    async def act(scene: Scene) -> None:
        waiting = asyncio.create_task(scene.until_complete())
        await scene.until(lambda: scene.waits)
        digests[0] = "01"
        new = replace(FACTS, model_digest="01")
        async with following(scene.port, facts=new):
            await scene.until(lambda: scene.refused == ["different"] and "01" in looks)
        async with following(scene.port, facts=new) as (engine, _, _):
            await waiting
            digests[0] = "02"
            async with scene.started(engine):
                assert engine.started[0].model_digest == "02"

    play(act, find_digest=look)


def test_a_model_that_cannot_be_read_does_not_end_the_wait() -> None:
    """It may be copied just now; the start says so if it is still missing then."""

    def find_digest() -> str:
        raise UsageError("the model cannot be read", remedy="copy it")

    async def act(scene: Scene) -> None:
        async with following(scene.port):
            await scene.until_complete()

    play(act, find_digest=find_digest)


def test_files_that_hang_are_told_and_do_not_keep_the_head_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of a share whose server is away do; the loop would wait for its own threads."""
    monkeypatch.setattr("holdfast.nodes.generations.SLOW_FILES_SECONDS", 0.01)
    hangs, has_ended = threading.Event(), threading.Event()

    def find_digest() -> str:
        hangs.wait(DEADLINE_SECONDS)
        has_ended.set()
        return FACTS.model_digest

    async def act(scene: Scene) -> None:
        waiting = asyncio.create_task(scene.until_complete())
        await scene.until(lambda: scene.waits)
        assert scene.waits == ["reading the sizes of the model's files"]
        waiting.cancel()

    play(act, find_digest=find_digest)
    assert not has_ended.is_set()
    hangs.set()


def test_a_slow_look_at_the_files_is_told_once_in_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower with other files has the head look again each time, and would fill the log."""
    monkeypatch.setattr("holdfast.nodes.generations.SLOW_FILES_SECONDS", 0.01)
    looks: list[None] = []

    def find_digest() -> str:
        time.sleep(0.1)
        looks.append(None)
        return FACTS.model_digest

    async def act(scene: Scene) -> None:
        waiting = asyncio.create_task(scene.until_complete())
        for _ in range(3):
            await scene.until(lambda: looks and scene.waits[-1] == MISSING)
            looks.clear()
            scene.generations.report(PeerRefused("different", "another model"))
        await scene.until(lambda: looks)
        waiting.cancel()
        assert scene.waits == ["reading the sizes of the model's files", MISSING]

    play(act, find_digest=find_digest)


def test_a_generation_without_its_nodes_is_refused() -> None:
    """A follower may leave between the wait and the start."""

    async def act(scene: Scene) -> None:
        with pytest.raises(NodeLostError, match="0 of 1 joined"):
            async with scene.generations.generation(SPEC):
                pass

    play(act)


def test_a_refused_connection_is_counted_by_its_reason() -> None:
    """Here by the key."""

    async def act(scene: Scene) -> None:
        async with following(scene.port, key=WRONG_KEY):
            await scene.until(lambda: scene.refused)
        assert set(scene.refused) == {"wrong_key"}

    play(act)


def test_a_reason_to_wait_is_told_once_whatever_connects() -> None:
    """A scanner of ports would fill the log; what changes is told."""

    async def act(scene: Scene) -> None:
        waiting = asyncio.create_task(scene.until_complete())
        await scene.until(lambda: scene.waits)
        with ExitStack() as strangers:
            for _ in range(3):
                address = ("127.0.0.1", scene.port)
                stranger = strangers.enter_context(socket.create_connection(address))
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            await scene.until(lambda: len(scene.refused) == 3)
        async with following(scene.port):
            await scene.until(lambda: len(scene.waits) > 1)
            assert scene.waits == [
                "waiting for other nodes: 0 of 2 joined",
                "waiting for other nodes: 1 of 2 joined",
            ]
        waiting.cancel()

    play(act, replace(ENGINE, nodes=3))


def test_nodes_that_are_gone_are_forgotten_in_the_end() -> None:
    """Containers have a new name each time."""

    async def act(scene: Scene) -> None:
        scene.generations.report(NodeJoined("lasting"))
        for number in range(2 * MAX_KNOWN_NODES):
            scene.generations.report(NodeJoined(f"pod-{number}"))
            scene.generations.report(NodeLeft(f"pod-{number}", "it closed the connection"))
        names = [node.name for node in scene.generations.statuses([HERE])[1:]]
        assert len(names) == MAX_KNOWN_NODES
        assert {"lasting", f"pod-{2 * MAX_KNOWN_NODES - 1}"} <= set(names)

    play(act)
